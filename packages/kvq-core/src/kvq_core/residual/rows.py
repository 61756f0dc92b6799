"""The exact rows of a cache, and a layer's write and read with them: the doors of the window's mode beside those of the cache's mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from kvq_core import checks
from kvq_core.backend import QuantKVBackend
from kvq_core.cache.layout import Geometry, LayerCaches
from kvq_core.cache.pages import Pages
from kvq_core.cache.sequences import GrownRow
from kvq_core.cache.snapshot import Snapshot
from kvq_core.errors import ArgumentError, OutOfBlocksError
from kvq_core.registry import get_backend
from kvq_core.residual.reads import PagedRead, attend
from kvq_core.residual.step import ResidualStep, Staging, build
from kvq_core.residual.table import SAVED, ExactGrowth, ExactTable
from kvq_core.residual.window import ResidualWindow
from kvq_core.smoothing.calibration import KeySmoothing, ModelSmoothing


class ResidualRows:
    """The exact rows of up to ``max_sequences`` sequences in the layers of a cache of ``geometry``: their blocks' memory, and who holds
    which."""

    def __init__(self, window: ResidualWindow, geometry: Geometry, max_sequences: int, device: torch.device) -> None:
        self.window, self.max_sequences = window, checks.integer("max_sequences", max_sequences, 1)
        num_blocks = self.max_sequences * window.blocks_per_sequence
        self.table = ExactTable(window, num_blocks)
        try:
            self.pages = ExactPages(window, geometry, num_blocks, device)
        except ArgumentError as error:
            if error.argument != "num_blocks":
                raise
            each = f"{window.blocks_per_sequence} blocks of {window.block_size} exact rows each"
            raise ArgumentError("max_sequences", f"{self.max_sequences} with {each}: {error.got} blocks", error.need) from None
        self._packed_block_size = geometry.block_size

    @classmethod
    def of(
        cls,
        residual_length: int,
        sink_tokens: int,
        max_sequences: int | None,
        geometry: Geometry,
        device: torch.device,
        residual_mode: str = "none",
        smoothing: ModelSmoothing | None = None,
    ) -> ResidualRows | None:
        """``None`` if nothing is kept exact.

        Raises:
            ArgumentError: as :meth:`ResidualWindow.of`; ``max_sequences`` does not fit; the rows cannot be stored with ``smoothing``.
            UnknownModeError: no installed package provides ``residual_mode``.
        """
        window = ResidualWindow.of(residual_length, sink_tokens, geometry.block_size, residual_mode)
        if window is not None and smoothing is not None:
            window.check_rotary(one.rotary for one in smoothing.values())
        if window is not None and max_sequences is not None:
            return cls(window, geometry, max_sequences, device)
        if window is not None:
            raise ArgumentError("max_sequences", None, "the number of sequences to keep exact rows of (residual_length, sink_tokens)")
        if max_sequences is not None:
            raise ArgumentError("max_sequences", max_sequences, "None: without residual_length and sink_tokens no exact rows are kept")
        return None

    @property
    def nbytes(self) -> int:
        return self.pages.nbytes

    def check_room(self, num_sequences: int) -> None:
        """Raise :class:`OutOfBlocksError` unless there is room for one more sequence than there are."""
        if num_sequences >= self.max_sequences:
            need = f"at most {self.max_sequences}, of which exact rows are kept: free one first"
            raise OutOfBlocksError(f"max_sequences: got sequence number {num_sequences + 1}, need {need}")

    @property
    def options(self) -> dict[str, Any]:
        """What makes another one like this, by the names of a cache's arguments."""
        window = self.window
        counts = {"residual_length": window.length, "sink_tokens": window.sinks, "max_sequences": self.max_sequences}
        return counts | {"residual_mode": window.mode}

    def saved(self, lengths: Mapping[int, int]) -> dict[str, torch.Tensor]:
        """What a snapshot holds of the exact rows of sequences of these ``lengths``, by name."""
        lists = self.table.saved(lengths)
        return self.pages.tensors | {name: torch.tensor(values, dtype=torch.int64, device="cpu") for name, values in lists.items()}

    def restore(self, file: Snapshot, lengths: Mapping[int, int]) -> None:
        """Take what :meth:`saved` said, of sequences of these ``lengths``; an error if it is damaged or cannot be true."""
        for name in SAVED:
            file.expect(name, torch.int64)
        for name, tensor in self.pages.tensors.items():
            file.expect(name, tensor.dtype, tuple(tensor.shape))
            file.fill(name, tensor)
        self.table.restore({name: file.tensor(name, torch.int64).tolist() for name in SAVED}, lengths)

    def append(self, rows: Sequence[GrownRow]) -> ResidualStep:
        """Plan the exact rows of packed sequences that grow by ``rows``, copy the blocks that must be copied, and make the plan true.

        The step serves until one of its sequences grows again, is truncated, forked or freed, whatever other sequences do meanwhile.
        """
        step, planned = self.prepare(rows)
        self.table.commit(planned)
        return step

    def prepare(self, rows: Sequence[GrownRow]) -> tuple[ResidualStep, tuple[ExactGrowth, ...]]:
        """:meth:`append` but for the last thing it does: ``table.commit`` of the plan returned."""
        planned = self.table.plan(rows)
        step = build(rows, planned, self.window.block_size, self._packed_block_size, self.pages.device)
        self.pages.hold(step)
        self.pages.copy_blocks(step.copies)
        return step, planned


