"""How the channels of a head lie in lanes, and lanes in the rows of a tile."""

import math
from dataclasses import dataclass

import triton


@dataclass(frozen=True)
class Heads:
    """One head size as the kernels see it: ``size`` channels in ``lanes`` lanes, padded to ``width``, a power of two >= ``least``.

    ``parts``: each is rotated by itself."""

    size: int
    ways: int
    least: int = 16
    parts: int = 1

    @property
    def lanes(self) -> int:
        return self.size // self.ways

    @property
    def width(self) -> int:
        return max(self.least, triton.next_power_of_2(self.lanes))

    @property
    def padded(self) -> bool:
        return self.width != self.lanes

    @property
    def block(self) -> int:
        """Channels in a block of the Hadamard transform."""
        size = self.size // self.parts
        return size & -size

    @property
    def block_lanes(self) -> int:
        return max(1, self.block // self.ways)

    @property
    def finer(self) -> "Heads":
        """The same channels in twice as many ways, or as they are where that takes more padding. A rotation's matrix is over lanes."""
        finer = Heads(self.size, 2 * self.ways, self.least, self.parts)
        fits = self.size % finer.ways == 0 and finer.width * finer.ways == self.width * self.ways
        return finer if fits else self


def tile_channels(head_size: int) -> int:
    """Channels of a head in the tiles of warp groups, which zeros fill up."""
    return 64 if head_size <= 64 else 128


def multiplied_lanes(lanes: int) -> int:
    """Lanes that products take for a row of so many: no more if 16 divides it, in chunks (:mod:`.lane_chunks`), else a power of two."""
    return lanes if lanes % 16 == 0 else max(16, triton.next_power_of_2(lanes))


@dataclass(frozen=True)
class Row:
    """A row of lanes in a tile: of one key's or value's ``size`` channels, or of ``fold`` ones side by side, padded to ``width`` lanes.

    ``chunked``: it is multiplied in chunks without padding if it can be (:mod:`.lane_chunks`). ``joined``: its ways are one operand.
    ``alignment``: bytes that it starts at a multiple of; ``vector``: that a thread loads of it at once, at most.
    """

    size: int
    ways: int
    fold: int
    width: int
    chunked: bool
    joined: bool
    alignment: int
    vector: int
    parts: int = 1

    @property
    def lanes(self) -> int:
        return self.fold * self.size // self.ways

    @property
    def side_alignment(self) -> int:
        """What the bytes beside its lanes, of 16 bits, start at a multiple of: they follow the lanes."""
        return math.gcd(self.alignment, 2 * (self.size // self.ways))

    @property
    def heads(self) -> Heads:
        """A head as it lies in a row, padded."""
        return Heads(self.size, self.ways, self.width, self.parts)

    @property
    def chunks(self) -> tuple[int, ...]:
        """Lanes of the chunks that a row is multiplied in: one, padded, or several that need no padding."""
        if not self.chunked or self.lanes % 16:
            return (self.width,)
        return tuple(1 << bit for bit in reversed(range(self.width.bit_length())) if self.lanes >> bit & 1)

    @property
    def chunk_starts(self) -> tuple[int, ...]:
        """Their first lanes."""
        return tuple(sum(self.chunks[:i]) for i in range(len(self.chunks)))

    @property
    def operand_lanes(self) -> tuple[int, ...]:
        """Lanes of each operand: a chunk's ways, one after the other."""
        return tuple(chunk for chunk in self.chunks for _ in range(self.ways))

    @property
    def operands(self) -> int:
        """How many there are."""
        return 1 if self.joined else len(self.operand_lanes)
