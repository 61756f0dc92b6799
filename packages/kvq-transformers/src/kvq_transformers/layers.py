"""``KVQLayer``: one attention layer of a model's cache, and its two ways of keeping account of pages.

transformers calls ``update`` with a layer's new K and V, and then the attention function with whatever ``update`` returned. A
``KVQLayer`` returns the *new* rows only, with itself attached; :func:`kvq_transformers.attention.kvq_attention` finds it there and calls
:meth:`KVQLayer.attend`, which writes the rows into the pages and attends over them. It happens there and not in ``update`` because only
the attention function is told which tokens are padding.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace

import torch
from transformers.cache_utils import CacheLayerMixin

from kvq_core.backend import QuantKVBackend
from kvq_core.errors import ArgumentError, KVQError
from kvq_core.layout import Geometry
from kvq_transformers.given import NOTHING, LayerGiven
from kvq_transformers.rows import Piece, RowTable, token_rows
from kvq_transformers.storage import Batch, LayerPages, Scoring

HANDLE = "_kvq_layer"


class KVQLayer(CacheLayerMixin):
    """K and V of one layer in the pages of ``backend``; ``window`` is its sliding window, ``given`` what rows are stored with besides."""

    is_croppable = True
    pages: LayerPages

    def __init__(self, backend: QuantKVBackend, index: int, window: int | None, given: LayerGiven) -> None:
        super().__init__()
        self.backend, self.index, self.window, self.given = backend, index, window, given
        self.is_sliding = window is not None
        self.batch_size = -1
        # Set between update() and attend(): a model that does not hand the keys on would otherwise lose them unnoticed.
        self.is_pending = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.backend.mode!r}{'' if self.window is None else f', window={self.window}'})"

    # -- what transformers calls ----------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make the pages for K and V [batch_size, num_kv_heads, any, head_size(_v)] of V's dtype and device.

        K may have another dtype: under autocast, rotary embeddings make it float32. Later rows are cast to the pages' dtype.

        Raises:
            ArgumentError: the mode cannot store this head size or dtype.
        """
        batch_size, num_kv_heads, _, head_size = key_states.shape
        self.batch_size, self.dtype, self.device = batch_size, value_states.dtype, value_states.device
        sizes = {"num_kv_heads": num_kv_heads, "head_size": head_size, "head_size_v": value_states.shape[-1]}
        self._make_pages(sizes)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Announce the layer's new K and V, [batch_size, num_kv_heads, columns, head_size(_v)]. Returns them, with this layer attached."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.shape[0] != self.batch_size:
            raise ArgumentError("key_states", f"a batch of {key_states.shape[0]}", f"the {self.batch_size} rows this cache was begun with")
        if self.is_pending:
            raise KVQError(
                f"layer {self.index}: the K and V of the last forward never reached kvq's attention, so they are not in the cache; the "
                'model must run with attn_implementation="kvq" (kvq_transformers.enable(model) sees to it) and call it on what '
                "cache.update() returned"
            )
        self.is_pending = True
        key = key_states.view_as(key_states)
        setattr(key, HANDLE, self)
        return key, value_states

    def offload(self) -> None:
        raise KVQError("offload: a KVQCache keeps its pages where the model's layers are")

    prefetch = offload

    # -- what the attention function calls ------------------------------------------------------------------------------

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
    ) -> torch.Tensor:
        """Write K and V into the pages, then attend over them.

        Args:
            query: [batch_size, num_query_heads, q_columns, head_size]; fewer columns than ``key``'s are its last ones.
            key, value: as :meth:`update` got them.
            mask: [batch_size, columns] bool, which new tokens are real; ``None``: all.
            scoring: how scores become weights; a window applies besides the layer's own.

        Returns:
            [batch_size, q_columns, num_query_heads, head_size_v] in ``value``'s dtype; zeros for padding.
        """
        if not self.is_pending:
            raise KVQError(f"layer {self.index}: attention was called twice on the K and V of one update")
        if mask is not None and mask.shape != (key.shape[0], key.shape[2]):
            raise ArgumentError("attention_mask", f"columns {tuple(mask.shape)}", f"the {tuple(key.shape[0:3:2])} new tokens of each row")
        self.is_pending = False
        q, k, v = (states.to(self.dtype) for states in (query, key, value))
        return self._attend(q, k, v, None if mask is None else mask.to(self.device), scoring).to(value.dtype)

    @abstractmethod
    def _make_pages(self, sizes: dict[str, int]) -> None: ...

    @abstractmethod
    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
    ) -> torch.Tensor: ...


