"""The interpreter that the suite runs kernels in is Triton's, made to do once what it does at each call of a function."""

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


KINDS = (tl.float32, tl.int1, tl.uint16, tl.bfloat16, tl.pointer_type(tl.float16), tl.pointer_type(tl.int32))


def untold(kind: type, *arguments: Any) -> Any:
    """One of Triton's own objects, made by Triton alone."""
    made = object.__new__(kind)
    kind.__init__.__wrapped__(made, *arguments)  # type: ignore[misc]
    return made


@pytest.mark.parametrize("shape", [(1,), (8,), (4, 16), (2, 1, 8)], ids=str)
@pytest.mark.parametrize("element", KINDS, ids=str)
def test_a_type_of_block_is_what_triton_makes_of_it(interpreted: torch.device, element: Any, shape: tuple[int, ...]) -> None:
    plain = untold(tl.block_type, element, list(shape))
    for sizes in (list(shape), [tl.constexpr(size) for size in shape], tl.tuple(list(shape))):
        block = tl.block_type(element, sizes)
        assert block == plain
        assert (str(block), block.numel, tuple(block.shape), block.scalar) == (str(plain), plain.numel, shape, element)


@pytest.mark.parametrize("shape", [(), (8,), (4, 16)], ids=str)
@pytest.mark.parametrize("element", KINDS, ids=str)
def test_a_tensor_is_what_triton_makes_of_it(interpreted: torch.device, element: Any, shape: tuple[int, ...]) -> None:
    kinds = [tl.block_type(element, list(shape)) if shape else element for _ in range(2)]
    for number, kind in enumerate(kinds):
        plain, tensor = untold(tl.tensor, f"{number}", kind), tl.tensor(f"{number}", kind)
        assert vars(tensor).keys() == vars(plain).keys()
        assert tensor.handle == f"{number}" and tensor.type is kind
        assert (tensor.dtype, [x.value for x in tensor.shape], tensor.numel.value) == (
            plain.dtype,
            [x.value for x in plain.shape],
            plain.numel.value,
        )


@triton.jit
def joined(x, y, z):
    row, column = tl.arange(0, 4), tl.arange(0, 2)
    both = tl.load(x + row)[:, None] * 10 + tl.load(y + column)[None, :]
    tl.store(z + row[:, None] * 2 + column[None, :], both + both)


def test_tensors_of_other_shapes_are_spread(interpreted: torch.device) -> None:
    z = torch.zeros(4, 2, dtype=torch.int32)
    joined[(1,)](torch.arange(4, dtype=torch.int32), torch.arange(2, dtype=torch.int32), z)
    assert z.tolist() == [[2 * (10 * i + j) for j in range(2)] for i in range(4)]


@triton.jit
def incremented(x):
    tl.store(x, tl.load(x) + 1)


def test_an_overflow_is_looked_for_where_it_is_asked_for(interpreted: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    most = torch.iinfo(torch.int32).max
    x = torch.tensor([most], dtype=torch.int32)
    incremented[(1,)](x)
    assert x.item() == -most - 1
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, debug=True))
    x = torch.tensor([most], dtype=torch.int32)
    with pytest.raises(Exception, match="overflow"):
        incremented[(1,)](x)
    assert x.item() == most
