"""The interpreter that the suite runs kernels in is Triton's, made to do once what it does at each call of a function."""

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
def halved(x):
    return x * 0.5 + tl.zeros([8], tl.float32)


@triton.jit
def halve(x, rounds: tl.constexpr, least: tl.constexpr):
    at = x + tl.arange(0, 8)
    tl.static_assert(least <= rounds)
    y = tl.load(at)
    for _ in tl.static_range(rounds):
        y = halved(y)
    tl.store(at, y)


@pytest.fixture
def prepared(interpreted: torch.device, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the functions of each part of the language were replaced."""
    counts: Counter[str] = Counter()
    replace: Callable[..., None] = interpreter._patch_builtin

    def counted(part: Any, *arguments: Any) -> None:
        counts[part.__name__] += 1
        replace(part, *arguments)

    monkeypatch.setattr(interpreter, "_patch_builtin", counted)
    return counts


def preparations(prepared: Counter[str], rounds: int) -> Counter[str]:
    """Those of one launch, whose result is right."""
    prepared.clear()
    x = torch.arange(8.0)
    halve[(1,)](x, rounds, 1)
    assert torch.equal(x, torch.arange(8.0) / 2**rounds)
    return prepared.copy()


def test_calls_within_a_launch_prepare_nothing_again(prepared: Counter[str]) -> None:
    preparations(prepared, 1)  # the first launch rewrites the functions
    assert preparations(prepared, 1) == preparations(prepared, 9) > Counter()


def test_after_a_launch_the_language_is_as_before(interpreted: torch.device) -> None:
    before = (tl.load, tl.static_range, tl.static_assert, tl.tensor.__add__)
    halve[(1,)](torch.ones(8), 3, 1)
    assert (tl.load, tl.static_range, tl.static_assert, tl.tensor.__add__) == before
    interpreter._patch_lang(halve.fn).restore()  # nor is it taken for prepared
    assert (tl.load, tl.static_range, tl.static_assert, tl.tensor.__add__) == before


def test_a_launch_that_fails_leaves_the_next_one_as_it_was(prepared: Counter[str]) -> None:
    preparations(prepared, 2)
    before, x = preparations(prepared, 2), torch.ones(8)
    with pytest.raises(Exception, match="AssertionError"):
        halve[(1,)](x, 2, 3)
    assert torch.equal(x, torch.ones(8))
    assert preparations(prepared, 2) == before
