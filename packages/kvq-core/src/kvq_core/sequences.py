"""Which blocks a sequence's tokens lie in, how sequences grow, fork and shrink. Pure bookkeeping: no tensor in here.

A block may belong to several sequences (after a fork). A sequence that is about to write into such a block gets a copy of it first.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

from kvq_core import checks
from kvq_core.blocks import BlockPool
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
        self.pool, self.block_size = pool, block_size
        self.clock = 0
        self.next_id = 0
        self._sequences: dict[int, Sequence] = {}

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(self._sequences)

    def get(self, sequence: int, argument: str = "seq") -> Sequence:
        """The live sequence of that id, or :class:`ArgumentError`."""
        found = self._sequences.get(checks.integer(argument, sequence, -checks.INT64_MAX, checks.INT64_MAX))
        if found is None:
            raise ArgumentError(argument, f"sequence {sequence!r}", "an id from allocate_sequence() or fork() that was not freed")
        return found

    def add(self, blocks: array[int] | None = None, length: int = 0) -> int:
        """A new sequence over ``blocks``, which gain a holder."""
        blocks = array("i") if blocks is None else blocks
        self.pool.hold(blocks)
        self.clock += 1
        sequence, self.next_id = self.next_id, self.next_id + 1
        self._sequences[sequence] = Sequence(blocks, length, self.clock)
        return sequence

    def fork(self, sequence: int) -> int:
        """A new sequence with the same tokens in the same blocks."""
        source = self.get(sequence)
        self._touch(source)
        return self.add(source.blocks[:], source.length)

    def free(self, sequence: int) -> None:
        """Forget a sequence; blocks that only it held are free again."""
        self.pool.release(self.get(sequence).blocks)
        del self._sequences[sequence]
        self.clock += 1

    def truncate(self, sequence: int, length: int) -> None:
        """Keep the first ``length`` tokens."""
        found = self.get(sequence)
        kept = checks.integer("length", length, 0, found.length)
        num_blocks = self._blocks_for(kept)
        self.pool.release(found.blocks[num_blocks:])
        found.blocks, found.length = found.blocks[:num_blocks], kept
        self._touch(found)

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
        self.pool.take(growth.num_taken)
        self.pool.release(source for source, _ in growth.copies)
        self.clock += 1
        for row in growth.rows:
            grown = self._sequences[row.sequence]
            grown.blocks, grown.length, grown.changed_at = row.blocks, row.end, self.clock

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
        holders = [self.pool.holders(block) for block in range(self.pool.num_blocks)]
        return dict(zip(SAVED, (list(self._sequences), lengths, blocks, holders), strict=True))

    def restore(self, saved: Mapping[str, list[int]], next_id: int) -> None:
        """Fill this fresh table with what :meth:`saved` said; :class:`ArgumentError` if that cannot be true."""
        ids, lengths, blocks, holders = (saved[name] for name in SAVED)
        held = [0] * self.pool.num_blocks
        for block in blocks:
            if not 0 <= block < len(held):
                raise ArgumentError("sequence_blocks", f"block {block}", f"0 .. {len(held) - 1}")
            held[block] += 1
        if len(lengths) != len(ids) or min(lengths, default=0) < 0:
            raise ArgumentError("sequence_lengths", f"{len(lengths)} lengths", f"one of at least 0 for each of {len(ids)} sequences")
        ends = [0, *accumulate(map(self._blocks_for, lengths))]
        if ends[-1] != len(blocks):
            raise ArgumentError("sequence_blocks", f"{len(blocks)} blocks", f"{ends[-1]} for these lengths")
        if len(set(ids)) != len(ids) or not all(0 <= sequence < next_id for sequence in ids):
            raise ArgumentError("sequence_ids", f"{len(ids)} ids", f"unique ones below the next one, {next_id}")
        if holders != held:
            raise ArgumentError("block_holders", "other counts", "those of the blocks that the sequences hold")
        for sequence, length, first, end in zip(ids, lengths, ends, ends[1:], strict=False):
            self._sequences[sequence] = Sequence(array("i", blocks[first:end]), length, self.clock)
        self.pool.adopt(blocks)
        self.next_id = next_id

    def _blocks_for(self, length: int) -> int:
        return -(-length // self.block_size)

    def _touch(self, sequence: Sequence) -> None:
        self.clock += 1
        sequence.changed_at = self.clock
