"""Inline PTX in Triton's interpreter, which has none: what the kernels' own few lines of it do, on numpy arrays.

Which elements share a 32-bit register depends on how threads hold them, which the interpreter does not know. So of two 16-bit elements in
one each stands in the lower half once and in the upper half once, beside random bits, and must come out the same. Where assembly has 32-bit
inputs, too, and so tells neighbours apart, they are those of the last axis.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle, _get_np_dtype

Word = np.ndarray
"""The registers of all threads under one name, uint32."""
HALF = np.uint32(0xFFFF)
UP = np.uint32(16)


class Done(list[str]):
    """The assembly that was done; ``requested``: the addresses that were to be brought into the L2."""

    def __init__(self) -> None:
        super().__init__()
        self.requested: set[int] = set()


@contextlib.contextmanager
def interpreted_ptx() -> Iterator[Done]:
    """The interpreter can do inline assembly inside; what it did."""
    done = Done()

    def create_inline_asm(builder: Any, asm: str, constraints: str, values: list[Any], types: list[Any], pure: bool, pack: int) -> _Results:
        done.append(asm)
        if asm.startswith("prefetch.global.L2 [$1];"):
            assert not pure and pack == 1, "a request without a result would be left out"
            addresses = values[0].data
            done.requested.update(addresses.ravel().tolist())
            return _Results([TensorHandle(np.zeros(addresses.shape, np.int32), types[0].scalar)])
        return _create_inline_asm(asm, constraints, values, types, pure, pack)

    builder: Any = interpreter.InterpreterBuilder
    create, written = builder.create_inline_asm, tl.inline_asm_elementwise

    @functools.wraps(written)
    def inline_asm_elementwise(*args: Any, **kwargs: Any) -> Any:
        results = written(*args, **kwargs)
        # Triton's own tuple cannot be added to Python's, which the interpreter has elsewhere.
        return tuple(results) if isinstance(results, tl.tuple) else results

    builder.create_inline_asm, tl.inline_asm_elementwise = create_inline_asm, inline_asm_elementwise
    try:
        yield done
    finally:
        builder.create_inline_asm, tl.inline_asm_elementwise = create, written


class _Results:
    def __init__(self, handles: list[Any]) -> None:
        self._handles = handles

    def get_result(self, i: int) -> Any:
        return self._handles[i]


def _create_inline_asm(asm: str, constraints: str, values: list[Any], types: list[Any], pure: bool, pack: int) -> _Results:
    """As ``InterpreterBuilder.create_inline_asm``, which raises."""
    assert pure and pack in (1, 2), "no side effects, an element or two a register"
    arrays = [np.ascontiguousarray(value.data) for value in values]
    bits = [array.view(f"u{array.dtype.itemsize}").astype(np.uint32) for array in arrays]
    wide = [_get_np_dtype(kind.scalar).itemsize == 4 for kind in types]
    if pack == 1:
        results = run(asm, bits, len(types))
    elif any(array.dtype.itemsize == 4 for array in arrays):
        assert wide == [False], "one result, of 16 bits"
        bits = [word for array, word in zip(arrays, bits, strict=True) for word in _registers(array, word)]
        (pairs,) = run(asm, bits, 1)
        results = [np.stack((pairs & HALF, pairs >> UP), -1).reshape(arrays[0].shape)]
        bits = [results[0]]
    else:
        # What says where bits go is the same for neighbours; what bits there are is not.
        others = [np.random.default_rng(0).integers(0, 1 << 16, bits[0].shape, dtype=np.uint32), *bits[1:]]
        registers = [count for is_wide in wide for count in ([2] if is_wide else [1])]
        low = run(asm, [own | other << UP for own, other in zip(bits, others, strict=True)], sum(registers))
        high = run(asm, [own << UP | other for own, other in zip(bits, others, strict=True)], sum(registers))
        results = []
        for at, count in zip(np.cumsum([0, *registers[:-1]]), registers, strict=True):
            as_low, as_high = (low[at], high[at + 1]) if count == 2 else (low[at] & HALF, high[at] >> UP)
            np.testing.assert_array_equal(as_low, as_high, "an element minds its neighbour")
            results.append(as_low)
    handles = []
    for result, kind, is_wide in zip(results, types, wide, strict=True):
        words = np.ascontiguousarray(np.broadcast_to(result, bits[0].shape))
        numbers = (words if is_wide else words.astype(np.uint16)).view(_get_np_dtype(kind.scalar))
        handles.append(TensorHandle(numbers, kind.scalar))
    return _Results(handles)


def _registers(array: np.ndarray, bits: Word) -> list[Word]:
    """Those that pairs of elements are in: one of 16-bit elements, two of 32-bit ones."""
    low, high = bits[..., 0::2], bits[..., 1::2]
    return [low, high] if array.dtype.itemsize == 4 else [low | high << UP]


def run(asm: str, inputs: list[Word], results: int) -> list[Word]:
    """Registers $0, $1, ... after ``asm``, with ``inputs`` in those that follow the ``results``."""
    registers: dict[str, Any] = {f"${results + i}": word for i, word in enumerate(inputs)}
    body = asm.strip()
    if body.startswith("{"):
        body = body[1:-1]
    for line in (text.strip() for text in body.split(";")):
        if not line or line.startswith(".reg"):
            continue
        operation, _, operands = line.partition(" ")
        target, *sources = re.findall(r"\{[^}]*\}|[^,\s]+", operands)
        value = _OPERATIONS[operation](*(_value(source, registers) for source in sources))
        if target.startswith("{"):
            low, high = re.findall(r"[^{},\s]+", target)
            registers[low], registers[high] = value & HALF, value >> UP
        else:
            registers[target] = value
    return [registers[f"${i}"] for i in range(results)]


def _value(name: str, registers: dict[str, Any]) -> Any:
    if name in registers:
        return registers[name]
    return np.uint32(int(name[2:], 16) if name.startswith("0f") else int(name, 0))


def _lop3(a: Word, b: Word, c: Word, table: Any) -> Word:
    result = np.zeros(np.broadcast(a, b, c).shape, np.uint32)
    for row in range(8):
        if int(table) >> row & 1:
            x, y, z = (word if row >> bit & 1 else ~word for word, bit in ((a, 2), (b, 1), (c, 0)))
            result |= x & y & z
    return result


def _prmt(a: Word, b: Word, selector: Any) -> Word:
    result = np.zeros(np.broadcast(a, b).shape, np.uint32)
    for place in range(4):
        chosen = int(selector) >> (4 * place) & 0xF
        assert chosen < 8, "no sign is replicated"
        byte = (a if chosen < 4 else b) >> np.uint32(8 * (chosen % 4)) & np.uint32(0xFF)
        result = result | byte << np.uint32(8 * place)
    return result


def _shift(by: Callable[[Word, Word], Word]) -> Callable[[Word, Word], Word]:
    """By 32 and more nothing is left."""
    return lambda a, b: np.where(b < 32, by(a, b & np.uint32(31)), np.uint32(0))


def _float(word: Word) -> np.ndarray:
    return np.asarray(word, np.uint32).view(np.float32).astype(np.float64)


def _word(numbers: np.ndarray) -> Word:
    return np.ascontiguousarray(numbers.astype(np.float32)).view(np.uint32)


def _toward_zero(a: np.ndarray, b: np.ndarray) -> Word:
    """a + b in float32, cut off."""
    with np.errstate(invalid="ignore", over="ignore"):
        total = a + b
        # What the sum in float64 leaves out, exactly.
        kept = total - a
        rest = (a - (total - kept)) + (b - kept)
        near = total.astype(np.float32)
        beyond = (np.abs(near.astype(np.float64)) > np.abs(total)) | ((near == total) & (rest * total < 0))
    return _word(np.where(beyond, np.nextafter(near, np.float32(0)), near))


def _saturated(numbers: np.ndarray) -> Word:
    return _word(np.where(np.isnan(numbers), 0.0, np.clip(numbers, 0.0, 1.0)))


def _halves(word: Word) -> np.ndarray:
    return np.ascontiguousarray(np.stack((word & HALF, word >> UP), -1).astype(np.uint16)).view(np.float16).astype(np.float64)


def _from_halves(numbers: np.ndarray) -> Word:
    with np.errstate(over="ignore"):
        bits = numbers.astype(np.float16).view(np.uint16).astype(np.uint32)
    return bits[..., 0] | bits[..., 1] << UP


def _fma_f16x2(a: Word, b: Word, c: Word) -> Word:
    """Exact but for the last rounding: products of float16 have 22 bits."""
    a, b, c = np.broadcast_arrays(a, b, c)
    return _from_halves(_halves(a) * _halves(b) + _halves(c))


def _from_e4m3(word: Word) -> Word:
    codes = np.ascontiguousarray(np.stack((word & np.uint32(0xFF), word >> np.uint32(8) & np.uint32(0xFF)), -1).astype(np.uint8))
    return _from_halves(torch.from_numpy(codes).view(torch.float8_e4m3fn).double().numpy())


def _to_e4m3(high: Word, low: Word) -> Word:
    def code(word: Word) -> Word:
        bounded = np.clip(_float(word), -448.0, 448.0).astype(np.float32)
        return torch.from_numpy(np.ascontiguousarray(bounded)).to(torch.float8_e4m3fn).view(torch.uint8).numpy().astype(np.uint32)

    return code(high) << np.uint32(8) | code(low)


def _reciprocal(a: Word) -> Word:
    """Rounded, which the hardware's is within a unit in the last place."""
    with np.errstate(divide="ignore"):
        return _word(1.0 / _float(a))


_OPERATIONS: dict[str, Callable[..., Word]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": _shift(lambda a, b: a << b),
    "shf.l.wrap.b32": lambda a, b, c: b << (c & np.uint32(31)) | (a >> np.uint32(1) >> (np.uint32(31) - (c & np.uint32(31)))),
    "shr.u32": _shift(lambda a, b: a >> b),
    "lop3.b32": _lop3,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "max.s32": lambda a, b: np.where(a.view(np.int32) > b.view(np.int32), a, b),
    "max.u32": np.maximum,
    "prmt.b32": _prmt,
    "popc.b32": lambda a: np.bitwise_count(a).astype(np.uint32),
    "add.rz.f32": lambda a, b: _toward_zero(_float(a), _float(b)),
    "fma.rz.f32": lambda a, b, c: _toward_zero(_float(a) * _float(b), _float(c)),
    "fma.rn.sat.f32": lambda a, b, c: _saturated(_float(a) * _float(b) + _float(c)),
    "rcp.approx.ftz.f32": _reciprocal,
    "fma.rn.f16x2": _fma_f16x2,
    "cvt.rn.f16x2.e4m3x2": _from_e4m3,
    "cvt.rn.satfinite.e4m3x2.f32": _to_e4m3,
}
