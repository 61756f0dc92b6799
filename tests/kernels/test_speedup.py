"""``testing.interpret.speedup``: Triton's interpreter does once what it would do at each call, and gives the same results."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

pytestmark = pytest.mark.quick


@triton.jit
def digits(a, b):
    return a * 10 + b


@triton.jit
def halved(x):
    return x * 0.5 + tl.zeros([4, 2], tl.float32)


@triton.jit
def compute(x, y, by_row, by_column, rounds: tl.constexpr):
    tl.static_assert(rounds < 9)
    row, column = tl.arange(0, 4), tl.arange(0, 2)
    at = row[:, None] * 2 + column[None, :]
    block = tl.load(x + at)
    tl.store(by_row + row, tl.reduce(block, 1, digits))
    tl.store(by_column + column[None, :], tl.reduce(block, 0, digits, keep_dims=True))
    z = (block + 1) * 1.5 + (block > 1) + True - (block.to(tl.float32) - 1) / 2 + tl.load(x + row)[:, None]
    for _ in tl.static_range(rounds):
        z = halved(z)
    tl.store(y + at, z)


def launch(rounds: int) -> None:
    """Its results must be right."""
    x = torch.arange(1, 9, dtype=torch.int32).reshape(4, 2)
    y, by_row, by_column = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    compute[(1,)](x, y, by_row, by_column, rounds)
    assert by_row.tolist() == [12, 34, 56, 78] and by_column.tolist() == [1357, 2468]
    assert torch.equal(y, ((x + 1) * 1.5 + (x > 1) + 1 - (x.float() - 1) / 2 + x.flatten()[:4, None]) / 2**rounds)


def test_a_launch_patches_the_language_once_and_restores_it(interpreted: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other launches take types and numbers from the first, a launch that failed leaves nothing."""
    launch(1)
    patches: Counter[str] = Counter()
    replace: Callable[..., None] = interpreter._patch_builtin

    def counted(part: Any, *arguments: Any) -> None:
        patches[part.__name__] += 1
        replace(part, *arguments)

    monkeypatch.setattr(interpreter, "_patch_builtin", counted)
    before = (tl.load, tl.static_range, tl.static_assert, tl.tensor.__add__)
    seen = []
    for rounds in (1, 8, 9, 2):
        patches.clear()
        if rounds < 9:
            launch(rounds)
            seen.append(patches.copy())
        else:
            with pytest.raises(Exception, match="AssertionError"):
                launch(rounds)
        assert (tl.load, tl.static_range, tl.static_assert, tl.tensor.__add__) == before
    assert seen[0] == seen[1] == seen[2] > Counter()
