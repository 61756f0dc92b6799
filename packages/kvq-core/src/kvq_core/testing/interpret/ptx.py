"""Inline PTX in Triton's interpreter, which has none: the instructions that kvq's kernels use, on numpy arrays.

Which 16-bit elements share a 32-bit register depends on layouts, which the interpreter does not know. So assembly on packed pairs runs
twice, with each element in the lower and in the upper half beside another, and must give the same result both times. Assembly that also
has 32-bit inputs may treat the two halves differently: its pairs are neighbours on the last axis.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle, _get_np_dtype

Array = npt.NDArray[Any]
Word = npt.NDArray[np.uint32]
"""One 32-bit register of all threads."""
HALF = np.uint32(0xFFFF)
UP = np.uint32(16)


class AsmLog(list[str]):
    """The assembly texts that ran. ``prefetched``: addresses of ``prefetch.global.L2``."""

    def __init__(self) -> None:
        super().__init__()
        self.prefetched: set[int] = set()


@contextlib.contextmanager
def interpreted_ptx() -> Iterator[AsmLog]:
    """Interpret inline assembly inside the block; yields a log of it."""
    log = AsmLog()

    def create_inline_asm(builder: Any, asm: str, constraints: str, values: list[Any], types: list[Any], pure: bool, pack: int) -> _Results:
        log.append(asm)
        if asm.startswith("prefetch.global.L2 [$1];"):
            assert not pure and pack == 1, "a pure prefetch would be removed, as its result is unused"
            addresses = values[0].data
            log.prefetched.update(addresses.ravel().tolist())
            return _Results([TensorHandle(np.zeros(addresses.shape, np.int32), types[0].scalar)])
        return _create_inline_asm(asm, constraints, values, types, pure, pack)

    builder: Any = interpreter.InterpreterBuilder
    create, written = builder.create_inline_asm, tl.inline_asm_elementwise

    @functools.wraps(written)
    def inline_asm_elementwise(*args: Any, **kwargs: Any) -> Any:
        results = written(*args, **kwargs)
        # Kernels concatenate tuples; the interpreter's are Python's, and Triton's cannot be added to them.
        return tuple(results) if isinstance(results, tl.tuple) else results

    builder.create_inline_asm, tl.inline_asm_elementwise = create_inline_asm, inline_asm_elementwise
    try:
        yield log
    finally:
        builder.create_inline_asm, tl.inline_asm_elementwise = create, written


class _Results:
    def __init__(self, handles: list[Any]) -> None:
        self._handles = handles

    def get_result(self, i: int) -> Any:
        return self._handles[i]


def _create_inline_asm(asm: str, constraints: str, values: list[Any], types: list[Any], pure: bool, pack: int) -> _Results:
    """In the place of ``InterpreterBuilder.create_inline_asm``, which raises."""
    assert pure, "no side effects"
    arrays = [np.ascontiguousarray(value.data) for value in values]
    bits = [array.view(f"u{array.dtype.itemsize}").astype(np.uint32) for array in arrays]
    if pack > 2:
        return _Results([TensorHandle(_of_many(asm, constraints, bits, pack).view(arrays[0].dtype), types[0].scalar)])
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
        random = np.random.default_rng(0)
        # What says where bits go (a permutation of bytes, say) is of another element of the last two axes, since a third is of warps, which
        # share no register; what bits there are is random.
        others = [random.integers(0, 1 << 16, bits[0].shape, dtype=np.uint32)]
        order = random.permutation(math.prod(bits[0].shape[-2:]))
        others += [own.reshape(*own.shape[:-2], -1)[..., order].reshape(own.shape) for own in bits[1:]]
        registers = [count for is_wide in wide for count in ([2] if is_wide else [1])]
        low = run(asm, [own | other << UP for own, other in zip(bits, others, strict=True)], sum(registers))
        high = run(asm, [own << UP | other for own, other in zip(bits, others, strict=True)], sum(registers))
        results = []
        for at, count in zip(np.cumsum([0, *registers[:-1]]), registers, strict=True):
            as_low, as_high = (low[at], high[at + 1]) if count == 2 else (low[at] & HALF, high[at] >> UP)
            np.testing.assert_array_equal(as_low, as_high, "an element depends on its neighbour")
            results.append(as_low)
    handles = []
    for result, kind, is_wide in zip(results, types, wide, strict=True):
        words = np.ascontiguousarray(np.broadcast_to(result, bits[0].shape))
        numbers = (words if is_wide else words.astype(np.uint16)).view(_get_np_dtype(kind.scalar))
        handles.append(TensorHandle(numbers, kind.scalar))
    return _Results(handles)


def _registers(array: Array, bits: Word) -> list[Word]:
    """The registers of pairs of elements: one for 16-bit elements, two for 32-bit ones."""
    low, high = bits[..., 0::2], bits[..., 1::2]
    return [low, high] if array.dtype.itemsize == 4 else [low | high << UP]


def _of_many(asm: str, constraints: str, bits: list[Word], pack: int) -> Word:
    """Assembly on ``pack`` 32-bit elements of a thread, the first of which are also its results: neighbours on the last axis."""
    assert constraints.split(",") == ["=f"] * pack + [str(i) for i in range(pack)] + ["f"] * (pack * (len(bits) - 1))
    registers = [word for words in bits for word in np.moveaxis(words.reshape(-1, pack), 1, 0)]
    results = run(asm, [*registers[:pack], *registers], pack, first=0)
    return np.stack(results, 1).reshape(bits[0].shape)


def run(asm: str, inputs: list[Word], results: int, first: int | None = None) -> list[Word]:
    """Run ``asm`` with ``inputs`` in the registers from the ``first`` on, by default those after the ``results``; returns $0, $1, ...

    All threads are of one warp: a branch is taken by all or none, and leads to a label after it.
    """
    registers: dict[str, Any] = {f"${(results if first is None else first) + i}": word for i, word in enumerate(inputs)}
    label = ""
    body = asm.strip()
    if body.startswith("{"):
        body = body[1:-1]
    for line in (text.strip() for text in body.split(";")):
        if label:
            label = "" if line == label else label
            continue
        if not line or line.startswith(".reg") or line.endswith(":"):
            continue
        operation, _, operands = line.partition(" ")
        if operation.startswith("@!"):
            assert operands.startswith("bra.uni ")
            label = "" if registers[operation[2:]] else operands.split()[1] + ":"
            continue
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
    result = np.zeros(np.broadcast(a, b, selector).shape, np.uint32)
    for i in range(4):
        chosen = np.asarray(selector, np.uint32) >> np.uint32(4 * i) & np.uint32(0xF)
        assert np.all(chosen < 8), "prmt's sign replication is not supported"
        byte = np.where(chosen < 4, a, b) >> np.uint32(8) * (chosen % np.uint32(4)) & np.uint32(0xFF)
        result = result | byte << np.uint32(8 * i)
    return result


def _shift(by: Callable[[Word, Word], Word]) -> Callable[[Word, Word], Word]:
    """Shifts by 32 and more give 0."""
    return lambda a, b: np.where(b < 32, by(a, b & np.uint32(31)), np.uint32(0))


def _float(word: Word) -> Array:
    return np.asarray(word, np.uint32).view(np.float32).astype(np.float64)


def _word(numbers: Array) -> Word:
    return np.ascontiguousarray(numbers.astype(np.float32)).view(np.uint32)


def _toward_zero(a: Array, b: Array) -> Word:
    """a + b in float32, rounded toward zero."""
    with np.errstate(invalid="ignore", over="ignore"):
        total = a + b
        # The float64 sum's rounding error (TwoSum).
        kept = total - a
        rest = (a - (total - kept)) + (b - kept)
        near = total.astype(np.float32)
        beyond = (np.abs(near.astype(np.float64)) > np.abs(total)) | ((near == total) & (rest * total < 0))
    return _word(np.where(beyond, np.nextafter(near, np.float32(0)), near))


def _saturated(numbers: Array) -> Word:
    return _word(np.where(np.isnan(numbers), 0.0, np.clip(numbers, 0.0, 1.0)))


def _halves(word: Word) -> Array:
    return np.ascontiguousarray(np.stack((word & HALF, word >> UP), -1).astype(np.uint16)).view(np.float16).astype(np.float64)


def _from_halves(numbers: Array) -> Word:
    with np.errstate(over="ignore"):
        bits = numbers.astype(np.float16).view(np.uint16).astype(np.uint32)
    return bits[..., 0] | bits[..., 1] << UP


def _fma_f16x2(a: Word, b: Word, c: Word) -> Word:
    """Exact before the one rounding: products of float16 have 22 bits."""
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
    """Correctly rounded; the hardware's is within one unit in the last place."""
    with np.errstate(divide="ignore"):
        return _word(1.0 / _float(a))


