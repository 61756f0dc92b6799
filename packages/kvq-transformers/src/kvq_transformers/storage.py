"""The pages of one model layer: bytes in a mode's format, written and read through the mode's two doors."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from kvq_core.backend import QuantKVBackend
from kvq_core.cache.layout import Geometry, LayerCaches
from kvq_core.cache.pages import Pages
from kvq_core.call import ops
from kvq_core.registry import get_backend
from kvq_core.residual.reads import PagedRead
from kvq_core.residual.rows import ExactPages
from kvq_core.residual.step import ResidualStep
from kvq_core.residual.window import ResidualWindow
from kvq_core.smoothing.calibration import FIRST_PREFILL, KeySmoothing, KeyStatistics
from kvq_transformers.given import NOTHING, LayerGiven


class LayerScoring(NamedTuple):
    """How a model's layer turns q.k into weights, in the terms of ``unified_attention``.

    ``window`` is transformers' ``sliding_window``: keys a row sees, its own included (``None``: all). ``sinks`` [num_query_heads].
    """

    softmax_scale: float
    window: int | None = None
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


class LayerBatch(NamedTuple):
    """Who attends to what, as ``unified_attention`` takes it: int32 tensors on the layer's device."""

    cu_seqlens_q: torch.Tensor
    seqused_k: torch.Tensor
    block_table: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    residual: ResidualStep | None = None
    first_positions: torch.Tensor | None = None


