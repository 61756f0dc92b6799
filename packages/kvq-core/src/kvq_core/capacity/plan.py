"""What fits: a mode's bytes for a model's layers, and a GPU's memory divided by them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from kvq_core.cache.layout import cell_size, fields
from kvq_core.capacity.shape import AttentionLayer, ModelShape
from kvq_core.errors import ArgumentError

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend

GIB: Final = 2**30
_UNLIMITED: Final = 2**48
"""Tokens that nobody has: a search for the longest sequence ends here."""


@dataclass(frozen=True)
class Budget:
    """A GPU's memory: ``utilization`` of ``gpu_bytes`` is used; weights, and ``reserved_bytes`` for the rest, are taken off it."""

    gpu_bytes: int
    weight_bytes: int
    reserved_bytes: int = 0
    utilization: float = 0.9

    def __post_init__(self) -> None:
        if self.gpu_bytes < 1:
            raise ArgumentError("gpu_bytes", self.gpu_bytes, "a positive number of bytes")
        for name in ("weight_bytes", "reserved_bytes"):
            if getattr(self, name) < 0:
                raise ArgumentError(name, getattr(self, name), "a number of bytes, 0 or more")
        if not 0 < self.utilization <= 1:
            raise ArgumentError("utilization", self.utilization, "a share of the memory, above 0 and up to 1")

    @property
    def cache_bytes(self) -> int:
        """What is left for the cache; negative if the weights alone do not fit."""
        return int(self.gpu_bytes * self.utilization) - self.weight_bytes - self.reserved_bytes


@dataclass(frozen=True)
class CacheSize:
    """What one mode's cache of a model takes.

    Attributes:
        mode: its full name.
        bytes_per_token: what one token writes, over all layers, scales included.
        bits_per_element: bits a stored value, scales included.
        sequence_bytes: the whole blocks that one sequence of the context asked for holds, windowed layers only their window.
        times_smaller: than the same sequence in bf16.
        total_bytes: of ``concurrency`` sequences of the context asked for.
    """

    mode: str
    bytes_per_token: int
    bits_per_element: float
    sequence_bytes: int
    times_smaller: float
    total_bytes: int


@dataclass(frozen=True)
class Capacity(CacheSize):
    """One mode on one model and GPU.

    Attributes:
        tokens: the longest single sequence that fits; ``None`` if there is no end to it, since every layer has a window.
        sequences: how many of the context asked for fit at once.
        concurrent_context: the longest context that ``concurrency`` sequences can all have; ``None`` as for ``tokens``.
        fits: whether ``total_bytes`` do.
    """

    tokens: int | None
    sequences: int
    concurrent_context: int | None
    fits: bool


def layer_bytes(backend: QuantKVBackend, layer: AttentionLayer, dtype: torch.dtype) -> int:
    """Bytes that one token takes in one layer, as :class:`~kvq_core.PagedKVCache` lays them out: codes and scales of K and V.

    Raises:
        ArgumentError: the mode cannot pack the layer's head sizes.
    """
    return layer.num_kv_heads * cell_size(fields(backend, layer.head_size, layer.head_size_v, dtype))


def held_tokens(layer: AttentionLayer, context: int, block_size: int) -> int:
    """Slots in the blocks that a layer holds for a sequence of ``context`` tokens: those its window still touches, wherever it begins."""
    blocks = -(-context // block_size)
    if layer.window is not None:
        blocks = min(blocks, -(-(layer.window - 1) // block_size) + 1)
    return blocks * block_size


_Costs = list[tuple[int, AttentionLayer]]
"""Bytes that a token takes in layers of one kind, and one of them."""


def _costs(backend: QuantKVBackend, shape: ModelShape) -> _Costs:
    return [(count * layer_bytes(backend, layer, shape.dtype), layer) for layer, count in Counter(shape.layers).items()]


def _held_bytes(costs: _Costs, context: int, block_size: int) -> int:
    return sum(nbytes * held_tokens(layer, context, block_size) for nbytes, layer in costs)


def sequence_bytes(backend: QuantKVBackend, shape: ModelShape, context: int, block_size: int) -> int:
    """Bytes of the blocks that one sequence of ``context`` tokens holds."""
    return _held_bytes(_costs(backend, shape), context, block_size)


def longest_context(backend: QuantKVBackend, shape: ModelShape, room: int, block_size: int) -> int | None:
    """The longest sequence whose blocks fit in ``room`` bytes; ``None`` if any length does."""
    costs = _costs(backend, shape)
    if _held_bytes(costs, _UNLIMITED, block_size) <= room:
        return None
    fitting, over = 0, _UNLIMITED // block_size  # in blocks
    while over - fitting > 1:
        middle = (fitting + over) // 2
        if _held_bytes(costs, middle * block_size, block_size) <= room:
            fitting = middle
        else:
            over = middle
    return fitting * block_size


def size_of(backend: QuantKVBackend, shape: ModelShape, *, context: int, concurrency: int = 1, block_size: int = 16) -> CacheSize:
    """What ``shape``'s cache takes in the mode of ``backend``, on whatever GPU.

    Args:
        context: tokens a sequence, prompt and output.
        concurrency: sequences at once.
        block_size: slots a block, a multiple of 8.

    Raises:
        ArgumentError: the mode cannot pack the model's head sizes, or a number is out of range.
    """
    for name, value in (("context", context), ("concurrency", concurrency), ("block_size", block_size)):
        if value < 1:
            raise ArgumentError(name, value, "a positive integer")
    if block_size % 8:
        raise ArgumentError("block_size", block_size, "a multiple of 8")
    costs = _costs(backend, shape)
    values = [(layer.num_kv_heads * (layer.head_size + layer.head_size_v) * n, layer) for layer, n in Counter(shape.layers).items()]
    per_token, elements = sum(nbytes for nbytes, _ in costs), sum(number for number, _ in values)
    one = _held_bytes(costs, context, block_size)
    return CacheSize(
        mode=backend.mode,
        bytes_per_token=per_token,
        bits_per_element=8 * per_token / elements,
        sequence_bytes=one,
        times_smaller=2 * _held_bytes(values, context, block_size) / one,
        total_bytes=concurrency * one,
    )


def capacity_of(
    backend: QuantKVBackend, shape: ModelShape, budget: Budget, *, context: int, concurrency: int = 1, block_size: int = 16
) -> Capacity:
    """What ``budget`` holds of ``shape``'s cache in the mode of ``backend``. Arguments and errors are those of :func:`size_of`."""
    size = size_of(backend, shape, context=context, concurrency=concurrency, block_size=block_size)
    room = max(budget.cache_bytes, 0)
    return Capacity(
        **vars(size),
        tokens=longest_context(backend, shape, room, block_size),
        sequences=room // size.sequence_bytes,
        concurrent_context=longest_context(backend, shape, room // concurrency, block_size),
        fits=size.total_bytes <= room,
    )
