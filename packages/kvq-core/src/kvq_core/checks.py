"""What callers may pass: each check gives the value back as kvq uses it, or raises :class:`ArgumentError` naming the argument.

Numbers may be of numpy's types wherever they may be Python's; a bool is no number, and neither is a tensor, whose value is on its device.
The first line of each check is all that the usual type takes.
"""

from __future__ import annotations

import os
from numbers import Integral, Real
from typing import TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

from kvq_core.errors import ArgumentError, described

T = TypeVar("T")
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1


def integer(argument: str, value: object, least: int = 0, most: int = INT32_MAX) -> int:
    """An integer of ``least .. most``."""
    found = value if type(value) is int else _converted_integer(argument, value)
    if not least <= found <= most:
        need = f"{least} .. {most}" if most < INT32_MAX else "a positive integer" if least == 1 else f"at least {least}"
        raise ArgumentError(argument, described(value), need if found < least or most < INT32_MAX else f"at most {most}")
    return found


def _converted_integer(argument: str, value: object) -> int:
    if isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]  # of torch.compile, which counts with it
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ArgumentError(argument, described(value), "an integer")
    return int(value)


def real(argument: str, value: object) -> float:
    """A number; it may be infinite or NaN, which is for the caller to judge."""
    if type(value) is float:
        return value
    if isinstance(value, torch.SymFloat | torch.SymInt):
        return value  # type: ignore[return-value]
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ArgumentError(argument, described(value), "a number")
    try:
        return float(value)
    except OverflowError:
        raise ArgumentError(argument, described(value), "a number within float64") from None


def flag(argument: str, value: object) -> bool:
    """True or False."""
    if value is True or value is False:
        return value
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise ArgumentError(argument, described(value), "True or False")


def tensor(argument: str, value: object) -> torch.Tensor:
    """A tensor with memory that strides describe."""
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(argument, described(value), "a torch.Tensor")
    if value.layout is not torch.strided or value.is_nested or value.is_quantized:
        kind = "nested" if value.is_nested else "quantized" if value.is_quantized else str(value.layout)
        raise ArgumentError(argument, f"a {kind} tensor", "a dense one")
    # torch.compile can trace neither question, nor does it need an answer.
    if not torch.compiler.is_compiling() and (value.is_neg() or value.is_conj()):
        raise ArgumentError(argument, "a view that negates lazily", "a plain one: resolve_neg() makes it")
    return value


def has_values(x: torch.Tensor) -> bool:
    """Whether there is something to look at: not in a tensor of meta, or of a tracer."""
    return not (x.is_meta or isinstance(x, FakeTensor) or torch.compiler.is_compiling())


def floats(argument: str, value: object, rank: int, shape: str) -> torch.Tensor:
    """A floating-point tensor with so many dimensions; ``shape`` names them."""
    found = tensor(argument, value)
    if found.dim() != rank or not found.is_floating_point():
        raise ArgumentError(argument, f"shape {tuple(found.shape)}, {found.dtype}", f"{shape} floats")
    return found


def finite(argument: str, given: torch.Tensor, *, positive: bool = False) -> None:
    """Finite numbers in ``given`` [...] floats; ``positive``: and such that both they and their reciprocals are normal ones. Waits for the
    device."""
    least = torch.finfo(given.dtype).tiny
    wrong = (given < least) | (given > 1 / least) | given.isnan() if positive else ~given.isfinite()
    if bool(wrong.any()):
        needed = f"positive, finite numbers ({least:g} to {1 / least:g})" if positive else "finite numbers"
        raise ArgumentError(argument, float(given[wrong][0]), needed)


def instance(argument: str, value: object, kind: type[T]) -> T:
    """An object of ``kind``."""
    if not isinstance(value, kind):
        raise ArgumentError(argument, described(value), f"a {kind.__name__}")
    return value


def path(argument: str, value: object) -> str:
    """The path of a file."""
    try:
        found = os.fspath(value)  # type: ignore[call-overload]
    except TypeError:
        found = None
    if not isinstance(found, str) or not found or "\0" in found:
        raise ArgumentError(argument, described(value), "the path of a file")
    return found


def device(argument: str, value: object) -> torch.device:
    """A CPU or CUDA device that is there."""
    try:
        found = torch.device(value)  # type: ignore[call-overload]
    except (RuntimeError, TypeError, ValueError):
        raise ArgumentError(argument, described(value), "a CPU or CUDA device") from None
    if not isinstance(value, torch.device | str) or found.type not in ("cpu", "cuda"):
        raise ArgumentError(argument, described(value), "a CPU or CUDA device")
    if found.type == "cuda" and not (found.index or 0) < torch.cuda.device_count():
        raise ArgumentError(argument, found, f"one of the {torch.cuda.device_count()} CUDA devices there are, or cpu")
    return found


def shape_of(given: torch.Tensor) -> str:
    """A tensor's shape, for an error."""
    return f"shape {tuple(given.shape)}"


def need(condition: bool, argument: str, got: object, needed: str) -> None:
    """Raise :class:`ArgumentError` unless ``condition``."""
    if not condition:
        raise ArgumentError(argument, got, needed)


def need_tensor(given: torch.Tensor, argument: str, rank: int, dtypes: tuple[torch.dtype, ...], device: torch.device) -> None:
    """A tensor with so many dimensions, of one of ``dtypes``, on ``device``."""
    tensor(argument, given)
    # What is checked most puts its message together only when it is needed.
    if given.dim() != rank:
        raise ArgumentError(argument, shape_of(given), f"{rank} dimensions")
    if given.dtype not in dtypes:
        raise ArgumentError(argument, given.dtype, " or ".join(str(d) for d in dtypes))
    if given.device != device:
        raise ArgumentError(argument, f"a tensor on {given.device}", f"one on {device}")


def need_rows(given: torch.Tensor, argument: str) -> None:
    """A tensor whose last dimension is contiguous."""
    if given.stride(-1) != 1 and given.shape[-1] > 1:
        raise ArgumentError(argument, f"strides {given.stride()}", "a contiguous last dimension")


def window_left(window_size: tuple[int, int] | None) -> int:
    """The left window of an engine's ``window_size`` pair; raise :class:`ArgumentError` for windows that look ahead.

    ``(-1, -1)`` and ``None`` mean no window (-1), and so does one wider than any sequence, with which int32 arithmetic would overflow.
    The right half must be 0 or -1, since attention over a cache is causal.
    """
    if window_size is None:
        return -1
    needed = "a pair of integers (left, right), left at least -1 and right 0 or -1"
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise ArgumentError("window_size", described(window_size), needed) from None
    if not (type(left) is type(right) is int):
        left, right = (integer("window_size", half, -INT64_MAX, INT64_MAX) for half in (left, right))
    if not -1 <= left <= INT64_MAX or right not in (0, -1):
        raise ArgumentError("window_size", described(window_size), needed)
    return left if left < INT32_MAX else -1
