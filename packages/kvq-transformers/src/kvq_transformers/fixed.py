"""``FixedLayer``: pages of a fixed size whose account is kept on the device, so that a forward compiles and a CUDA graph can replay it.

Every row owns ``ceil(max_cache_len / block_size)`` blocks from the start, or, under a sliding window, a ring of as many as the window
and one piece of a prompt need: logical block i lies in the ring's block ``i % ring``, and what a new token overwrites is out of sight.
Padding has no slot. Real tokens must be the last ones of a row in each forward (left padding): then row t of ``n`` new columns sits at
position ``length - n + t`` whatever is padded before it, and a padding row before the first token, at a negative position, sees nothing.
"""

from __future__ import annotations

import torch

from kvq_core.backend import QuantKVBackend
from kvq_core.errors import ArgumentError
from kvq_core.layout import Geometry
from kvq_transformers.given import NOTHING, LayerGiven
from kvq_transformers.layers import KVQLayer
from kvq_transformers.rows import piece_length, token_rows
from kvq_transformers.storage import Batch, LayerPages, Scoring


class FixedLayer(KVQLayer):
    """Pages for ``max_cache_len`` tokens a row, allocated at the first update."""

    is_compileable = True
    lengths: torch.Tensor
    columns: torch.Tensor
    block_table: torch.Tensor

    def __init__(
        self,
        backend: QuantKVBackend,
        index: int,
        window: int | None,
        max_cache_len: int,
        block_size: int,
        given: LayerGiven = NOTHING,
    ) -> None:
        super().__init__(backend, index, window, given)
        self.max_cache_len, self.block_size = max_cache_len, block_size
        self.num_logical = -(-max_cache_len // block_size)
        self.ring = self.num_logical
        self.piece = max_cache_len
        if window is not None:
            self.piece = piece_length(window)
            self.ring = min(self.num_logical, -(-(window - 1 + self.piece) // block_size) + 1)

    @torch.compiler.disable  # a compiled prefill may be the first to come here; what is made must outlive its graph
    def _make_pages(self, sizes: dict[str, int]) -> None:
        size = self.block_size
        geometry = Geometry(
            num_blocks=self.batch_size * self.ring, block_size=size, num_layers=1, dtype=self.dtype, layout="head_major", **sizes
        )
        self.pages = LayerPages(self.backend, geometry, self.device, self.given)
        self.lengths = torch.zeros(self.batch_size, dtype=torch.int32, device=self.device)
        self.columns = torch.zeros((), dtype=torch.int64, device=self.device)
        rows = torch.arange(self.batch_size, device=self.device)[:, None] * self.ring
        ring = torch.arange(self.num_logical, device=self.device) % self.ring
        self.block_table = (rows + ring).to(torch.int32)
        self.pin()

    def pin(self) -> None:
        """Tell torch.compile that addresses stay: it would copy the pages into and out of a CUDA graph at every replay."""
        smoothing = () if self.pages.smoothing is None else vars(self.pages.smoothing).values()
        for tensor in (*vars(self.pages.caches).values(), self.lengths, self.columns, self.block_table, *smoothing):
            if tensor is not None:
                torch._dynamo.mark_static_address(tensor)

    def get_seq_length(self) -> int | torch.Tensor:  # type: ignore[override]  # a tensor, as transformers' StaticLayer has it
        return self.columns if self.is_initialized else 0

    def get_max_length(self) -> int:
        return self.max_cache_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.max_cache_len, 0

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
    ) -> torch.Tensor:
        columns = key.shape[2]
        # Fewer queries than keys are those of the last columns, as when another cache hands over all of its keys.
        skipped = columns - query.shape[2]
        if mask is not None and columns > 1 and not torch.compiler.is_compiling():
            self._check_padding(mask)
        self.columns.add_(columns)
        parts = []
        for first in range(0, columns, self.piece):
            last = min(first + self.piece, columns)
            part, rows = slice(first, last), slice(max(first - skipped, 0), max(last - skipped, 0))
            parts.append(
                self._attend_piece(query[:, :, rows], key[:, :, part], value[:, :, part], None if mask is None else mask[:, part], scoring)
            )
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _attend_piece(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
    ) -> torch.Tensor:
        (batch_size, num_heads, num_queries, _), columns = query.shape, key.shape[2]
        count: torch.Tensor | int = columns if mask is None else mask.sum(1, dtype=torch.int32)
        plain = torch.arange(columns, device=self.device).expand(batch_size, -1)
        rank = plain if mask is None or columns == 1 else mask.cumsum(1) - 1
        position = self.lengths[:, None] + rank
        # A position past the end is out of the table's bounds: an error on the CPU, an assertion on the device, as for StaticCache.
        blocks = self.block_table.gather(1, torch.where(rank < 0, 0, position // self.block_size))
        slots = blocks * self.block_size + position % self.block_size
        if mask is not None:
            slots = torch.where(mask, slots, -1)
        self.lengths.add_(count)
        self.pages.write(token_rows(key), token_rows(value), slots.flatten())
        out = query.new_empty(batch_size * num_queries, num_heads, value.shape[-1])
        if num_queries:
            starts = torch.arange(0, batch_size * num_queries + 1, num_queries, dtype=torch.int32, device=self.device)
            batch = Batch(starts, self.lengths, self.block_table, num_queries, self.max_cache_len)
            self.pages.attend(token_rows(query), out, batch, scoring)
        return out.view(batch_size, num_queries, num_heads, value.shape[-1])

    def _check_padding(self, mask: torch.Tensor) -> None:
        if (mask[:, :-1] & ~mask[:, 1:]).any():
            raise ArgumentError("attention_mask", "padding after real tokens", "left padding, in a cache with max_cache_len")

    # -- rows and lengths -----------------------------------------------------------------------------------------------

    def crop(self, count: int) -> None:
        """Forget the last ``count`` tokens of every row."""
        if self.ring < self.num_logical and count > self.piece:
            raise RuntimeError(f"crop: {count} tokens, of which a ring behind a sliding window of {self.window} keeps {self.piece}")
        if self.is_initialized:
            self.lengths.sub_(count).clamp_(min=0)
            self.columns.sub_(count).clamp_(min=0)

    def select(self, rows: list[int]) -> None:
        """Row i becomes a copy of row ``rows[i]``; the same number of rows keeps its addresses."""
        if not self.is_initialized:
            return
        if len(rows) != self.batch_size:
            raise ArgumentError("indices", f"{len(rows)} rows", f"{self.batch_size}: a cache with max_cache_len keeps its number of rows")
        index = torch.tensor(rows, device=self.device)
        blocks = index[:, None] * self.ring + torch.arange(self.ring, device=self.device)
        self.pages.gather_blocks(blocks.flatten())
        self.lengths.copy_(self.lengths[index])

    def reset(self) -> None:
        """Forget all tokens; pages and addresses stay."""
        if self.is_initialized:
            self.lengths.zero_()
            self.columns.zero_()
        self.is_pending = False
