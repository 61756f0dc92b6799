"""Where a cache's bytes lie: raw byte buffers, and the typed, strided views of them that the doors take.

::

    head_major    a buffer per field, [L, B, H, P, bytes]   one head's tokens of a block side by side: what the kernels like best
    token_major   a buffer per field, [L, B, P, H, bytes]   one token's heads side by side
    interleaved   one buffer,         [L, B, P, H, cell]    cell = [K codes | K scale f32 | V codes | V scale f32], as vLLM has it

``L`` layers, ``B`` blocks of ``P`` slots, ``H`` kv heads. Every view is a view: none of them copies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Self

import torch

from kvq_core import checks
from kvq_core.call.spec import FLOATS
from kvq_core.errors import ArgumentError, described

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend

LAYOUTS: Final = ("head_major", "token_major", "interleaved")


@dataclass(frozen=True)
class Geometry:
    """How much a cache holds and in which order."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    num_layers: int
    dtype: torch.dtype
    layout: str

    @property
    def key_heads(self) -> tuple[int, int]:
        """(num_kv_heads, head_size)."""
        return (self.num_kv_heads, self.head_size)

    def checked(self) -> Self:
        """The same with Python's own integers; :class:`kvq_core.ArgumentError` naming the first field that no cache can have."""
        counts = ("num_blocks", "block_size", "num_kv_heads", "head_size", "head_size_v", "num_layers")
        integers: dict[str, Any] = {name: checks.integer(name, getattr(self, name), 1) for name in counts}
        found = replace(self, **integers)
        _check_block_size(found.block_size)
        _check_dtype(self.dtype)
        if not isinstance(self.layout, str) or self.layout not in LAYOUTS:
            raise ArgumentError("layout", described(self.layout), f"one of {', '.join(LAYOUTS)}")
        return found

    def validate(self, backend: QuantKVBackend) -> None:
        """Raise :class:`ArgumentError` naming the first field that ``backend`` cannot hold."""
        self.checked()
        backend.check_head_size(self.head_size, "head_size")
        backend.check_head_size(self.head_size_v, "head_size_v")

    def buffer_shape(self, cell: int) -> tuple[int, ...]:
        """The shape of a buffer that holds ``cell`` bytes per (token, head)."""
        inner = (self.num_kv_heads, self.block_size) if self.layout == "head_major" else (self.block_size, self.num_kv_heads)
        return (self.num_layers, self.num_blocks, *inner, cell)


@dataclass(frozen=True)
class Field:
    """One thing stored per (token, head): ``width`` elements of ``dtype``; ``None`` for a single one without a dimension of its own."""

    name: str
    width: int | None
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return (1 if self.width is None else self.width) * self.dtype.itemsize


@dataclass(frozen=True)
class LayerCaches:
    """One layer's caches as the doors take them.

    ``key_cache`` and ``value_cache`` [B, P, H, packed_head_size]; ``k_scale_cache`` and ``v_scale_cache`` [B, P, H] float32, one element
    for ``fp8_per_tensor``, ``None`` for ``none``.
    """

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    k_scale_cache: torch.Tensor | None
    v_scale_cache: torch.Tensor | None


def fields(backend: QuantKVBackend, head_size: int, head_size_v: int, dtype: torch.dtype) -> tuple[Field, ...]:
    """What a mode stores per (token, head), in the order of a cell."""
    stored: list[Field] = []
    for name, half, size in (("key", backend.key_half, head_size), ("value", backend.value_half, head_size_v)):
        stored.append(Field(f"{name}_cache", half.packed_head_size(size), half.cache_dtype(dtype)))
        if backend.needs_scale_caches:
            stored.append(Field(f"{name[0]}_scale_cache", None, torch.float32))
    return tuple(stored)


def buffers_of(backend: QuantKVBackend, geometry: Geometry) -> dict[str, tuple[Field, ...]]:
    """The buffers a cache of this geometry has, by name, each with the fields of its cell; :class:`ArgumentError` if they do not align."""
    geometry.validate(backend)
    stored = fields(backend, geometry.head_size, geometry.head_size_v, geometry.dtype)
    if geometry.layout != "interleaved":
        return {field.name: (field,) for field in stored}
    _check_alignment(stored, "layout", "interleaved", (cell_size(stored),))
    return {"cells": stored}


def cell_size(stored: tuple[Field, ...]) -> int:
    """Bytes per (token, head)."""
    return sum(field.nbytes for field in stored)


def split(cells: torch.Tensor, stored: tuple[Field, ...]) -> dict[str, torch.Tensor]:
    """Typed views of ``cells`` [..., cell] uint8, one per field: [..., width], or [...] for a field without a width."""
    views, first = {}, 0
    for field in stored:
        view = cells[..., first : first + field.nbytes].view(field.dtype)
        views[field.name] = view.squeeze(-1) if field.width is None else view
        first += field.nbytes
    return views


