"""Which blocks the rows of a batch hold while they grow: one table for all layers that see the same tokens.

A row is one entry of the batch. Its sequence holds the row's *real* tokens only: padding has no slot. Lengths live on the host, in
``kvq_core``'s :class:`SequenceTable`, so that beams and copies share blocks until they write. Behind a sliding window, blocks that no
later row can see are given back: scores depend on the distance between positions, so that dropping whole blocks in front is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kvq_core.cache.blocks import BlockPool
from kvq_core.cache.sequences import Growth, SequenceTable
from kvq_core.cache.step import Step, build
from kvq_core.errors import ArgumentError, KVQError
from kvq_core.residual.step import build as build_residual
from kvq_core.residual.table import ExactGrowth, ExactTable
from kvq_core.residual.window import ResidualWindow
from kvq_transformers.forward import CacheStateError, Forward
from kvq_transformers.masks import check_reach, reaching_too_far


def chunk_length(window: int) -> int:
    """New tokens of a row that a windowed layer takes at a time, so that a long prompt never lies in its pages as a whole."""
    return max(window, 512)


@dataclass
class Chunk:
    """Part of a forward: for every row, its real new tokens ``first:last``. ``copies`` are block copies to make before writing.

    ``dropped``: tokens of each grown row that its table has no longer. ``index`` [num_tokens] are the places of these tokens among the
    flattened ``batch * columns``; ``None`` where there is no padding.
    """

    first: int
    last: int
    growth: Growth
    residual: ResidualWindow | None
    exact: tuple[ExactGrowth, ...]
    dropped: tuple[int, ...]
    index: torch.Tensor | None
    clock: int
    _steps: dict[torch.device, Step] = field(default_factory=dict)

    def step(self, block_size: int, device: torch.device) -> Step:
        """The tensors of the doors on ``device``."""
        if device not in self._steps:
            step = build(self.growth.rows, block_size, device, self, self.clock)
            if any(self.dropped):
                step = replace(step, first_positions=torch.tensor(self.dropped, dtype=torch.int32, device=device))
            if self.residual is not None:
                rows, exact_size = self.growth.rows, self.residual.block_size
                step = replace(step, residual=build_residual(rows, self.exact, exact_size, block_size, device, self.dropped))
            self._steps[device] = step
        return self._steps[device]

    def take(self, states: torch.Tensor) -> torch.Tensor:
        """The chunk's tokens of ``states`` [batch_size, heads, columns, head_size]: [num_tokens, heads, head_size]."""
        if self.index is None:
            is_whole = self.last - self.first == states.shape[2]
            return token_rows(states if is_whole else states[:, :, self.first : self.last])
        return token_rows(states)[self.index.to(states.device)]

    def put(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Undo :meth:`take`: ``rows`` into their places of ``out`` [batch_size, columns, heads, head_size]."""
        if self.index is None:
            out[:, self.first : self.last] = rows.view(len(out), -1, *rows.shape[1:])
        else:
            out.view(-1, *rows.shape[1:])[self.index.to(out.device)] = rows


class RowTable:
    """Blocks and lengths of ``batch_size`` rows. ``columns`` counts the tokens every row has been given, padding included."""

    def __init__(self, block_size: int, window: int | None = None, residual: ResidualWindow | None = None) -> None:
        self.block_size, self.window = block_size, window
        self.columns = 0
        self.keeps_past = False
        self.chunks: tuple[Chunk, ...] = ()
        self._sequences = SequenceTable(BlockPool(0), block_size)
        self._exact = None if residual is None else ExactTable(residual, num_blocks=None)
        self._rows: list[int] = []
        self._dropped: list[int] = []
        # [batch_size, columns] bool on the CPU; None while every column is real.
        self._real: torch.Tensor | None = None
        # Whether there may be padding between tokens.
        self._is_parted = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # Looked at in Python, so on the CPU, wherever torch.load put it.
        self._real = None if self._real is None else self._real.cpu()

    def copy(self) -> RowTable:
        """A table of its own; the pages are the same."""
        twin = copy(self)
        twin._sequences, twin._rows, twin._dropped, twin.chunks = self._sequences.copy(), self._rows[:], self._dropped[:], ()
        twin._exact = None if self._exact is None else self._exact.copy()
        return twin

    @property
    def num_blocks(self) -> int:
        """Blocks that a layer's pages need."""
        return self._sequences.pool.num_blocks

    @property
    def residual(self) -> ResidualWindow | None:
        """Which rows are kept exact beside the packed ones."""
        return None if self._exact is None else self._exact.window

    @property
    def num_exact_blocks(self) -> int:
        """Blocks that a layer's exact rows need."""
        return 0 if self._exact is None else self._exact.end_block

    @property
    def batch_size(self) -> int:
        return len(self._rows)

    @property
    def lengths(self) -> list[int]:
        """Real tokens of each row, those behind the window included."""
        return [self._sequences.get(row).length + dropped for row, dropped in zip(self._rows, self._dropped, strict=True)]

    def start(self, batch_size: int) -> None:
        """Begin with ``batch_size`` empty rows; nothing if they are there already."""
        if not self._rows:
            self._rows = [self._sequences.add() for _ in range(batch_size)]
            self._dropped = [0] * batch_size

    def advance(self, columns: int, mask: torch.Tensor | None) -> None:
        """Reserve slots for ``columns`` more tokens of each row; :attr:`chunks` then says how each layer writes and reads them.

        ``mask`` [batch_size, columns] bool says which are real; ``None``: all. With a mask this waits for the device. One chunk leaves
        the blocks as they were, up to the old lengths: a copy made before still reads them. Several chunks reuse each other's blocks.

        Raises:
            ArgumentError: padding between tokens takes a place in the window of a later one.
        """
        real = self._real_with(columns, mask)
        counts = [columns] * self.batch_size if mask is None else mask.sum(1).tolist()
        longest = max(counts, default=0)
        limit = max(longest, 1) if self.window is None or self.keeps_past else chunk_length(self.window)
        rank = None if mask is None else mask.cumsum(1) - 1
        chunks = []
        for first in range(0, longest, limit):
            last = min(first + limit, longest)
            growth = self._grow([min(max(count - first, 0), limit) for count in counts])
            exact: tuple[ExactGrowth, ...] = ()
            if self._exact is not None:
                exact = self._exact.plan(growth.rows)
                self._exact.commit(exact)
            index = None
            if mask is not None and rank is not None:
                index = (mask & (rank >= first) & (rank < last)).flatten().nonzero().squeeze(1)
            of_rows = dict(zip(self._rows, self._dropped, strict=True))
            dropped = tuple(of_rows[row.sequence] for row in growth.rows)
            chunks.append(Chunk(first, last, growth, self.residual, exact, dropped, index, self._sequences.clock))
            self._drop_unseen()
        self.chunks = tuple(chunks)
        self._real = real
        self.columns += columns

    def crop(self, count: int) -> None:
        """Forget the last ``count`` columns of every row, and with them the tokens that are no padding.

        Raises:
            CacheStateError: tokens that come into view again were dropped already (see :attr:`keeps_past`).
        """
        columns = max(self.columns - count, 0)
        real = None if self._real is None else self._real[:, :columns]
        lengths = [columns] * self.batch_size if real is None else real.sum(1).tolist()
        kept = [length - dropped for length, dropped in zip(lengths, self._dropped, strict=True)]
        for length, dropped in zip(kept, self._dropped, strict=True):
            if dropped and self.window is not None and -dropped < length < self.window - 1:
                raise CacheStateError(
                    "tokens_to_remove",
                    f"{-count}: removing {count} tokens brings some into the sliding window of {self.window} that were dropped already",
                    "activate_past_recording() on the cache before the tokens to roll back",
                )
        for i, (row, length) in enumerate(zip(self._rows, kept, strict=True)):
            self._sequences.truncate(row, max(length, 0))
            if self._exact is not None:
                self._exact.truncate(row, max(length, 0))
            if length <= 0:
                self._dropped[i] = 0
        self.columns, self._real, self.chunks = columns, real, ()
        self._drop_unseen(even_if_kept=True)

    def select(self, rows: list[int]) -> None:
        """Row i becomes a copy of row ``rows[i]``. Blocks are shared until one of their holders writes."""
        taken = [self._fork(self._rows[row]) for row in rows]
        for row in self._rows:
            self._free(row)
        self._rows, self._dropped, self.chunks = taken, [self._dropped[row] for row in rows], ()
        self._real = None if self._real is None else self._real[rows]

    def reset(self) -> None:
        """Empty rows, and as many; their blocks are free again."""
        batch_size = self.batch_size
        self.select([])
        self.columns, self._real, self._is_parted = 0, None, False
        self.start(batch_size)

    def _fork(self, row: int) -> int:
        new = self._sequences.fork(row)
        if self._exact is not None:
            self._exact.fork(row, new)
        return new

    def _free(self, row: int) -> None:
        self._sequences.free(row)
        if self._exact is not None:
            self._exact.free(row)

    def _real_with(self, columns: int, mask: torch.Tensor | None) -> torch.Tensor | None:
        """:attr:`_real` once there are ``columns`` more."""
        if mask is None and self._real is None:
            return None
        old, new = (torch.ones(self.batch_size, count, dtype=torch.bool, device="cpu") for count in (self.columns, columns))
        new = new if mask is None else mask.cpu()
        real = torch.cat([old if self._real is None else self._real, new], 1)
        if self.window is not None:
            begun = (torch.tensor(self.lengths, device="cpu") > 0)[:, None] | (new.cumsum(1) > 0)
            self._is_parted |= bool((begun & ~new).any())
            if self._is_parted:
                check_reach(reaching_too_far(real, torch.arange(self.columns, real.shape[1], device="cpu"), self.window), self.window)
        return real

    def _grow(self, counts: list[int]) -> Growth:
        # Of rows that share a block, the longest comes last and keeps it: what it writes is past the end of all of them.
        order = sorted(range(len(counts)), key=lambda i: self._sequences.get(self._rows[i]).length)
        new_tokens = {self._rows[i]: counts[i] for i in order if counts[i]}
        # An upper bound: all blocks are new, and one copy a row.
        needed = sum(-(-count // self.block_size) + 2 for count in new_tokens.values())
        self._reserve(needed)
        growth = self._sequences.plan(new_tokens)
        self._sequences.commit(growth)
        places = {row: i for i, row in enumerate(self._rows)}
        return replace(growth, rows=tuple(sorted(growth.rows, key=lambda grown: places[grown.sequence])))

    def _reserve(self, free: int) -> None:
        pool = self._sequences.pool
        if pool.num_free >= free:
            return
        # A quarter more than there is: few copies of the pages, little of them unused. Nothing to spare before the first tokens.
        grown = BlockPool(pool.num_blocks + max(free - pool.num_free, pool.num_blocks // 4))
        for row in self._rows:
            grown.adopt(self._sequences.get(row).blocks)
        self._sequences.pool = grown

    def _drop_unseen(self, even_if_kept: bool = False) -> None:
        if self.window is None or (self.keeps_past and not even_if_kept):
            return
        for i, row in enumerate(self._rows):
            sequence = self._sequences.get(row)
            unseen = max(sequence.length - (self.window - 1), 0) // self.block_size
            if unseen:
                self._sequences.pool.release(sequence.blocks[:unseen])
                sequence.blocks = sequence.blocks[unseen:]
                sequence.length -= unseen * self.block_size
                self._dropped[i] += unseen * self.block_size
                if self._exact is not None:
                    self._exact.shift(row, unseen * self.block_size)


Tables = dict[int | None, RowTable]
"""Of the layers of each window."""


class GrowingForward(Forward):
    """The tables of a cache whose pages grow, one for each of its windows. Each change is made on copies, which then take their place."""

    def __init__(
        self, windows: dict[int, int | None], recurrent: list[int], block_size: int, residual: ResidualWindow | None = None
    ) -> None:
        super().__init__(windows, recurrent)
        self.tables: Tables = {window: RowTable(block_size, window, residual) for window in windows.values()}
        self._planned: Tables = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"tables": {window: table.copy() for window, table in self.tables.items()}}

    @property
    def columns(self) -> int:
        """Columns that all layers have stored."""
        return next(iter(self.tables.values())).columns

    @property
    def batch_size(self) -> int:
        return next(iter(self.tables.values())).batch_size or -1

    def plan(self, window: int | None, batch_size: int, columns: int, mask: torch.Tensor | None) -> RowTable:
        """The table of ``window`` as it is once ``columns`` more are stored: the same for all layers of this forward."""
        table = self._planned.get(window)
        if table is None:
            table = self.tables[window].copy()
            table.start(batch_size)
            table.advance(columns, mask)
            if len(table.chunks) > 1 and any(self.tables[window].lengths):
                self.is_torn = True
            self._planned[window] = table
        if table.columns != self.columns + columns:
            raise KVQError(f"a layer has {columns} new tokens, others {table.columns - self.columns}: all must see the same")
        return table

    def cropped(self, count: int) -> Tables:
        """The tables without the last ``count`` columns."""
        return self._changed(lambda table: table.crop(count))

    def selected(self, rows: list[int]) -> Tables:
        """The tables in which row i goes on as row ``rows[i]``."""
        return self._changed(lambda table: table.select(rows))

    def take(self, tables: Tables) -> None:
        self.tables = tables

    def keep_past(self) -> None:
        """From now on, drop what is behind windows in :meth:`crop` alone."""
        for table in self.tables.values():
            table.keeps_past = True

    def _changed(self, change: Callable[[RowTable], None]) -> Tables:
        changed = {window: table.copy() for window, table in self.tables.items()}
        for table in changed.values():
            change(table)
        return changed

    def _has_tokens(self) -> bool:
        return any(any(table.lengths) for table in self.tables.values())

    def _commit(self) -> None:
        self.tables = self._planned
        self._planned = {}

    def _discard(self) -> None:
        self._planned = {}

    def _empty(self) -> None:
        self.tables = self._changed(RowTable.reset)


def token_rows(states: torch.Tensor) -> torch.Tensor:
    """[batch_size, heads, columns, head_size] -> [batch_size * columns, heads, head_size], without a copy where strides allow."""
    batch_size, heads, columns, head_size = states.shape
    if columns == 1:
        return states.squeeze(2)
    return states.transpose(1, 2).reshape(batch_size * columns, heads, head_size)


def row_indices(rows: object, batch_size: int, argument: str, *, takes_mask: bool = False) -> list[int]:
    """``rows``, whole numbers or with ``takes_mask`` a bool for each, as a list checked against ``batch_size``. Waits for the device."""
    listed: list[int] = []
    try:
        given = torch.as_tensor(rows, device=rows.device if isinstance(rows, torch.Tensor) else "cpu")
        if takes_mask and given.dtype == torch.bool and given.shape == (batch_size,):
            given = given.nonzero().squeeze(1)
        if given.dtype in (torch.int64, torch.int32, torch.int16, torch.int8) and given.dim() == 1:
            listed = given.tolist()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    if not listed or any(not -batch_size <= row < batch_size for row in listed):
        got = listed or (f"shape {tuple(rows.shape)} of {rows.dtype}" if isinstance(rows, torch.Tensor) else repr(rows))
        need = f"rows of a batch of {batch_size}: at least one whole number{f', or {batch_size} bools' if takes_mask else ''}"
        raise ArgumentError(argument, got, need)
    return [row % batch_size for row in listed]
