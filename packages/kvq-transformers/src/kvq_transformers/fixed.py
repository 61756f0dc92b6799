"""``FixedLayer``: pages of a fixed size whose account is kept on the device, so that a forward compiles and a CUDA graph can replay it.

Every row owns ``ceil(max_cache_len / block_size)`` blocks from the start, or, under a sliding window, a ring of as many as the window
and one chunk of a prompt need: logical block i lies in the ring's block ``i % ring``, and what a new token overwrites is out of sight,
of the tokens before this forward, too, unless it has several chunks. Padding has no slot. The real tokens of a forward come last in
each row, into which they are put in order: then row t of ``n`` new columns sits at position ``length - n + t`` whatever is padded before
it, and a padding row before the first token, at a negative position, sees nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from kvq_core.backend import QuantKVBackend
from kvq_core.cache.layout import Geometry
from kvq_core.errors import ArgumentError
from kvq_core.residual.window import ResidualWindow
from kvq_transformers.fixed_window import FixedWindow, copied
from kvq_transformers.forward import CacheStateError, Forward
from kvq_transformers.given import NOTHING, LayerGiven
from kvq_transformers.layers import KVQLayer
from kvq_transformers.masks import check_reach, may_wait, reaching_too_far
from kvq_transformers.rows import chunk_length, token_rows
from kvq_transformers.storage import LayerBatch, LayerPages, LayerScoring


class Lengths:
    """How far the rows are, on one device, at addresses that stay.

    Attributes:
        counts: [batch_size + 1] int32, the real tokens of each row and, last, the columns that all have been given.
        highest: [batch_size] int32, the real tokens that each row has ever had in its pages, those taken back included.
        real: [batch_size, max_cache_len] bool, which columns are no padding.
    """

    def __init__(self, batch_size: int, max_cache_len: int, device: torch.device) -> None:
        self.counts = torch.zeros(batch_size + 1, dtype=torch.int32, device=device)
        self.highest = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.real = torch.zeros(batch_size, max_cache_len, dtype=torch.bool, device=device)

    def __setstate__(self, state: dict[str, torch.Tensor]) -> None:
        self.__dict__.update(copied(state))

    @property
    def device(self) -> torch.device:
        return self.counts.device

    def advance(self, columns: int, mask: torch.Tensor | None) -> None:
        """Count ``columns`` more, those real that ``mask`` [batch_size, columns] says."""
        mask = self._mask(columns, mask)
        where = torch.arange(columns, device=self.device) + self.counts[-1]
        # Columns past the last one mean nothing, so that all moves with the counts.
        self.real.index_copy_(1, where, mask)
        self.counts.add_(torch.nn.functional.pad(mask.sum(1, dtype=torch.int32), (0, 1), value=columns))

    def too_far(self, window: int, columns: int, mask: torch.Tensor | None) -> torch.Tensor:
        """Those of ``columns`` more, real ones as ``mask`` [batch_size, columns] says, that :func:`reaching_too_far`."""
        every = torch.arange(self.real.shape[1], device=self.device)
        # Past the end is an error, which is for the write to tell.
        where = (torch.arange(columns, device=self.device) + self.counts[-1]).clamp(max=self.real.shape[1] - 1)
        real = (self.real & (every < self.counts[-1])).index_copy(1, where, self._mask(columns, mask))
        return reaching_too_far(real, where, window)

    def _mask(self, columns: int, mask: torch.Tensor | None) -> torch.Tensor:
        ones = torch.ones(1, 1, dtype=torch.bool, device=self.device)
        return ones.expand(len(self.highest), columns) if mask is None else mask.to(self.device)

    def cropped(self, count: int) -> torch.Tensor:
        """What :attr:`counts` are without the last ``count`` columns."""
        columns = (self.counts[-1:] - count).clamp(min=0)
        kept = self.real & (torch.arange(self.real.shape[1], device=self.device) < columns)
        return torch.cat([kept.sum(1, dtype=torch.int32), columns])

    def select(self, rows: list[int]) -> None:
        index = torch.tensor(rows, device=self.device)
        for tensor in (self.highest, self.real):
            tensor.copy_(tensor[index])
        self.counts[:-1] = self.counts[index]


class FixedForward(Forward):
    """The lengths of a cache whose pages are of a fixed size, on each device that has layers."""

    def __init__(self, layers: list[int], recurrent: list[int], max_cache_len: int) -> None:
        super().__init__(layers, recurrent)
        self.max_cache_len = max_cache_len
        self.lengths: list[Lengths] = []
        # The window and the ring's slots of each layer whose ring may come round.
        self.rings: set[tuple[int, int]] = set()
        self._batch_size = -1
        self._new: tuple[int, torch.Tensor | None] | None = None
        self._too_far: dict[tuple[int, torch.device], torch.Tensor] = {}

    @property
    def batch_size(self) -> int:
        return self._batch_size

    def start(self, batch_size: int, device: torch.device) -> Lengths:
        """The lengths on ``device``, of ``batch_size`` rows."""
        if self._batch_size not in (-1, batch_size):
            raise ArgumentError("batch_size", batch_size, f"{self._batch_size}: a cache with max_cache_len keeps its number of rows")
        for lengths in self.lengths:
            if lengths.device == device:
                return lengths
        self._batch_size = batch_size
        self.lengths = [*self.lengths, Lengths(batch_size, self.max_cache_len, device)]
        return self.lengths[-1]

    def plan(self, columns: int, mask: torch.Tensor | None) -> None:
        """What this forward's tokens are: the same for all layers."""
        if self._new is not None and self._new[0] != columns:
            raise ArgumentError("key_states", f"{columns} columns", f"the {self._new[0]} of the layers before")
        self._new = columns, mask

    def too_far(self, window: int, lengths: Lengths) -> torch.Tensor:
        """The tokens of this forward [batch_size, columns] bool that :func:`reaching_too_far`; worked out once for all layers of a window.

        Raises:
            ArgumentError: there are some, and this code may wait for the device.
        """
        key = window, lengths.device
        if key not in self._too_far:
            columns, mask = self._new or (0, None)
            found = lengths.too_far(window, columns, mask)
            if may_wait(lengths.device):
                check_reach(found, window)
            self._too_far[key] = found
        return self._too_far[key]

    def cropped(self, count: int) -> list[torch.Tensor]:
        """What the counts are without the last ``count`` columns."""
        found = [lengths.cropped(min(count, self.max_cache_len)) for lengths in self.lengths]
        for lengths, counts in zip(self.lengths, found, strict=True):
            for window, slots in self.rings:
                unseen = (counts[:-1] - (window - 1)).clamp(min=0)
                if ((lengths.highest - slots > unseen) & (counts[:-1] > 0)).any():
                    got = f"{-count}: tokens that come back into the sliding window of {window} were overwritten"
                    raise CacheStateError("tokens_to_remove", got, f"no more than its ring keeps ({slots} tokens), or reset()")
        return found

    def take(self, counts: list[torch.Tensor]) -> None:
        self.is_torn |= len(counts) > 1
        for lengths, new in zip(self.lengths, counts, strict=True):
            lengths.counts.copy_(new)

    def select(self, rows: list[int]) -> None:
        for lengths in self.lengths:
            lengths.select(rows)

    def _has_tokens(self) -> bool:
        # Compiled or captured code cannot look: it takes the pages for begun.
        return not may_wait(self.lengths[0].device) or bool(self.lengths[0].counts[:-1].any())

    def _commit(self) -> None:
        if self._new is None:
            return
        self.is_torn |= len(self.lengths) > 1
        for lengths in self.lengths:
            lengths.advance(*self._new)
        self._discard()

    def _discard(self) -> None:
        self._new, self._too_far = None, {}

    def _empty(self) -> None:
        for lengths in self.lengths:
            lengths.counts.zero_()
            lengths.highest.zero_()


