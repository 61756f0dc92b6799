"""Which blocks the rows of a batch hold while they grow: one table for all layers that see the same tokens.

A row is one entry of the batch. Its sequence holds the row's *real* tokens only: padding has no slot. Lengths live on the host, in
``kvq_core``'s :class:`SequenceTable`, so that beams and copies share blocks until they write. Behind a sliding window, blocks that no
later row can see are given back: scores depend on the distance between positions, so that dropping whole blocks in front is exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvq_core.blocks import BlockPool
from kvq_core.errors import ArgumentError
from kvq_core.sequences import Growth, SequenceTable
from kvq_core.step import Step, build


def piece_length(window: int) -> int:
    """New tokens of a row that a windowed layer takes at a time, so that a long prompt never lies in its pages as a whole."""
    return max(window, 512)


@dataclass
class Piece:
    """Part of a forward: for every row, its real new tokens ``first:last``. ``copies`` are block copies to make before writing.

    ``index`` [num_tokens] are the places of these tokens among the flattened ``batch * columns``; ``None`` where there is no padding.
    """

    first: int
    last: int
    growth: Growth
    index: torch.Tensor | None
    clock: int
    _steps: dict[torch.device, Step] = field(default_factory=dict)

    def step(self, block_size: int, device: torch.device) -> Step:
        """The tensors of the doors on ``device``."""
        if device not in self._steps:
            self._steps[device] = build(self.growth.rows, block_size, device, self, self.clock)
        return self._steps[device]

    def take(self, states: torch.Tensor) -> torch.Tensor:
        """The piece's tokens of ``states`` [batch_size, heads, columns, head_size]: [num_tokens, heads, head_size]."""
        if self.index is None:
            return token_rows(states[:, :, self.first : self.last])
        return token_rows(states)[self.index.to(states.device)]

    def put(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Undo :meth:`take`: ``rows`` into their places of ``out`` [batch_size, columns, heads, head_size]."""
        if self.index is None:
            out[:, self.first : self.last] = rows.view(len(out), -1, *rows.shape[1:])
        else:
            out.view(-1, *rows.shape[1:])[self.index.to(out.device)] = rows


class RowTable:
    """Blocks and lengths of ``batch_size`` rows. ``columns`` counts the tokens every row has been given, padding included."""

    def __init__(self, block_size: int, window: int | None = None) -> None:
        self.block_size, self.window = block_size, window
        self.columns = 0
        self.keeps_past = False
        self.pieces: tuple[Piece, ...] = ()
        self._sequences = SequenceTable(BlockPool(0), block_size)
        self._rows: list[int] = []
        self._dropped: list[int] = []

    @property
    def num_blocks(self) -> int:
        """Blocks that a layer's pages need."""
        return self._sequences.pool.num_blocks

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
        """Reserve slots for ``columns`` more tokens of each row; :attr:`pieces` then says how each layer writes and reads them.

        ``mask`` [batch_size, columns] bool says which are real; ``None``: all. With a mask this waits for the device.
        """
        counts = [columns] * self.batch_size if mask is None else mask.sum(1).tolist()
        longest = max(counts, default=0)
        limit = max(longest, 1) if self.window is None or self.keeps_past else piece_length(self.window)
        rank = None if mask is None else mask.cumsum(1) - 1
        pieces = []
        for first in range(0, longest, limit):
            last = min(first + limit, longest)
            growth = self._grow([min(max(count - first, 0), limit) for count in counts])
            index = None
            if mask is not None and rank is not None:
                index = (mask & (rank >= first) & (rank < last)).flatten().nonzero().squeeze(1)
            pieces.append(Piece(first, last, growth, index, self._sequences.clock))
            self._drop_unseen()
        self.pieces = tuple(pieces)
        self.columns += columns

    def crop(self, count: int) -> None:
        """Forget the last ``count`` tokens of every row.

        Raises:
            RuntimeError: tokens that come into view again were dropped already (see :attr:`keeps_past`).
        """
        for row, dropped in zip(self._rows, self._dropped, strict=True):
            kept = self._sequences.get(row).length - count
            if dropped and self.window is not None and -dropped < kept < self.window - 1:
                raise RuntimeError(
                    f"crop: removing {count} tokens brings tokens into the sliding window of {self.window} that were dropped already; "
                    "call activate_past_recording() on the cache before the tokens to roll back"
                )
        for i, row in enumerate(self._rows):
            kept = self._sequences.get(row).length - count
            self._sequences.truncate(row, max(kept, 0))
            if kept <= 0:
                self._dropped[i] = 0
        self.columns = max(self.columns - count, 0)
        self.pieces = ()
        self._drop_unseen(even_if_kept=True)

    def select(self, rows: list[int]) -> None:
        """Row i becomes a copy of row ``rows[i]``. Blocks are shared until one of their holders writes."""
        taken = [self._sequences.fork(self._rows[row]) for row in rows]
        for row in self._rows:
            self._sequences.free(row)
        self._rows, self._dropped, self.pieces = taken, [self._dropped[row] for row in rows], ()

    def reset(self) -> None:
        """Empty rows, and as many; their blocks are free again."""
        batch_size = self.batch_size
        self.select([])
        self.columns = 0
        self.start(batch_size)

    def _grow(self, counts: list[int]) -> Growth:
        new_tokens = {row: count for row, count in zip(self._rows, counts, strict=True) if count}
        # An upper bound: all blocks anew, and one copy a row.
        needed = sum(-(-count // self.block_size) + 2 for count in new_tokens.values())
        self._reserve(needed)
        growth = self._sequences.plan(new_tokens)
        self._sequences.commit(growth)
        return growth

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


def token_rows(states: torch.Tensor) -> torch.Tensor:
    """[batch_size, heads, columns, head_size] -> [batch_size * columns, heads, head_size], without a copy where strides allow."""
    batch_size, heads, columns, head_size = states.shape
    return states.transpose(1, 2).reshape(batch_size * columns, heads, head_size)


def row_indices(rows: torch.Tensor, batch_size: int, argument: str) -> list[int]:
    """``rows`` [n] as a list, each checked against ``batch_size``. Waits for the device."""
    listed: list[int] = rows.flatten().tolist()
    if any(not -batch_size <= row < batch_size for row in listed):
        raise ArgumentError(argument, listed, f"rows of a batch of {batch_size}")
    return [row % batch_size for row in listed]
