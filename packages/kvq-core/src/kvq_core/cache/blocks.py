"""Who holds which block: a pool that hands blocks out, counts their holders, and takes them back."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from kvq_core.errors import OutOfBlocksError


class BlockPool:
    """``num_blocks`` blocks. One with a holder count of 0 is free; the block freed last is handed out first."""

    def __init__(self, num_blocks: int) -> None:
        self._holders = array("i", [0]) * num_blocks
        self._free = array("i", range(num_blocks - 1, -1, -1))

    def copy(self) -> BlockPool:
        """A pool of its own with the same holders, which hands the same blocks out next."""
        twin = BlockPool(0)
        twin._holders, twin._free = self._holders[:], self._free[:]
        return twin

    @property
    def num_blocks(self) -> int:
        return len(self._holders)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def holders(self, block: int) -> int:
        """How many sequences hold ``block``."""
        return self._holders[block]

    def counts(self) -> list[int]:
        """:meth:`holders` of every block."""
        return self._holders.tolist()

    def peek(self, count: int) -> array[int]:
        """The blocks that :meth:`take` would hand out, which stay free; :class:`OutOfBlocksError` if there are fewer."""
        if count > len(self._free):
            raise OutOfBlocksError(f"need {count} free blocks, have {len(self._free)} of {len(self._holders)}")
        return self._free[: -count - 1 : -1]

    def take(self, count: int) -> array[int]:
        """Hand out ``count`` free blocks with one holder each, or raise :class:`OutOfBlocksError`."""
        taken = self.peek(count)
        del self._free[len(self._free) - count :]
        self.hold(taken)
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a holder to each block."""
        for block in blocks:
            self._holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove a holder from each block; those without any are free again."""
        for block in blocks:
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free.append(block)

    def adopt(self, blocks: Iterable[int]) -> None:
        """Add a holder to each of ``blocks``, free or not."""
        self.hold(blocks)
        self._free = array("i", (block for block in self._free if self._holders[block] == 0))