class FixedLayer(KVQLayer):
    """Pages for ``max_cache_len`` tokens a row, allocated at the first update."""

    is_compileable = True
    forward: FixedForward
    account: Lengths
    block_table: torch.Tensor

    def __init__(
        self,
        backend: QuantKVBackend,
        index: int,
        window: int | None,
        forward: FixedForward,
        block_size: int,
        given: LayerGiven = NOTHING,
        residual: ResidualWindow | None = None,
    ) -> None:
        super().__init__(backend, index, window, given)
        self.residual = residual if residual is not None and residual.serves(backend.mode) else None
        self.exact: FixedWindow | None = None
        self.forward, self.max_cache_len, self.block_size = forward, forward.max_cache_len, block_size
        self.num_logical = -(-self.max_cache_len // block_size)
        self.ring = self.num_logical
        self.chunk_length = self.max_cache_len
        if window is not None:
            self.chunk_length = chunk_length(window)
            self.ring = min(self.num_logical, -(-(window - 1 + self.chunk_length) // block_size) + 1)
            if self.comes_round:
                forward.rings.add((window, self.ring * block_size))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.is_initialized:
            self.pin()

    @property
    def comes_round(self) -> bool:
        """Whether new tokens may take the slots of old ones."""
        return self.ring < self.num_logical

    @property
    def lengths(self) -> torch.Tensor:
        """[batch_size] int32: real tokens of each row that all layers have stored."""
        return self.account.counts[:-1]

    @torch.compiler.disable  # a compiled prefill may be the first to come here; what is made must outlive its graph
    def _make_pages(self, batch_size: int, sizes: dict[str, int]) -> None:
        size = self.block_size
        geometry = Geometry(
            num_blocks=batch_size * self.ring, block_size=size, num_layers=1, dtype=self.dtype, layout="head_major", **sizes
        )
        self.pages = LayerPages(self.backend, geometry, self.device, self.given, residual=self.residual)
        with torch.inference_mode(False):
            self.account = self.forward.start(batch_size, self.device)
            rows = torch.arange(batch_size, device=self.device)[:, None] * self.ring
            ring = torch.arange(self.num_logical, device=self.device) % self.ring
            self.block_table = (rows + ring).to(torch.int32)
            if self.residual is not None:
                self.exact = FixedWindow(self.residual, batch_size, self.block_table, self.block_size)
                self.pages.grow(geometry.num_blocks, self.exact.num_blocks)
        self.pin()

    def pin(self) -> None:
        """Tell torch.compile that addresses stay: it would copy the pages into and out of a CUDA graph at every replay."""
        smoothing = () if self.pages.smoothing is None else self.pages.smoothing.operands
        exact = () if self.exact is None else (*self.exact.tensors, *self.pages.exact_tensors)
        for tensor in (*vars(self.pages.caches).values(), *vars(self.account).values(), self.block_table, *smoothing, *exact):
            if tensor is not None:
                torch._dynamo.mark_static_address(tensor)

    def get_seq_length(self) -> int | torch.Tensor:  # type: ignore[override]  # a tensor, as transformers' StaticLayer has it
        return self.account.counts[-1].long() if self.is_initialized else 0

    def get_max_length(self) -> int:
        return self.max_cache_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.max_cache_len, 0

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scoring: LayerScoring
    ) -> torch.Tensor:
        columns = key.shape[2]
        if query.shape[2] != columns:
            raise ArgumentError("query", f"{query.shape[2]} columns", f"{columns}, as keys, for a cache with max_cache_len")
        self.forward.plan(columns, mask)
        if self.window is not None and self.window < self.max_cache_len:
            too_far = self.forward.too_far(self.window, self.account)
            if not may_wait(self.device):
                # What compiled code cannot refuse is no number, and so nobody takes it for a result.
                query = query.masked_fill(too_far[:, None, :, None], torch.nan)
        if self.comes_round and columns > self.chunk_length and not self.forward.is_fresh:
            self.forward.is_torn = True
        order = None if mask is None else _real_last(mask)
        if order is not None:
            query, key, value = (torch.take_along_dim(states, order[:, None, :, None], 2) for states in (query, key, value))
            mask = torch.take_along_dim(mask, order, 1) if mask is not None else None
        start = self.lengths
        parts = []
        for first in range(0, columns, self.chunk_length):
            last = min(first + self.chunk_length, columns)
            part = slice(first, last)
            real = None if mask is None else mask[:, part]
            end = start + (last - first if real is None else real.sum(1, dtype=torch.int32))
            is_first = self.forward.is_fresh and not first
            q, k, v = (states[:, :, part] for states in (query, key, value))
            parts.append(self._attend_chunk(q, k, v, real, start, end, scoring, is_first))
            start = end
        out = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return out if order is None else torch.zeros_like(out).scatter(1, order[..., None, None].expand_as(out), out)

    def _attend_chunk(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        start: torch.Tensor,
        end: torch.Tensor,
        scoring: LayerScoring,
        is_first: bool,
    ) -> torch.Tensor:
        """``start`` and ``end`` [batch_size] int32: the lengths before and after the chunk."""
        batch_size, num_heads, columns, _ = query.shape
        plain = torch.arange(columns, device=self.device).expand(batch_size, -1)
        rank = plain if mask is None or columns == 1 else mask.cumsum(1) - 1
        position = start[:, None] + rank
        # A position past the end is out of the table's bounds: an error on the CPU, an assertion on the device, as for StaticCache.
        blocks = self.block_table.gather(1, torch.where(rank < 0, 0, position // self.block_size))
        slots = blocks * self.block_size + position % self.block_size
        if mask is not None:
            slots = torch.where(mask, slots, -1)
        if self.comes_round:
            self.account.highest.copy_(torch.maximum(self.account.highest, end))
        residual = None if self.exact is None else self.exact.plan(position, mask, start, end, is_first=is_first)
        positions = position.flatten().to(torch.int32)
        self.pages.write(token_rows(key), token_rows(value), slots.flatten(), positions, is_first=is_first, residual=residual)
        out = query.new_empty(batch_size * columns, num_heads, value.shape[-1])
        starts = torch.arange(0, batch_size * columns + 1, columns, dtype=torch.int32, device=self.device)
        batch = LayerBatch(starts, end, self.block_table, columns, self.max_cache_len, residual)
        self.pages.attend(token_rows(query), out, batch, scoring)
        return out.view(batch_size, columns, num_heads, value.shape[-1])

    def select(self, rows: list[int]) -> None:
        """Row i becomes a copy of row ``rows[i]``, at the same addresses."""
        index = torch.tensor(rows, device=self.device)
        blocks = index[:, None] * self.ring + torch.arange(self.ring, device=self.device)
        self.pages.gather_blocks(blocks.flatten(), None if self.exact is None else self.exact.select(index))


def _real_last(mask: torch.Tensor) -> torch.Tensor | None:
    """The order of columns [batch_size, columns] that puts real ones last; ``None`` where they are. Waits for the device if it may."""
    if mask.shape[1] == 1 or (may_wait(mask.device) and not (mask[:, :-1] & ~mask[:, 1:]).any()):
        return None
    return mask.int().argsort(dim=1, stable=True)