def _square_root(a: Word) -> Word:
    """Correctly rounded, as :func:`_reciprocal`."""
    return _word(np.sqrt(_float(a)))


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": _shift(lambda a, b: a << b),
    "shf.l.wrap.b32": lambda a, b, c: b << (c & np.uint32(31)) | (a >> np.uint32(1) >> (np.uint32(31) - (c & np.uint32(31)))),
    "shr.u32": _shift(lambda a, b: a >> b),
    "lop3.b32": _lop3,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "max.s32": lambda a, b: np.maximum(a.view(np.int32), b.view(np.int32)).view(np.uint32),
    "max.u32": np.maximum,
    "prmt.b32": _prmt,
    "popc.b32": lambda a: np.bitwise_count(a).astype(np.uint32),
    "add.rz.f32": lambda a, b: _toward_zero(_float(a), _float(b)),
    "fma.rz.f32": lambda a, b, c: _toward_zero(_float(a) * _float(b), _float(c)),
    "fma.rn.sat.f32": lambda a, b, c: _saturated(_float(a) * _float(b) + _float(c)),
    "rcp.approx.ftz.f32": _reciprocal,
    "sqrt.approx.ftz.f32": _square_root,
    "mul.f32": lambda a, b: _word(_float(a) * _float(b)),
    "sub.f32": lambda a, b: _word(_float(a) - _float(b)),
    "setp.ne.s32": lambda a, b: a != b,
    "selp.b32": lambda a, b, c: np.where(c, a, b),
    "setp.neu.f32": lambda a, b: ~(_float(a) == _float(b)),
    "setp.neu.or.f32": lambda a, b, c: ~(_float(a) == _float(b)) | c,
    "vote.sync.any.pred": lambda a, threads: bool(np.any(a)),
    "fma.rn.f16x2": _fma_f16x2,
    "cvt.rn.f16x2.e4m3x2": _from_e4m3,
    "cvt.rn.satfinite.e4m3x2.f32": _to_e4m3,
}
