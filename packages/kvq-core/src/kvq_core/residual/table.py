"""Which blocks the exact rows of a sequence lie in. Pure bookkeeping: no tensor in here.

A sequence of ``end`` tokens has exact rows of tokens ``[0, sinks)`` and ``[first, end)``, one after the other in its blocks, so that they
are read as a sequence of ``sinks + end - first`` tokens. A call that adds at most ``window.appended`` tokens is read there, too. One that
adds more leaves the newest tokens there, and is read from blocks that live as long as the call (:mod:`.step`).

What is planned becomes true by one assignment. If it and the change of the packed sequences do not both happen, the lengths differ, and
the sequence goes on without exact rows of the past: its tokens are read from the packed pages, where all of them are.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from typing import Final

from kvq_core.cache.sequences import GrownRow
from kvq_core.errors import ArgumentError
from kvq_core.residual.window import ResidualWindow

SAVED: Final = ("exact_sinks", "exact_firsts", "exact_ends", "exact_blocks")


@dataclass(frozen=True)
class ExactRows:
    """Exact rows of tokens ``[0, sinks)`` and ``[first, end)`` in ``blocks``; ``sinks`` is a multiple of the block size, no more than
    ``first``."""

    blocks: array[int]
    sinks: int
    first: int
    end: int

    @property
    def count(self) -> int:
        return self.sinks + self.end - self.first


NOTHING: Final = ExactRows(array("i"), 0, 0, 0)


def _held(rows: ExactRows, length: int) -> ExactRows:
    """``rows`` of a sequence of ``length`` tokens; none if they are of an append that did not end."""
    return rows if rows.end == length else ExactRows(array("i"), 0, length, length)


@dataclass(frozen=True)
class ExactGrowth:
    """One sequence of a planned call: its exact rows ``before`` the call, without those out of the window, and ``after`` it.

    ``appends``: ``after`` holds all rows of ``before`` and all new ones.
    ``copy``: a shared block (from, to) to copy first.
    """

    sequence: int
    before: ExactRows
    after: ExactRows
    appends: bool
    copy: tuple[int, int] | None = None


class ExactTable:
    """The exact rows of the live sequences, in ``num_blocks`` blocks.

    ``num_blocks=None``: as many as are held at a time. A plan then takes no block that was held before it, so that a copy of the table
    made before still finds its rows.
    """

    def __init__(self, window: ResidualWindow, num_blocks: int | None) -> None:
        self.window = window
        self.num_blocks = num_blocks
        self._rows: dict[int, ExactRows] = {}

    @property
    def end_block(self) -> int:
        """The number behind those of all held blocks."""
        return 1 + max(chain.from_iterable(rows.blocks for rows in self._rows.values()), default=-1)

    def copy(self) -> ExactTable:
        twin = ExactTable(self.window, self.num_blocks)
        twin._rows = dict(self._rows)
        return twin

    def get(self, sequence: int) -> ExactRows:
        """Those of a live sequence, known to this table or not."""
        return self._rows.get(sequence, NOTHING)

    def fork(self, sequence: int, new: int) -> None:
        """``new`` has the rows of ``sequence``, in the same blocks until one of the two writes."""
        self._rows = {**self._rows, new: self.get(sequence)}

    def free(self, sequence: int) -> None:
        self._rows = {other: rows for other, rows in self._rows.items() if other != sequence}

    def truncate(self, sequence: int, length: int) -> None:
        """Forget the tokens from ``length`` on. Exact rows that left the window before do not come back."""
        rows = self.get(sequence)
        end = min(rows.end, length)
        if end >= rows.first:
            kept = replace(rows, end=end)
        elif end >= rows.sinks:
            kept = replace(rows, first=end, end=end)
        else:
            kept = ExactRows(rows.blocks, 0, 0, end)
        held = -(-kept.count // self.window.block_size)
        self._rows = {**self._rows, sequence: replace(kept, blocks=kept.blocks[:held])}

    def shift(self, sequence: int, tokens: int) -> None:
        """A packed sequence without sinks has lost ``tokens`` in front: positions count from there."""
        rows, size = self.get(sequence), self.window.block_size
        first, end = rows.first - tokens, rows.end - tokens
        out = min(-(min(first, 0) // size), len(rows.blocks))
        moved = ExactRows(rows.blocks[out:], 0, min(first + out * size, end), end)
        self._rows = {**self._rows, sequence: moved}

    def plan(self, grown: Iterable[GrownRow]) -> tuple[ExactGrowth, ...]:
        """What tokens ``start:end`` of each sequence of ``grown`` do to its exact rows. Changes nothing.

        Raises:
            ArgumentError: the blocks do not suffice.
        """
        wanted = [(row, self._within_window(self.get(row.sequence), row.start)) for row in grown]
        held = self._rows if self.num_blocks is None else {**self._rows, **{row.sequence: before for row, before in wanted}}
        holders = Counter(chain.from_iterable(rows.blocks for rows in held.values()))
        blocks: Iterable[int] = count() if self.num_blocks is None else range(self.num_blocks)
        # What this call gives up is read by it, but for the next one free: its rows are copied before (:meth:`.rows.ExactPages.hold`).
        taken = frozenset(holders)
        free = (block for block in blocks if block not in taken)
        planned = []
        for row, before in wanted:
            growth = self._grown(row, before, holders, free)
            holders.subtract(set(before.blocks) - set(growth.after.blocks))
            planned.append(growth)
        return tuple(planned)

    def commit(self, planned: Sequence[ExactGrowth]) -> None:
        self._rows = {**self._rows, **{growth.sequence: growth.after for growth in planned}}

    def saved(self, lengths: Mapping[int, int]) -> dict[str, list[int]]:
        """All of it as plain lists, by the names in :data:`SAVED`, of the sequences of these ``lengths`` and in their order."""
        rows = [_held(self.get(sequence), length) for sequence, length in lengths.items()]
        blocks = [block for each in rows for block in each.blocks]
        return dict(zip(SAVED, ([r.sinks for r in rows], [r.first for r in rows], [r.end for r in rows], blocks), strict=True))

    def restore(self, saved: Mapping[str, list[int]], lengths: Mapping[int, int]) -> None:
        """Fill this table with what :meth:`saved` said of sequences of these ``lengths``; :class:`ArgumentError` if that cannot be true."""
        sinks, firsts, ends, blocks = (saved[name] for name in SAVED)
        if not len(sinks) == len(firsts) == len(ends) == len(lengths):
            raise ArgumentError("exact_ends", f"{len(ends)}", f"one for each of {len(lengths)} sequences")
        most = self.num_blocks or 0
        if any(not 0 <= block < most for block in blocks):
            raise ArgumentError("exact_blocks", "a block outside the cache", f"0 .. {most - 1}")
        rows, size, taken = {}, self.window.block_size, 0
        places: dict[int, int] = {}
        for sequence, sink, first, end in zip(lengths, sinks, firsts, ends, strict=True):
            if not 0 <= sink <= min(first, self.window.sinks) or not first <= end == lengths[sequence] or sink % size:
                raise ArgumentError("exact_firsts", f"{sink}, {first}, {end} in sequence {sequence}", "exact rows of its newest tokens")
            held = -(-(sink + end - first) // size)
            rows[sequence] = ExactRows(array("i", blocks[taken : taken + held]), sink, first, end)
            for number, block in enumerate(rows[sequence].blocks):
                # Only forks share blocks, which hold the same tokens of all that do.
                place = number * size if number * size < sink else first + number * size - sink
                if places.setdefault(block, place) != place:
                    raise ArgumentError("exact_blocks", f"block {block} again, in sequence {sequence}", "blocks shared as forks share them")
            taken += held
        if taken != len(blocks):
            raise ArgumentError("exact_blocks", f"{len(blocks)} blocks", f"{taken} for these rows")
        self._rows = rows

    def _within_window(self, rows: ExactRows, length: int) -> ExactRows:
        """``rows`` of a sequence of ``length`` tokens without the blocks that are out of the window."""
        rows = _held(rows, length)
        size, sinks = self.window.block_size, self.window.sinks
        if rows.first == rows.sinks:  # nothing is out of the window yet
            out = max(length - self.window.length, 0) // size * size
            if out <= sinks:
                return rows
            blocks = rows.blocks[: sinks // size] + rows.blocks[out // size :]
            return ExactRows(blocks, sinks, out, rows.end)
        out = max(length - self.window.length - rows.first, 0) // size
        front = rows.sinks // size
        return replace(rows, blocks=rows.blocks[:front] + rows.blocks[front + out :], first=rows.first + out * size)

    def _grown(self, row: GrownRow, before: ExactRows, holders: Counter[int], free: Iterator[int]) -> ExactGrowth:
        size = self.window.block_size

        def take(number: int) -> array[int]:
            taken = array("i", islice(free, number))
            if len(taken) < number:
                got = f"more sequences than {self.num_blocks} blocks of exact rows hold"
                raise ArgumentError("max_sequences", got, f"no more than {self.window.blocks_per_sequence} blocks a sequence")
            holders.update(taken)
            return taken

        appends = row.end - row.start <= self.window.appended
        if appends:
            after, blocks = replace(before, end=row.end), before.blocks[:]
        else:
            sinks, first = before.sinks, before.first
            if first == sinks:  # all tokens are exact so far: the call's first ones may be sinks
                sinks = first = min(self.window.sinks, row.end // size * size)
            out = max(row.end - self.window.length - first, 0) // size
            front = sinks // size
            after = ExactRows(before.blocks, sinks, first + out * size, row.end)
            blocks = before.blocks[:front] + before.blocks[front + out :]
        copy = None
        if before.count % size and blocks and blocks[-1] == before.blocks[-1] and holders[blocks[-1]] > 1:
            copy = (blocks[-1], take(1)[0])
            blocks[-1] = copy[1]
        missing = -(-after.count // size) - len(blocks)
        if self.num_blocks is not None:
            # What a call gives up is copied before its own rows are stored (:meth:`.rows.ExactPages.hold`): they may take its place.
            own = [block for block in before.blocks if block not in blocks and holders[block] == 1][: max(missing, 0)]
            blocks.extend(own)
            missing -= len(own)
        blocks += take(missing)
        return ExactGrowth(row.sequence, before, replace(after, blocks=blocks), appends, copy)
