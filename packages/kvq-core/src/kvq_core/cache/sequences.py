"""Which blocks a sequence's tokens lie in, how sequences grow, fork and shrink. Pure bookkeeping: no tensor in here.

A block may belong to several sequences (after a fork). A sequence that is about to write into such a block gets a copy of it first.

The sequences are the truth, and a change of them is one assignment, the last of an operation: an exception at any point, Ctrl-C included,
leaves those before or those after it. The pool's counts follow from them and are taken again when a change of them did not end.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import Final, NamedTuple

from kvq_core import checks
from kvq_core.cache.blocks import BlockPool
from kvq_core.errors import ArgumentError, described

SAVED: Final = ("sequence_ids", "sequence_lengths", "sequence_blocks", "block_holders")


@dataclass
class Sequence:
    """``length`` tokens in ``blocks``; token t is in ``blocks[t // block_size]``. ``changed_at``: the table's clock at the last change."""

    blocks: array[int]
    length: int
    changed_at: int


class GrownRow(NamedTuple):
    """One sequence of a planned append: tokens ``start:end`` are new, ``blocks`` is its block list from then on."""

    sequence: int
    start: int
    end: int
    blocks: array[int]


@dataclass(frozen=True)
class Growth:
    """A planned append: its rows, the block copies (from, to) to make first, and how many free blocks it takes."""

    rows: tuple[GrownRow, ...]
    copies: tuple[tuple[int, int], ...]
    num_taken: int


class SequenceTable:
    """The live sequences over one :class:`BlockPool`. ``clock`` counts changes, to tell what was planned before one."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.block_size = block_size
        self.clock = 0
        self.next_id = 0
        self._pool, self._counted = pool, True
        self._sequences: dict[int, Sequence] = {}

    def copy(self) -> SequenceTable:
        """A table of its own with the same sequences, over a pool of its own."""
        twin = SequenceTable(self.pool.copy(), self.block_size)
        twin.clock, twin.next_id = self.clock, self.next_id
        twin._sequences = {of: Sequence(each.blocks[:], each.length, each.changed_at) for of, each in self._sequences.items()}
        return twin

    @property
    def pool(self) -> BlockPool:
        """The blocks, as the sequences hold them."""
        if not self._counted:
            counted = BlockPool(self._pool.num_blocks)
            counted.adopt(chain.from_iterable(sequence.blocks for sequence in self._sequences.values()))
            self.pool = counted
        return self._pool

    @pool.setter
    def pool(self, pool: BlockPool) -> None:
        self._pool, self._counted = pool, True

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(self._sequences)

    def get(self, sequence: int, argument: str = "seq") -> Sequence:
        """The live sequence of that id, or :class:`ArgumentError`."""
        found = self._sequences.get(checks.integer(argument, sequence, -checks.INT64_MAX, checks.INT64_MAX))
        if found is None:
            raise ArgumentError(argument, f"sequence {sequence!r}", "an id from allocate_sequence() or fork() that was not freed")
        return found

    def add(self) -> int:
        """A new, empty sequence."""
        new = self._new_id()
        with self._changing():
            self._sequences[new] = Sequence(array("i"), 0, self.clock)
        return new

    def fork(self, sequence: int) -> int:
        """A new sequence with the same tokens in the same blocks."""
        source, new = self.get(sequence), self._new_id()
        with self._changing() as pool:
            same = Sequence(source.blocks, source.length, self.clock)
            self._sequences = {**self._sequences, sequence: same, new: replace(same)}
            pool.hold(source.blocks)
        return new

    def free(self, sequence: int) -> None:
        """Forget a sequence; blocks that only it held are free again."""
        gone = self.get(sequence)
        with self._changing() as pool:
            del self._sequences[sequence]
            pool.release(gone.blocks)

    def truncate(self, sequence: int, length: int) -> None:
        """Keep the first ``length`` tokens."""
        found = self.get(sequence)
        kept = checks.integer("length", length, 0, found.length)
        num_blocks = self._blocks_for(kept)
        with self._changing() as pool:
            self._sequences[sequence] = Sequence(found.blocks[:num_blocks], kept, self.clock)
            pool.release(found.blocks[num_blocks:])

    def plan(self, new_tokens: Mapping[int, int]) -> Growth:
        """What appending ``new_tokens[seq]`` tokens to each sequence takes. Changes nothing.

        Raises:
            ArgumentError: nothing to append to, an unknown sequence, or a count below 1.
            OutOfBlocksError: too few free blocks.
        """
        if not isinstance(new_tokens, Mapping):
            raise ArgumentError("new_tokens", described(new_tokens), "a mapping from sequences to numbers of new tokens")
        if not new_tokens:
            raise ArgumentError("new_tokens", "no sequence", "at least one")
        needs: list[tuple[int, Sequence, int, bool, int]] = []
        holders: dict[int, int] = {}
        for sequence, count in new_tokens.items():
            found = self.get(sequence, "new_tokens")
            count = checks.integer(f"new_tokens[{sequence}]", count, 1)
            copies = False
            if found.length % self.block_size:
                last = found.blocks[-1]
                # Once every other holder in this append has its copy, the last one may keep the original.
                left = holders.get(last, self.pool.holders(last))
                copies = left > 1
                holders[last] = left - copies
            fresh = self._blocks_for(found.length + count) - len(found.blocks)
            needs.append((sequence, found, count, copies, fresh))
        num_taken = sum(copies + fresh for _, _, _, copies, fresh in needs)
        taken = self.pool.peek(num_taken)
        rows, copied, used = [], [], 0
        for sequence, found, count, copies, fresh in needs:
            blocks = found.blocks[:]
            if copies:
                copied.append((blocks[-1], taken[used]))
                blocks[-1] = taken[used]
            used += copies
            blocks += taken[used : used + fresh]
            used += fresh
            rows.append(GrownRow(sequence, found.length, found.length + count, blocks))
        return Growth(tuple(rows), tuple(copied), num_taken)

    def commit(self, growth: Growth) -> None:
        """Make a plan true, provided nothing changed since it was made."""
        with self._changing() as pool:
            grown = {row.sequence: Sequence(row.blocks, row.end, self.clock) for row in growth.rows}
            self._sequences = self._sequences | grown
            pool.take(growth.num_taken)
            pool.release(source for source, _ in growth.copies)

    def unchanged_since(self, clock: int, sequences: tuple[int, ...]) -> bool:
        """Whether none of ``sequences`` was appended to, truncated, forked or freed after ``clock``."""
        if clock == self.clock:
            return True
        found = (self._sequences.get(sequence) for sequence in sequences)
        return all(sequence is not None and sequence.changed_at <= clock for sequence in found)

    def saved(self) -> dict[str, list[int]]:
        """All of it as plain lists, by the names in :data:`SAVED`."""
        found = self._sequences.values()
        lengths = [sequence.length for sequence in found]
        blocks = [block for sequence in found for block in sequence.blocks]
        return dict(zip(SAVED, (list(self._sequences), lengths, blocks, self.pool.counts()), strict=True))

    def restore(self, saved: Mapping[str, list[int]], next_id: int) -> None:
        """Fill this fresh table with what :meth:`saved` said; :class:`ArgumentError` if that cannot be true."""
        ids, lengths, blocks, holders = (saved[name] for name in SAVED)
        num_blocks = self.pool.num_blocks
        for block in blocks:
            if not 0 <= block < num_blocks:
                raise ArgumentError("sequence_blocks", f"block {block}", f"0 .. {num_blocks - 1}")
        if len(lengths) != len(ids) or min(lengths, default=0) < 0:
            raise ArgumentError("sequence_lengths", f"{len(lengths)} lengths", f"one of at least 0 for each of {len(ids)} sequences")
        ends = [0, *accumulate(map(self._blocks_for, lengths))]
        if ends[-1] != len(blocks):
            raise ArgumentError("sequence_blocks", f"{len(blocks)} blocks", f"{ends[-1]} for these lengths")
        if not all(first < second for first, second in pairwise([-1, *ids, next_id])):
            raise ArgumentError("sequence_ids", f"{len(ids)} ids", f"unique ones below the next one, {next_id}, oldest first")
        sequences = {
            sequence: Sequence(array("i", blocks[first:end]), length, self.clock)
            for sequence, length, (first, end) in zip(ids, lengths, pairwise(ends), strict=True)
        }
        before: dict[int, int] = {}
        for sequence, found in sequences.items():
            for last, block in pairwise([-1, *found.blocks]):
                # Only forks share blocks, and those share all blocks in front of one, too.
                if before.setdefault(block, last) != last:
                    raise ArgumentError(
                        "sequence_blocks", f"block {block} again, in sequence {sequence}", "blocks shared as forks share them"
                    )
        pool = BlockPool(num_blocks)
        pool.adopt(blocks)
        if holders != pool.counts():
            raise ArgumentError("block_holders", "other counts", "those of the blocks that the sequences hold")
        self._sequences, self.pool, self.next_id = sequences, pool, next_id

    def _new_id(self) -> int:
        new, self.next_id = self.next_id, self.next_id + 1
        return new

    def _blocks_for(self, length: int) -> int:
        return -(-length // self.block_size)

    @contextmanager
    def _changing(self) -> Iterator[BlockPool]:
        """The pool, to be changed along with the sequences. What does not end leaves it to be counted from them."""
        pool = self.pool
        self.clock += 1
        self._counted = False
        yield pool
        self._counted = True