class LayerPages:
    """K and V of one layer in ``num_blocks`` blocks, as ``backend`` stores them. Knows nothing about who holds which block.

    ``given.smoothing``: of its keys; ``FIRST_PREFILL``: their mean in the write that is told to estimate it, from then on and for good.
    ``residual``: its exact rows lie beside them, in blocks of their own.
    """

    def __init__(
        self,
        backend: QuantKVBackend,
        geometry: Geometry,
        device: torch.device,
        given: LayerGiven = NOTHING,
        *,
        residual: ResidualWindow | None = None,
    ) -> None:
        self.backend, self.device = backend, device
        self._exact = ExactPages(residual, geometry, 1, device) if residual is not None and residual.serves(backend.mode) else None
        self._scales = given.k_scale, given.v_scale
        self.geometry = geometry
        self._pages = self._allocated(geometry)
        smoothing = given.smoothing
        self.estimates = smoothing == FIRST_PREFILL if isinstance(smoothing, str) else False
        # Outside inference mode, so that both kinds of forwards may write to it.
        with torch.inference_mode(False):
            if self.estimates:
                # What is found is put here, so that compiled code finds it at the same address.
                mean = torch.zeros(geometry.num_kv_heads, geometry.head_size, dtype=torch.float32, device=device)
                smoothing = KeySmoothing(mean, None, None if given.rotary is None else given.rotary.to(device))
            # A copy: pages must be read with what they were written with.
            self.smoothing = smoothing.to(device) if isinstance(smoothing, KeySmoothing) else None
        if self.smoothing is not None:
            self.smoothing.check(geometry.num_kv_heads, geometry.head_size)
            backend.check_smoothing(self.smoothing)
        # Ops are defined at first use, which torch.compile could not trace.
        for used in (backend, get_backend("none") if self._exact is None else self._exact.backend):
            ops.define(used)

    def __deepcopy__(self, memo: dict[int, object]) -> LayerPages:
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._pages, twin._exact = deepcopy(self._pages), deepcopy(self._exact)
        if self.smoothing is not None:
            with torch.inference_mode(False):
                twin.smoothing = replace(self.smoothing, mean=self.smoothing.mean.clone())
        return twin

    def __getstate__(self) -> dict[str, Any]:
        # Bytes without the typed views of them; copies, since multiprocessing would share the memory.
        bytes_of = {name: buffer.clone() for name, buffer in self._buffers(self._pages).items()}
        exact = None if self._exact is None else (self._exact.window, {name: x.clone() for name, x in self._exact.tensors.items()})
        return self.__dict__ | {"_pages": bytes_of, "_exact": exact}

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state["_pages"]
        # Where torch.load put them.
        self.__dict__.update(state | {"device": next(iter(saved.values())).device})
        self._pages = self._allocated(replace(self.geometry, num_blocks=next(iter(saved.values())).shape[1]))
        for name, buffer in self._buffers(self._pages).items():
            buffer.copy_(saved[name])
        if state["_exact"] is not None:
            window, rows = state["_exact"]
            self._exact = ExactPages(window, self.geometry, next(iter(rows.values())).shape[1], self.device)
            for name, tensor in self._exact.tensors.items():
                tensor.copy_(rows[name])
        if self.smoothing is not None:
            with torch.inference_mode(False):
                smoothing = self.smoothing.to(self.device)
                self.smoothing = replace(smoothing, mean=smoothing.mean.clone())

    @property
    def caches(self) -> LayerCaches:
        """What the doors take."""
        return self._pages.layers[0]

    @property
    def num_blocks(self) -> int:
        return self.caches.key_cache.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, free blocks and exact rows included."""
        return self._pages.nbytes + (0 if self._exact is None else self._exact.nbytes)

    @property
    def bytes_per_token(self) -> int:
        return self._pages.bytes_per_slot

    @property
    def exact_tensors(self) -> tuple[torch.Tensor, ...]:
        """The exact rows of a residual window."""
        return () if self._exact is None else tuple(self._exact.tensors.values())

    def grow(self, num_blocks: int, num_exact_blocks: int = 0) -> None:
        """Make room for ``num_blocks`` blocks, and as many of exact rows; those there are keep their numbers and bytes."""
        if num_blocks > self.num_blocks:
            self._pages = self._pages.enlarged(num_blocks)
        if self._exact is not None:
            self._exact.grow(num_exact_blocks)

    def copy_blocks(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Copy blocks (from, to), codes and scales."""
        if copies:
            self._pages.copy_blocks(copies)

    def gather_blocks(self, blocks: torch.Tensor, exact: torch.Tensor | None = None) -> None:
        """Block i becomes what block ``blocks[i]`` was, at the same addresses; ``blocks`` [n] int64, n at most ``num_blocks``.

        ``exact``: the same of blocks of exact rows.
        """
        self._pages.gather_blocks(blocks)
        if self._exact is not None and exact is not None:
            self._exact.gather_blocks(exact)

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        slot_mapping: torch.Tensor,
        positions: torch.Tensor | None = None,
        *,
        is_first: bool = False,
        residual: ResidualStep | None = None,
    ) -> None:
        """Store rows [num_tokens, num_kv_heads, head_size(_v)] in the slots of ``slot_mapping`` (negative: skip).

        ``positions`` [num_tokens] int32: of the rows, where a rotary mean is taken off keys. ``is_first``: nothing has been stored yet.
        ``residual``: where rows go that stay exact.
        """
        caches = self.caches
        if is_first and self.estimates and self.smoothing is not None:
            statistics = KeyStatistics()
            rotary = self.smoothing.rotary
            rows = key if rotary is None or positions is None else key.float() - rotary.at(positions).float()
            statistics.add(rows, real=slot_mapping >= 0)
            mean = statistics.smoothing().mean
            # For good, so a first text that went wrong must not spoil those after a reset().
            self.smoothing.mean.copy_(torch.where(mean.isfinite(), mean, 0.0))
        self.backend.reshape_and_cache(
            key,
            value,
            caches.key_cache,
            caches.value_cache,
            slot_mapping,
            k_scale_cache=caches.k_scale_cache,
            v_scale_cache=caches.v_scale_cache,
            smoothing=self.smoothing,
            positions=positions,
        )
        if self._exact is not None and residual is not None:
            self._exact.copy_blocks(residual.copies)
            self._exact.write(0, key, value, residual, smoothing=self.smoothing, positions=positions)

    def attend(self, q: torch.Tensor, out: torch.Tensor, batch: LayerBatch, scoring: LayerScoring) -> None:
        """Causal attention of rows ``q`` [num_tokens, num_query_heads, head_size] over the pages, into ``out``."""
        caches = self.caches
        options: dict[str, Any] = {
            "cu_seqlens_q": batch.cu_seqlens_q,
            "max_seqlen_q": batch.max_seqlen_q,
            "softmax_scale": scoring.softmax_scale,
            "window_size": (-1, -1) if scoring.window is None else (scoring.window - 1, 0),
            "softcap": scoring.softcap,
            "sinks": scoring.sinks,
            "smoothing": self.smoothing,
        }
        if self._exact is not None and batch.residual is not None:
            self._exact.attend(self.backend, 0, q, caches, out, batch.residual, **options)
            batch.residual.release()
            return
        keys = {
            "seqused_k": batch.seqused_k,
            "max_seqlen_k": batch.max_seqlen_k,
            "block_table": batch.block_table,
            "first_positions": batch.first_positions,
        }
        PagedRead(self.backend, caches, keys)(q, out, **options)

    def _allocated(self, geometry: Geometry) -> Pages:
        with torch.inference_mode(False):
            return Pages(self.backend, geometry, self.device, *self._scales)

    @staticmethod
    def _buffers(pages: Pages) -> dict[str, torch.Tensor]:
        """The byte buffers [1, num_blocks, ...]; scales that a caller gives (one float a layer) are not among them."""
        return {name: tensor for name, tensor in pages.tensors.items() if tensor.dim() > 1}
