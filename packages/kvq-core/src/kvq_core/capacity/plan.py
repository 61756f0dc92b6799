"""What fits: a mode's bytes for a model's layers, and a GPU's memory divided by them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from kvq_core import checks
from kvq_core.cache.layout import cell_size, fields
from kvq_core.capacity.shape import AttentionLayer, ModelShape
from kvq_core.errors import ArgumentError
from kvq_core.registry import get_backend
from kvq_core.residual.window import ResidualWindow

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
        for name, least in (("gpu_bytes", 1), ("weight_bytes", 0), ("reserved_bytes", 0)):
            checks.integer(name, getattr(self, name), least, checks.INT64_MAX)
        if not 0 < checks.real("utilization", self.utilization) <= 1:
            raise ArgumentError("utilization", self.utilization, "a share of the memory, above 0 and up to 1")

    @property
    def cache_bytes(self) -> int:
        """What is left for the cache; negative if the weights alone do not fit."""
        return int(self.gpu_bytes * self.utilization) - self.weight_bytes - self.reserved_bytes


@dataclass(frozen=True)
class Workload:
    """What a cache is to hold.

    Attributes:
        context: tokens a sequence, prompt and output.
        concurrency: sequences at once.
        block_size: slots a block, a multiple of 8.
        residual_length, sink_tokens, residual_mode: of a residual window (:mod:`kvq_core.residual`), whose exact rows are counted as
            for :class:`~kvq_core.PagedKVCache`, but for a mode whose packed rows are no worse.

    Raises:
        ArgumentError: a number is out of range.
        UnknownModeError: no installed package provides ``residual_mode``.
    """

    context: int
    concurrency: int = 1
    block_size: int = 16
    residual_length: int = 0
    sink_tokens: int = 0
    residual_mode: str = "none"

    def __post_init__(self) -> None:
        for name in ("context", "concurrency", "block_size"):
            checks.integer(name, getattr(self, name), 1, checks.INT64_MAX)
        if self.block_size % 8:
            raise ArgumentError("block_size", self.block_size, "a multiple of 8")
        # Which refuses numbers that no window has.
        _ = self.window

    @property
    def window(self) -> ResidualWindow | None:
        """Of exact rows, if there is one."""
        return ResidualWindow.of(self.residual_length, self.sink_tokens, self.block_size, self.residual_mode)


@dataclass(frozen=True)
class CacheSize:
    """What one mode's cache of a model takes.

    Attributes:
        mode: its full name.
        bytes_per_token: what one token writes, over all layers, scales included.
        bits_per_element: bits a stored value, scales included.
        sequence_bytes: the whole blocks that one sequence of the context asked for holds, windowed layers only their window, and the
            exact rows of a residual window.
        bits_at_context: bits a value of that sequence, all of it included.
        times_smaller: than the same sequence in bf16.
        total_bytes: of ``concurrency`` sequences of the context asked for.
    """

    mode: str
    bytes_per_token: int
    bits_per_element: float
    sequence_bytes: int
    bits_at_context: float
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


@dataclass(frozen=True)
class _Costs:
    """Bytes that a token takes in layers of one kind, and one of them; and bytes that a sequence of any length takes."""

    layers: list[tuple[int, AttentionLayer]]
    fixed: int = 0

    def held(self, context: int, block_size: int) -> int:
        """Bytes of a sequence of ``context`` tokens."""
        return self.fixed + sum(nbytes * held_tokens(layer, context, block_size) for nbytes, layer in self.layers)


def _costs(backend: QuantKVBackend, shape: ModelShape, window: ResidualWindow | None = None) -> _Costs:
    kinds = Counter(shape.layers).items()
    layers = [(count * layer_bytes(backend, layer, shape.dtype), layer) for layer, count in kinds]
    if window is None or not window.serves(backend.mode):
        return _Costs(layers)
    exact = sum(count * layer_bytes(get_backend(window.mode), layer, shape.dtype) for layer, count in kinds)
    return _Costs(layers, exact * window.blocks_per_sequence * window.block_size)


def sequence_bytes(backend: QuantKVBackend, shape: ModelShape, context: int, block_size: int, window: ResidualWindow | None = None) -> int:
    """Bytes of the blocks that one sequence of ``context`` tokens holds, exact rows of ``window`` included."""
    return _costs(backend, shape, window).held(context, block_size)


def longest_context(
    backend: QuantKVBackend, shape: ModelShape, room: int, block_size: int, window: ResidualWindow | None = None
) -> int | None:
    """The longest sequence whose blocks fit in ``room`` bytes; ``None`` if any length does."""
    costs = _costs(backend, shape, window)
    if costs.held(_UNLIMITED, block_size) <= room:
        return None
    fitting, over = 0, _UNLIMITED // block_size  # in blocks
    while over - fitting > 1:
        middle = (fitting + over) // 2
        if costs.held(middle * block_size, block_size) <= room:
            fitting = middle
        else:
            over = middle
    return fitting * block_size


def size_of(backend: QuantKVBackend, shape: ModelShape, work: Workload) -> CacheSize:
    """What ``shape``'s cache takes in the mode of ``backend``, on whatever GPU.

    Raises:
        ArgumentError: the mode cannot pack the model's head sizes.
    """
    costs = _costs(backend, shape, work.window)
    values = _Costs([(layer.num_kv_heads * (layer.head_size + layer.head_size_v) * n, layer) for layer, n in Counter(shape.layers).items()])
    per_token, elements = sum(nbytes for nbytes, _ in costs.layers), sum(number for number, _ in values.layers)
    one, held = costs.held(work.context, work.block_size), values.held(work.context, work.block_size)
    return CacheSize(
        mode=backend.mode,
        bytes_per_token=per_token,
        bits_per_element=8 * per_token / elements,
        sequence_bytes=one,
        bits_at_context=8 * one / held,
        times_smaller=2 * held / one,
        total_bytes=work.concurrency * one,
    )


def capacity_of(backend: QuantKVBackend, shape: ModelShape, budget: Budget, work: Workload) -> Capacity:
    """What ``budget`` holds of ``shape``'s cache in the mode of ``backend``. Errors are those of :func:`size_of`."""
    size, room = size_of(backend, shape, work), max(budget.cache_bytes, 0)
    return Capacity(
        **vars(size),
        tokens=longest_context(backend, shape, room, work.block_size, work.window),
        sequences=room // size.sequence_bytes,
        concurrent_context=longest_context(backend, shape, room // work.concurrency, work.block_size, work.window),
        fits=size.total_bytes <= room,
    )