def cell_views(backend: QuantKVBackend, cells: torch.Tensor, head_size: int, head_size_v: int, dtype: torch.dtype) -> LayerCaches:
    """Views of an engine's own interleaved cells, vLLM's for one, ready for the doors.

    Args:
        cells: [num_blocks, block_size, num_kv_heads, cell] of any dtype, any strides but the last:
            ``[K codes | K scale f32 | V codes | V scale f32]``, without the scales for modes that store none.
        head_size, head_size_v: of K and of V.
        dtype: of the K/V rows to come.

    Raises:
        ArgumentError: ``cells`` does not have that form, or its scales do not lie on multiples of four bytes.
    """
    stored = _checked_fields(backend, head_size, head_size_v, dtype)
    size, item = cell_size(stored), checks.tensor("cells", cells).dtype.itemsize
    if cells.dim() != 4 or cells.shape[-1] * item != size:
        got = f"shape {tuple(cells.shape)}, {cells.dtype}"
        raise ArgumentError("cells", got, f"[num_blocks, block_size, num_kv_heads, cell] with cells of {size} bytes")
    if cells.stride(-1) != 1:
        raise ArgumentError("cells", f"strides {cells.stride()}", "a contiguous last dimension")
    steps = tuple(item * int(step) for step in (*cells.stride()[:3], cells.storage_offset()))
    _check_alignment(stored, "cells", f"strides {steps[:3]} bytes from byte {steps[3]}", steps)
    return layer_caches(split(cells.view(torch.uint8), stored))


def page_views(
    backend: QuantKVBackend, pages: torch.Tensor, block_size: int, num_kv_heads: int, head_size: int, head_size_v: int, dtype: torch.dtype
) -> LayerCaches:
    """Views of an engine's own pages, whose bytes are laid out as the kernels like them: one head-major plane per field.

    ::

        page = [K codes H, P, bytes | V codes H, P, bytes | K scales H, P | V scales H, P | padding]

    As many bytes as a page of cells has, so an engine that only counts bytes per (token, head) can offer either.

    Args:
        pages: [num_blocks, bytes] uint8, any block stride; bytes past the planes are not used.
        block_size, num_kv_heads: P, a multiple of 8, and H.
        head_size, head_size_v: of K and of V.
        dtype: of the K/V rows to come.

    Raises:
        ArgumentError: an argument does not fit ``backend``; a page has too few bytes, or planes would not lie on multiples of their item
            size.
    """
    stored = _checked_fields(backend, head_size, head_size_v, dtype)
    block_size, num_kv_heads = (checks.integer(n, x, 1) for n, x in (("block_size", block_size), ("num_kv_heads", num_kv_heads)))
    _check_block_size(block_size)
    need = block_size * num_kv_heads * cell_size(stored)
    if checks.tensor("pages", pages).dim() != 2 or pages.dtype != torch.uint8 or pages.shape[1] < need:
        raise ArgumentError("pages", f"shape {tuple(pages.shape)}, {pages.dtype}", f"[num_blocks, at least {need}] torch.uint8")
    if pages.stride(1) != 1:
        raise ArgumentError("pages", f"strides {pages.stride()}", "a contiguous last dimension")
    views, first = {}, 0
    # Codes first: they need the widest alignment and take a multiple of it.
    for field in sorted(stored, key=lambda field: field.width is None):
        size = block_size * num_kv_heads * field.nbytes
        steps = (first, int(pages.stride(0)), int(pages.storage_offset()))
        if any(step % field.dtype.itemsize for step in steps):
            got = f"block stride {steps[1]} from byte {steps[2]}, {field.name} at byte {first} of a page"
            raise ArgumentError("pages", got, f"multiples of {field.dtype.itemsize}")
        plane = pages[:, first : first + size].view(field.dtype)
        inner = (num_kv_heads, block_size) if field.width is None else (num_kv_heads, block_size, field.width)
        views[field.name] = plane.unflatten(1, inner).transpose(1, 2)
        first += size
    return layer_caches(views)


def layer_caches(views: dict[str, torch.Tensor]) -> LayerCaches:
    """The caches among ``views``, by name; scale caches that are not among them are ``None``."""
    return LayerCaches(views["key_cache"], views["value_cache"], views.get("k_scale_cache"), views.get("v_scale_cache"))


def layer_views(geometry: Geometry, buffers: dict[str, torch.Tensor], stored: dict[str, tuple[Field, ...]], layer: int) -> LayerCaches:
    """One layer's views of ``buffers``, in logical order [B, P, H, ...]."""
    views: dict[str, torch.Tensor] = {}
    for name, buffer in buffers.items():
        cells = buffer[layer].transpose(1, 2) if geometry.layout == "head_major" else buffer[layer]
        views |= split(cells, stored[name])
    return layer_caches(views)


def _checked_fields(backend: QuantKVBackend, head_size: int, head_size_v: int, dtype: torch.dtype) -> tuple[Field, ...]:
    """:func:`fields` of what an engine gives; :class:`ArgumentError` if ``backend`` cannot store it."""
    _check_dtype(dtype)
    for name, head in (("head_size", head_size), ("head_size_v", head_size_v)):
        backend.check_head_size(head, name)
    return fields(backend, int(head_size), int(head_size_v), dtype)


def _check_dtype(dtype: object) -> None:
    if not isinstance(dtype, torch.dtype) or dtype not in FLOATS:
        raise ArgumentError("dtype", described(dtype), f"{' or '.join(map(str, FLOATS))}, the dtype of the K/V rows to come")


def _check_block_size(block_size: int) -> None:
    if block_size % 8:
        raise ArgumentError("block_size", block_size, "a multiple of 8")


def _check_alignment(stored: tuple[Field, ...], argument: str, got: str, steps: tuple[int, ...]) -> None:
    """Raise unless every field starts on a multiple of its item size, in the first cell and in all that follow at ``steps`` of bytes."""
    first = 0
    for field in stored:
        size = field.dtype.itemsize
        if first % size or any(step % size for step in steps):
            drawn = " + ".join(f"{other.nbytes} {other.name}" for other in stored)
            raise ArgumentError(argument, f"{got}, cells of {drawn} bytes", f"{field.name} on a multiple of {size} bytes")
        first += field.nbytes
