"""``testing.interpret.speedup``: Triton's interpreter does once what it would do at each call, and gives the same results."""

import dataclasses
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


@triton.jit
def outer_sum(x, y, z):
    row, column = tl.arange(0, 4), tl.arange(0, 2)
    both = tl.load(x + row)[:, None] * 10 + tl.load(y + column)[None, :]
    tl.store(z + row[:, None] * 2 + column[None, :], both + both)


@triton.jit
def largest(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def digits(a, b):
    return a * 10 + b


@triton.jit
def reduce_both_axes(x, by_row, by_column, combine: tl.constexpr):
    row, column = tl.arange(0, 4), tl.arange(0, 2)
    block = tl.load(x + row[:, None] * 2 + column[None, :])
    tl.store(by_row + row, tl.reduce(block, 1, combine))
    tl.store(by_column + column[None, :], tl.reduce(block, 0, combine, keep_dims=True))


@triton.jit
def with_numbers(x, y):
    at = tl.arange(0, 8)
    whole = tl.load(x + at)
    tl.store(y + at, (whole + 1) * 1.5 + (whole > 1) + True - (whole.to(tl.float32) - 1) / 2)


@triton.jit
def increment(x):
    tl.store(x, tl.load(x) + 1)


@pytest.fixture
def patches(interpreted: torch.device, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the functions of each part of the language were replaced."""
    counts: Counter[str] = Counter()
    replace: Callable[..., None] = interpreter._patch_builtin

    def counted(part: Any, *arguments: Any) -> None:
        counts[part.__name__] += 1
        replace(part, *arguments)

    monkeypatch.setattr(interpreter, "_patch_builtin", counted)
    return counts


def patches_of_a_launch(patches: Counter[str], rounds: int) -> Counter[str]:
    """Its result must be right."""
    patches.clear()
    x = torch.arange(8.0)
    halve[(1,)](x, rounds, 1)
    assert torch.equal(x, torch.arange(8.0) / 2**rounds)
    return patches.copy()


def test_a_launch_patches_the_language_once(patches: Counter[str]) -> None:
    patches_of_a_launch(patches, 1)  # the first launch rewrites the functions
    once = patches_of_a_launch(patches, 1)
    assert once == patches_of_a_launch(patches, 9) > Counter()
    x = torch.ones(8)
    with pytest.raises(Exception, match="AssertionError"):
        halve[(1,)](x, 2, 3)
    assert torch.equal(x, torch.ones(8))
    assert patches_of_a_launch(patches, 2) == once, "after a launch that failed"


def test_a_launch_restores_the_language(interpreted: torch.device) -> None:
    before = (tl.load, tl.static_range, tl.static_assert, tl.tensor.__add__)
    halve[(1,)](torch.ones(8), 3, 1)
    assert (tl.load, tl.static_range, tl.static_assert, tl.tensor.__add__) == before
    interpreter._patch_lang(halve.fn).restore()  # nor is it taken for patched
    assert (tl.load, tl.static_range, tl.static_assert, tl.tensor.__add__) == before


def plain(kind: type, *arguments: Any) -> Any:
    """An object as Triton alone makes it."""
    made = object.__new__(kind)
    kind.__init__.__wrapped__(made, *arguments)  # type: ignore[misc]
    return made


@pytest.mark.parametrize("shape", [(), (1,), (8,), (4, 16), (2, 1, 8)], ids=str)
@pytest.mark.parametrize(
    "element", [tl.float32, tl.int1, tl.uint16, tl.bfloat16, tl.pointer_type(tl.float16), tl.pointer_type(tl.int32)], ids=str
)
def test_types_and_tensors_are_as_triton_makes_them(interpreted: torch.device, element: Any, shape: tuple[int, ...]) -> None:
    kind = element
    if shape:
        kind = plain(tl.block_type, element, list(shape))
        for sizes in (list(shape), [tl.constexpr(size) for size in shape], tl.tuple(list(shape))):
            block = tl.block_type(element, sizes)
            assert block == kind
            assert (str(block), block.numel, tuple(block.shape), block.scalar) == (str(kind), kind.numel, shape, element)
    for handle in "01":  # the second of a type is made from what the first left
        wanted, tensor = plain(tl.tensor, handle, kind), tl.tensor(handle, kind)
        assert vars(tensor).keys() == vars(wanted).keys()
        assert tensor.handle == handle and tensor.type is kind
        (shape_of, wanted_shape) = ([size.value for size in one.shape] for one in (tensor, wanted))
        assert (tensor.dtype, shape_of, tensor.numel.value) == (wanted.dtype, wanted_shape, wanted.numel.value)


def test_tensors_of_other_shapes_are_broadcast(interpreted: torch.device) -> None:
    z = torch.zeros(4, 2, dtype=torch.int32)
    outer_sum[(1,)](torch.arange(4, dtype=torch.int32), torch.arange(2, dtype=torch.int32), z)
    assert z.tolist() == [[2 * (10 * i + j) for j in range(2)] for i in range(4)]


@pytest.mark.parametrize(
    ("combine", "rows", "columns"),
    [(digits, [12, 34, torch.nan, 78], [1357, torch.nan]), (largest, [2, 4, torch.nan, 8], [7, torch.nan])],
    ids=["digits", "largest"],
)
def test_blocks_are_reduced_in_order(interpreted: torch.device, combine: Any, rows: list[float], columns: list[float]) -> None:
    x, by_row, by_column = torch.arange(1.0, 9.0).reshape(4, 2), torch.zeros(4), torch.zeros(2)
    x[2, 1] = torch.nan
    reduce_both_axes[(1,)](x, by_row, by_column, combine)
    torch.testing.assert_close((by_row, by_column), (torch.tensor(rows), torch.tensor(columns)), equal_nan=True)


def test_numbers_take_the_types_of_their_tensors(interpreted: torch.device) -> None:
    """Twice: the second launch takes the numbers' tensors from the first."""
    x = torch.arange(8, dtype=torch.int32)
    for _ in range(2):
        y = torch.zeros(8)
        with_numbers[(1,)](x, y)
        assert torch.equal(y, (x + 1) * 1.5 + (x > 1) + 1 - (x.float() - 1) / 2)


def test_overflow_is_checked_in_debug_mode(interpreted: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    most = torch.iinfo(torch.int32).max
    x = torch.tensor([most], dtype=torch.int32)
    increment[(1,)](x)
    assert x.item() == -most - 1
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, debug=True))
    x.fill_(most)
    with pytest.raises(Exception, match="overflow"):
        increment[(1,)](x)
    assert x.item() == most
