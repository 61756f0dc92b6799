"""Memory that bites: every byte 0xFF, which is NaN in every float format, and a record of which bytes changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
GAP = 256
_TOGETHER = 2**28  # bytes compared at once: torch finds the places of no more than 2^31


@dataclass(frozen=True)
class Field:
    """A strided tensor inside a byte buffer. ``strides`` in elements, ``offset`` in bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def of(self, raw: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """This field of the byte buffer ``raw``, seen as ``dtype`` (of the same width)."""
        return raw.view(dtype or self.dtype).as_strided(self.shape, self.strides, self.offset // self.dtype.itemsize)


class Poisoned:
    """A byte buffer of 0xFF with named fields, which knows which of its bytes were meant to change."""

    def __init__(self, num_bytes: int, fields: dict[str, Field], device: torch.device) -> None:
        self.raw = torch.full((-(-num_bytes // 16) * 16,), 0xFF, dtype=torch.uint8, device=device)
        self.fields = fields
        self._before = self.raw.clone()

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.fields[name].of(self.raw)

    def integers(self, name: str) -> torch.Tensor:
        """Field ``name``, seen as integers of its width."""
        field = self.fields[name]
        return field.of(self.raw, _INTEGERS[field.dtype.itemsize])

    def settle(self) -> None:
        """From here on, changes are counted."""
        self._before = self.raw.clone()

    def restore(self) -> None:
        """Back to the last :meth:`settle`."""
        self.raw.copy_(self._before)

    def spoil(self, name: str, where: tuple[torch.Tensor, ...]) -> None:
        """0xFF into every byte of ``field[where]``."""
        self.integers(name)[where] = -1

    def changed(self) -> bool:
        return not torch.equal(self.raw, self._before)

    def assert_only_changed(self, index: Mapping[str, tuple[torch.Tensor | slice, ...]], what: str) -> None:
        """Fail if a byte outside ``field[index]`` of the given fields changed since :meth:`settle`."""
        allowed = torch.zeros_like(self.raw)
        for name, where in index.items():
            field = self.fields[name]
            field.of(allowed, _INTEGERS[field.dtype.itemsize])[where] = -1
        count, first = 0, -1
        for start in range(0, self.raw.numel(), _TOGETHER):
            part = slice(start, start + _TOGETHER)
            stray = ((self.raw[part] != self._before[part]) & (allowed[part] == 0)).nonzero().flatten()
            if len(stray):
                first = start + int(stray[0]) if first < 0 else first
                count += len(stray)
        if count:
            raise AssertionError(f"{what} changed {count} bytes it does not own, the first {self._where(first)}")

    def _where(self, byte: int) -> str:
        name = min(self.fields, key=lambda n: (self.fields[n].offset > byte, abs(self.fields[n].offset - byte)))
        return f"{byte - self.fields[name].offset} bytes after the start of {name}"


def lay_out(parts: dict[str, tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]], device: torch.device) -> Poisoned:
    """Fields one after another with poisoned gaps; ``parts``: name -> (dtype, shape, strides)."""
    fields, offset = {}, GAP
    for name, (dtype, shape, strides) in parts.items():
        fields[name] = Field(dtype, shape, strides, offset)
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if all(shape) else 0
        offset += -(-extent * dtype.itemsize // GAP) * GAP + GAP
    return Poisoned(offset, fields, device)