class ExactPages:
    """The memory of ``num_blocks`` blocks of exact rows, for all layers of a cache of ``geometry``."""

    def __init__(self, window: ResidualWindow, geometry: Geometry, num_blocks: int, device: torch.device) -> None:
        self.window, self.backend = window, get_backend(window.mode)
        self._pages = self._made(replace(geometry, num_blocks=num_blocks, block_size=window.block_size, layout="head_major"), device)

    @property
    def device(self) -> torch.device:
        return self._pages.device

    def grow(self, num_blocks: int) -> None:
        """Make room for ``num_blocks`` blocks; those there are keep their numbers and rows."""
        if num_blocks > self._pages.geometry.num_blocks:
            self._pages = self._pages.enlarged(num_blocks)

    @property
    def nbytes(self) -> int:
        return self._pages.nbytes

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All bytes, by name."""
        return {f"exact_{name}": tensor for name, tensor in self._pages.tensors.items()}

    def check_rows(self, argument: str, rows: torch.Tensor, shape: tuple[int, ...]) -> None:
        """Raise :class:`ArgumentError` unless ``rows`` are of that ``shape`` and of the cache's device and dtype, to be stored as they
        are."""
        self._pages.check_rows(argument, rows, shape)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (from, to) in every layer."""
        if copies:
            self._pages.copy_blocks(copies)

    def hold(self, step: ResidualStep) -> None:
        """Copy, in every layer, what ``step`` reads in blocks that it gives up: other sequences may take these, and so may its own rows."""
        staging = step.staging
        if staging is not None and staging.num_lasting < len(staging.sources):
            given_up = staging.sources[staging.num_lasting :]
            staging.held = {name: tensor.index_select(1, given_up) for name, tensor in self._pages.tensors.items()}

    def write(
        self,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        step: ResidualStep,
        *,
        smoothing: KeySmoothing | None = None,
        positions: torch.Tensor | None = None,
    ) -> None:
        """Store a call's exact rows ``key`` [T, Hkv, D] and ``value`` [T, Hkv, Dv] in one layer. A layer may be written again.

        ``smoothing`` and ``positions``: those of the packed write; mode ``none`` stores keys as they are.
        """
        options = {"smoothing": self._of_rows(smoothing), "positions": positions}
        caches = self._pages.layers[layer]
        if step.staging is None:
            self._store(key, value, caches, step.slot_mapping, **options)
            return
        step.release()
        staged = self._staged_past(layer, step.staging)
        self._store(key, value, staged, step.staging.slot_mapping, **options)
        self._store(key, value, caches, step.slot_mapping, **options)
        step.staging.written = (self, layer, staged)

    def read_from(self, layer: int, step: ResidualStep) -> LayerCaches:
        """Where a call's exact rows are read in a layer.

        Raises:
            ArgumentError: they were not written, or are gone, since those of another layer were written.
        """
        if step.staging is None:
            return self._pages.layers[layer]
        written = step.staging.written
        if written is None or written[0] is not self or written[1] != layer:
            need = "the layer that was written last with this step: new tokens beyond its residual window are exact until its next write"
            raise ArgumentError("layer", layer, need)
        return written[2]

    def attend(
        self,
        backend: QuantKVBackend,
        layer: int,
        q: torch.Tensor,
        packed: LayerCaches,
        out: torch.Tensor,
        step: ResidualStep,
        *,
        smoothing: KeySmoothing | None = None,
        output_scale: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        qq_bias: torch.Tensor | None = None,
        **options: Any,
    ) -> None:
        """Attention of ``q`` [T, Hq, D] over a layer's exact rows and its ``packed`` ones of ``backend``, into ``out`` [T, Hq, Dv].

        ``options``: those of ``unified_attention`` that both reads have. The sinks' logits and the bias of new tokens are the exact read's.

        Raises:
            ArgumentError: an option does not fit, or this window cannot serve it, or the layer was not the last one written with ``step``.
        """
        self.window.check(**options)
        exact = self.read_from(layer, step)
        of_rows = {"sinks": sinks, "qq_bias": qq_bias, "smoothing": self._of_rows(smoothing)}
        older = None
        if step.packed is not None:
            of_packed = {"key_stops": step.key_stops, "first_positions": step.first_positions, "smoothing": smoothing}
            older = PagedRead(backend, packed, vars(step.packed) | of_packed)
        newest = PagedRead(self.backend, exact, vars(step.exact) | of_rows)
        attend(q, out, newest, older, output_scale=output_scale, **options)

    def gather_blocks(self, blocks: torch.Tensor) -> None:
        """Block i becomes what block ``blocks[i]`` was, in every layer; ``blocks`` [n] int64."""
        self._pages.gather_blocks(blocks)

    def _staged_past(self, layer: int, staging: Staging) -> LayerCaches:
        """Blocks to read a call in, with the exact rows of before."""
        pages = self._made(replace(self._pages.geometry, num_blocks=staging.num_blocks, num_layers=1), self.device)
        sources = staging.sources if staging.held is None else staging.sources[: staging.num_lasting]
        for name, target in pages.tensors.items():
            past = self._pages.tensors[name][layer, sources]
            target[0, staging.targets] = past if staging.held is None else torch.cat((past, staging.held[name][layer]))
        return pages.layers[0]

    def _of_rows(self, smoothing: KeySmoothing | None) -> KeySmoothing | None:
        """What of a layer's ``smoothing`` its exact rows are stored with: rows that are not quantized need none."""
        return None if self.window.mode == "none" or smoothing is None else smoothing.unordered

    def _made(self, geometry: Geometry, device: torch.device) -> Pages:
        return Pages(self.backend, geometry, device, None, None)

    def _store(self, key: torch.Tensor, value: torch.Tensor, caches: LayerCaches, slot_mapping: torch.Tensor, **options: Any) -> None:
        self.backend.reshape_and_cache(key, value, slot_mapping=slot_mapping, **vars(caches), **options)
