"""``KVQLayer``: one attention layer of a model's cache, and its two ways of keeping account of pages.

transformers calls ``update`` with a layer's new K and V, and then the attention function with whatever ``update`` returned. A
``KVQLayer`` returns the *new* rows only, with itself attached; :func:`kvq_transformers.attention.kvq_attention` finds it there and calls
:meth:`KVQLayer.attend`, which writes the rows into the pages and attends over them. It happens there and not in ``update`` because only
the attention function is told which tokens are padding.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from kvq_core.backend import QuantKVBackend
from kvq_core.cache.layout import Geometry
from kvq_core.errors import ArgumentError, KVQError
from kvq_transformers.forward import Forward
from kvq_transformers.given import NOTHING, LayerGiven
from kvq_transformers.rows import Chunk, GrowingForward, RowTable, token_rows
from kvq_transformers.storage import LayerBatch, LayerPages, LayerScoring

HANDLE = "_kvq_layer"


def cast(states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``states`` in ``dtype``; no call of torch where they are."""
    return states if states.dtype == dtype else states.to(dtype)


class KVQLayer(CacheLayerMixin):
    """K and V of one layer in the pages of ``backend``; ``window`` is its sliding window, ``given`` what rows are stored with besides.

    ``forward`` keeps account of them for all layers of the cache.
    """

    is_croppable = True
    pages: LayerPages
    forward: Forward

    def __init__(self, backend: QuantKVBackend, index: int, window: int | None, given: LayerGiven) -> None:
        super().__init__()
        self.backend, self.index, self.window, self.given = backend, index, window, given
        self.is_sliding = window is not None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.backend.mode!r}{'' if self.window is None else f', window={self.window}'})"

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.is_initialized:
            self.device = self.pages.device

    @property
    def batch_size(self) -> int:
        return self.forward.batch_size

    # -- what transformers calls ----------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make the pages for K and V [batch_size, num_kv_heads, any, head_size(_v)] of V's dtype and device.

        K may have another dtype: under autocast, rotary embeddings make it float32. Later rows are cast to the pages' dtype.

        Raises:
            ArgumentError: the mode cannot store this head size or dtype.
        """
        batch_size, num_kv_heads, _, head_size = key_states.shape
        self.dtype, self.device = value_states.dtype, value_states.device
        sizes = {"num_kv_heads": num_kv_heads, "head_size": head_size, "head_size_v": value_states.shape[-1]}
        self._make_pages(batch_size, sizes)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Announce the layer's new K and V, [batch_size, num_kv_heads, columns, head_size(_v)]. Returns them, with this layer attached.

        Raises:
            ArgumentError: they do not fit the pages.
            KVQError: the last forward's never reached kvq's attention; or it failed and cannot be rolled back.
        """
        self._check_states(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.forward.announce(self.index)
        key = key_states.view_as(key_states)
        setattr(key, HANDLE, self)
        return key, value_states

    def offload(self) -> None:
        raise KVQError("offload: a KVQCache keeps its pages where the model's layers are")

    prefetch = offload

    # -- what the attention function calls ------------------------------------------------------------------------------

    def arrive(self) -> None:
        """What :meth:`update` returned has come to kvq's attention: before anything is refused there."""
        self.forward.arrive(self.index)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scoring: LayerScoring
    ) -> torch.Tensor:
        """Write K and V into the pages, then attend over them. Nothing of it is differentiated.

        Args:
            query: [batch_size, num_query_heads, q_columns, head_size]; fewer columns than ``key``'s are its last ones.
            key, value: as :meth:`update` got them.
            mask: [batch_size, columns] bool, which new tokens are real; ``None``: all.
            scoring: how scores become weights; a window applies besides the layer's own.

        Returns:
            [batch_size, q_columns, num_query_heads, head_size_v] in ``value``'s dtype; zeros for padding.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.attend(query, key, value, mask, scoring)
        if mask is not None and mask.shape != (key.shape[0], key.shape[2]):
            raise ArgumentError("attention_mask", f"columns {tuple(mask.shape)}", f"the {tuple(key.shape[0:3:2])} new tokens of each row")
        q, k, v = (cast(states, self.dtype) for states in (query, key, value))
        out = self._attend(q, k, v, None if mask is None else mask.to(self.device), scoring)
        self.forward.store(self.index)
        return cast(out, value.dtype)

    def _check_states(self, key: torch.Tensor, value: torch.Tensor) -> None:
        for name, states in (("key_states", key), ("value_states", value)):
            if not isinstance(states, torch.Tensor) or states.dim() != 4 or not states.is_floating_point():
                got = f"{tuple(states.shape)}, {states.dtype}" if isinstance(states, torch.Tensor) else type(states).__name__
                raise ArgumentError(name, got, "[batch_size, num_kv_heads, columns, head_size] floats")
        if value.shape[:3] != key.shape[:3] or value.device != key.device:
            raise ArgumentError("value_states", f"{tuple(value.shape)} on {value.device}", f"{tuple(key.shape[:3])} as K, on {key.device}")
        rows = self.batch_size
        if rows != -1 and key.shape[0] != rows:
            need = f"the {rows} rows this cache was begun with (a KVQCache of its own for another batch)"
            raise ArgumentError("key_states", f"a batch of {key.shape[0]}", need)
        if self.is_initialized:
            sizes = self.pages.geometry
            for name, states, size in (("key_states", key, sizes.head_size), ("value_states", value, sizes.head_size_v)):
                if states.shape[1] != sizes.num_kv_heads or states.shape[3] != size or states.device != self.device:
                    got = f"{states.shape[1]} heads of {states.shape[3]} on {states.device}"
                    raise ArgumentError(name, got, f"{sizes.num_kv_heads} of {size} on {self.device}, as before")

    @abstractmethod
    def _make_pages(self, batch_size: int, sizes: dict[str, int]) -> None: ...

    @abstractmethod
    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scoring: LayerScoring
    ) -> torch.Tensor: ...


class GrowingLayer(KVQLayer):
    """Pages that grow block by block; which blocks a row holds is kept in a table, shared with the other layers of its window."""

    is_compileable = False
    forward: GrowingForward

    def __init__(
        self, backend: QuantKVBackend, index: int, window: int | None, forward: GrowingForward, given: LayerGiven = NOTHING
    ) -> None:
        super().__init__(backend, index, window, given)
        self.forward = forward

    @property
    def table(self) -> RowTable:
        """What all layers have stored."""
        return self.forward.tables[self.window]

    def _make_pages(self, batch_size: int, sizes: dict[str, int]) -> None:
        geometry = Geometry(num_blocks=1, block_size=self.table.block_size, num_layers=1, dtype=self.dtype, layout="head_major", **sizes)
        self.pages = LayerPages(self.backend, geometry, self.device, self.given, residual=self.table.residual)

    def get_seq_length(self) -> int:
        return self.forward.columns

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask covers the new columns only: which of the older ones are padding was settled when they were written."""
        return query_length, self.forward.columns

    @torch.compiler.disable  # rows are Python's account, which grows with each call
    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scoring: LayerScoring
    ) -> torch.Tensor:
        return self._attend_rows(query, key, value, mask, scoring)

    def _attend_rows(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scoring: LayerScoring
    ) -> torch.Tensor:
        batch_size, num_heads, num_queries, _ = query.shape
        columns = key.shape[2]
        table = self.forward.plan(self.window, batch_size, columns, mask)
        self.pages.grow(table.num_blocks, table.num_exact_blocks)
        if num_queries < columns:
            return self._attend_last(query, key, value, mask, table, scoring)
        if len(table.chunks) == 1 and table.chunks[0].index is None:
            return self._attend_chunk(query, key, value, table.chunks[0], scoring).view(batch_size, columns, num_heads, -1)
        out = query.new_zeros(batch_size, columns, num_heads, value.shape[-1])
        for chunk in table.chunks:
            chunk.put(self._attend_chunk(query, key, value, chunk, scoring), out)
        return out

    def _attend_chunk(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, chunk: Chunk, scoring: LayerScoring
    ) -> torch.Tensor:
        """The chunk's rows of the result, [num_tokens, num_query_heads, head_size_v]."""
        batch = self._write(chunk.take(key), chunk.take(value), chunk)
        q = chunk.take(query)
        out = q.new_empty(*q.shape[:2], value.shape[-1])
        self.pages.attend(q, out, batch, scoring)
        return out

    def _attend_last(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        table: RowTable,
        scoring: LayerScoring,
    ) -> torch.Tensor:
        """Fewer queries than keys: those of the last columns, as when another cache hands over all of its keys."""
        batch_size, num_heads, num_queries, _ = query.shape
        if len(table.chunks) != 1:
            raise KVQError(f"layer {self.index}: {num_queries} queries for {key.shape[2]} new keys under a sliding window")
        (chunk,) = table.chunks
        batch = self._write(chunk.take(key), chunk.take(value), chunk)
        if mask is None:
            mask = torch.ones(batch_size, key.shape[2], dtype=torch.bool, device=self.device)
        # Rows of padding alone are not in the batch.
        counts = mask[mask.any(1), -num_queries:].sum(1)
        starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
        chosen = mask[:, -num_queries:].flatten().nonzero().squeeze(1)
        q = token_rows(query)[chosen]
        result = q.new_empty(*q.shape[:2], value.shape[-1])
        self.pages.attend(q, result, batch._replace(cu_seqlens_q=starts, max_seqlen_q=num_queries), scoring)
        out = query.new_zeros(batch_size, num_queries, num_heads, value.shape[-1])
        out.view(-1, *result.shape[1:])[chosen] = result
        return out

    def _write(self, key: torch.Tensor, value: torch.Tensor, chunk: Chunk) -> LayerBatch:
        self.pages.copy_blocks(chunk.growth.copies)
        step = chunk.step(self.table.block_size, self.device)
        is_first = self.forward.is_fresh and not chunk.first
        positions = step.positions_for(self.pages.smoothing)
        self.pages.write(key, value, step.slot_mapping, positions, is_first=is_first, residual=step.residual)
        lengths = step.cu_seqlens_q, step.seqused_k, step.block_table, step.max_seqlen_q, step.max_seqlen_k
        return LayerBatch(*lengths, step.residual, step.first_positions)