class GrowingLayer(KVQLayer):
    """Pages that grow block by block; which blocks a row holds is kept in ``table``, shared with the other layers of its kind."""

    is_compileable = False

    def __init__(self, backend: QuantKVBackend, index: int, table: RowTable, given: LayerGiven = NOTHING) -> None:
        super().__init__(backend, index, table.window, given)
        self.table = table
        self.columns = 0

    def _make_pages(self, sizes: dict[str, int]) -> None:
        self.table.start(self.batch_size)
        size = self.table.block_size
        self._geometry = Geometry(num_blocks=1, block_size=size, num_layers=1, dtype=self.dtype, layout="head_major", **sizes)
        self.pages = LayerPages(self.backend, self._geometry, self.device, self.given)

    def get_seq_length(self) -> int:
        return self.columns

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask covers the new columns only: which of the older ones are padding was settled when they were written."""
        return query_length, self.columns

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
    ) -> torch.Tensor:
        columns, table = key.shape[2], self.table
        if table.columns == self.columns:
            table.advance(columns, mask)
        self.columns += columns
        if table.columns != self.columns:
            raise KVQError(f"layer {self.index} has seen {self.columns} tokens, other layers {table.columns}: all must see the same")
        self.pages.grow(table.num_blocks)
        batch_size, num_heads, num_queries, _ = query.shape
        if num_queries < columns:
            return self._attend_last(query, key, value, mask, scoring)
        if len(table.pieces) == 1 and table.pieces[0].index is None:
            return self._attend_piece(query, key, value, table.pieces[0], scoring).view(batch_size, columns, num_heads, -1)
        out = query.new_zeros(batch_size, columns, num_heads, value.shape[-1])
        for piece in table.pieces:
            piece.put(self._attend_piece(query, key, value, piece, scoring), out)
        return out

    def _attend_piece(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, piece: Piece, scoring: Scoring) -> torch.Tensor:
        """The piece's rows of the result, [num_tokens, num_query_heads, head_size_v]."""
        batch = self._write(piece.take(key), piece.take(value), piece)
        q = piece.take(query)
        out = q.new_empty(*q.shape[:2], value.shape[-1])
        self.pages.attend(q, out, batch, scoring)
        return out

    def _attend_last(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
    ) -> torch.Tensor:
        """Fewer queries than keys: those of the last columns, as when another cache hands over all of its keys."""
        batch_size, num_heads, num_queries, _ = query.shape
        if len(self.table.pieces) != 1:
            raise KVQError(f"layer {self.index}: {num_queries} queries for {key.shape[2]} new keys under a sliding window")
        (piece,) = self.table.pieces
        batch = self._write(piece.take(key), piece.take(value), piece)
        if mask is None:
            mask = torch.ones(batch_size, key.shape[2], dtype=torch.bool, device=self.device)
        # Rows of padding alone are not in the batch.
        counts = mask[mask.any(1), -num_queries:].sum(1)
        starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
        chosen = mask[:, -num_queries:].flatten().nonzero().squeeze(1)
        q = token_rows(query)[chosen]
        result = q.new_empty(*q.shape[:2], value.shape[-1])
        self.pages.attend(q, result, replace(batch, cu_seqlens_q=starts, max_seqlen_q=num_queries), scoring)
        out = query.new_zeros(batch_size, num_queries, num_heads, value.shape[-1])
        out.view(-1, *result.shape[1:])[chosen] = result
        return out

    def _write(self, key: torch.Tensor, value: torch.Tensor, piece: Piece) -> Batch:
        self.pages.copy_blocks(piece.growth.copies)
        step = piece.step(self.table.block_size, self.device)
        self.pages.write(key, value, step.slot_mapping)
        return Batch(step.cu_seqlens_q, step.seqused_k, step.block_table, step.max_seqlen_q, step.max_seqlen_k)
