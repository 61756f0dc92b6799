"""What the kernels are compiled for: frozen dataclasses, each of which is one constant."""

import hashlib
import math
from dataclasses import dataclass, field
from pathlib import Path

import triton

SOURCE = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
"""This file's, which decides what a kernel becomes as much as the kernel's own source does."""


class Constant(dict[str, object]):
    """Base of what a kernel gets as a compile-time argument.

    Where a process has set one of Triton's JIT hooks, Triton writes the constants of a kernel as JSON, and json writes nothing but its own
    types and those derived from them: hence a dict, whose one item is the fields by the class's name.
    """

    def __post_init__(self) -> None:
        self[type(self).__name__] = vars(self)

    @property
    def cache_key(self) -> str:
        """What Triton tells compiled kernels on disk apart by. By itself it would take the fields, and find a kernel of another version of
        kvq, in which a property made something else of them."""
        return f"{self} {SOURCE}"


@dataclass(frozen=True)
class Format(Constant):
    """How a mode's rows look to the read and write kernels.

    ``streams`` interleaved columns share a lane: channel ``streams * lane + s`` is in stream s. ``rotated`` rows went through a
    Hadamard transform with ``signs`` (bit i set: +1; None: unsigned). ``variant`` is the mode's own switch.
    """

    streams: int
    rotated: bool = False
    signs: int | None = None
    variant: str = ""
    few_rows: bool = False  # whether the mode's kernel knows of rows that have two columns each (:mod:`.fewrows`)

    @property
    def stream_signs(self) -> tuple[int | None, ...]:
        """``signs`` stream by stream: bit i of the s-th is that of channel ``streams * i + s``."""
        signs = self.signs
        if signs is None:
            return (None,) * self.streams
        lanes = range(-(-signs.bit_length() // self.streams))
        return tuple(sum((signs >> (self.streams * i + s) & 1) << i for i in lanes) for s in range(self.streams))


@dataclass(frozen=True)
class Heads:
    """One head size as the kernels see it: ``size`` channels in ``lanes`` lanes, padded to ``width``, a power of two >= ``least``."""

    size: int
    streams: int
    least: int = 16

    @property
    def lanes(self) -> int:
        return self.size // self.streams

    @property
    def width(self) -> int:
        return max(self.least, triton.next_power_of_2(self.lanes))

    @property
    def padded(self) -> bool:
        return self.width != self.lanes

    @property
    def block(self) -> int:
        """Channels in a block of the Hadamard transform."""
        return self.size & -self.size

    @property
    def block_lanes(self) -> int:
        return max(1, self.block // self.streams)

    @property
    def finer(self) -> "Heads":
        """The same channels in twice as many streams, or as they are where that takes more padding. A rotation's matrix is over lanes."""
        finer = Heads(self.size, 2 * self.streams, self.least)
        fits = self.size % finer.streams == 0 and finer.width * finer.streams == self.width * self.streams
        return finer if fits else self


def multiplied_lanes(lanes: int) -> int:
    """Lanes that products take for a row of so many: no more if 16 divides it, in pieces (:mod:`.folding`), else a power of two."""
    return lanes if lanes % 16 == 0 else max(16, triton.next_power_of_2(lanes))


@dataclass(frozen=True)
class ReadConfig(Constant):
    """Compile-time facts of an attention kernel: the format, the shapes and the tile."""

    format: Format
    head_size: int
    head_size_v: int
    block_size: int
    group: int
    rows: int
    keys: int = field()  # type: ignore[assignment]  # in the place of dict's method, which nobody calls
    fold: int  # keys that are neighbours in memory and share a row of lanes, which one would fill in part (folding.py)
    warps: int
    stages: int
    decode: bool  # a tile of few rows; or one of many
    keys_first: bool
    min_query_len: int
    max_query_len: int
    max_row_blocks: int  # of a sequence; only a split needs it
    few: bool  # at most half of the rows can be valid, and have two columns each (:mod:`.fewrows`)
    parts: int  # of a piece's tiles: those away from the edges of what its rows see, where no mask is needed, and those at an edge; or 1
    alone: bool  # the launch has one row block, in equal shares: a program has one piece at most (not asked of warp groups)
    prefetch: bool  # programs of a row block on its own ask for their first tile ahead (:mod:`.prefetch`)
    split: str  # "" (2D), "shares" (equal ones), "chunks" (of fixed length) or "segments" (an engine's scratch)
    same_strides: bool  # of the two planes
    row_bytes: int  # what every row of codes starts at a multiple of: a power of two up to 16
    wide_planes: bool  # offsets in a plane need 64 bits
    wide_pages: bool  # those inside a page do, too
    wide_rows: bool  # those of a row's heads
    alibi_sqrt: bool
    shifted: bool  # a softcap, sinks or an LSE would notice that smoothed keys lack their mean
    output: str
    registers: int  # of a thread that multiplies, where other warp groups have other numbers; else 0
    use_asm: bool
    fp8_hardware: bool  # it converts e4m3 to float16, NaN included
    least_pieces: int  # of a row that the merge is left: one, or two where the attention kernel itself finishes a row in one piece
    mixed: bool  # shares are left with their streams mixed: a part of the un-rotation, and all of it that crosses streams
    overlap: str  # the merge is put in place at the "start" or "end" of shares, and waits on the device; else ""
    upcast_dots: bool

    @property
    def tokens(self) -> int:
        """Query tokens in a tile."""
        return self.rows // self.fold // self.group

    @property
    def score_rows(self) -> int:
        """Rows of a tile whose scores are taken."""
        return self.rows // 2 if self.few else self.rows

    @property
    def lane_rows(self) -> int:
        """Rows of lanes in a tile."""
        return self.keys // self.fold

    @property
    def row_lanes(self) -> int:
        """Lanes in each, padding apart."""
        return self.fold * max(self.head_size, self.head_size_v) // self.format.streams

    @property
    def row_heads(self) -> Heads:
        """A head's keys or values as they share a row, padded."""
        return Heads(self.head_size, self.format.streams, max(self.width, triton.next_power_of_2(self.row_lanes)))

    @property
    def pieces(self) -> tuple[int, ...]:
        """Lanes of the pieces that a row is multiplied in: one, padded, or several that need no padding (:mod:`.folding`)."""
        whole = self.row_heads.width
        if not self.keys_first or self.format.streams == 1 or self.row_lanes % 16 or self.head_size != self.head_size_v:
            return (whole,)
        return tuple(1 << bit for bit in reversed(range(whole.bit_length())) if self.row_lanes >> bit & 1)

    @property
    def piece_starts(self) -> tuple[int, ...]:
        """Their first lanes."""
        return tuple(sum(self.pieces[:i]) for i in range(len(self.pieces)))

    @property
    def operand_lanes(self) -> tuple[int, ...]:
        """Lanes of each operand: a piece's streams, one after the other."""
        return tuple(piece for piece in self.pieces for _ in range(self.format.streams))

    @property
    def keys_turned(self) -> bool:
        """Whether keys are loaded as [lanes, KEYS]: the right operand of a product in which few rows come first."""
        return self.decode and not self.keys_first

    @property
    def made_anew(self) -> bool:
        """Whether the rotation's matrix and the rows' places are made for each piece (:mod:`.anew`): where a program may have several, and
        the matrix takes many registers."""
        return self.format.rotated and self.split == "shares" and not self.alone and self.value_heads.width >= 32

    @property
    def edge_stages(self) -> int:
        """Stages of a second part's loop: in decode it is one tile long, if that, and no place for a pipeline's code and buffers."""
        return 1 if self.decode else self.stages

    @property
    def sum_parts(self) -> int:
        """In how many parts a row's sum of weights is kept while its keys are gone through: threads of a warp need not meet for it."""
        return 8 if self.decode and self.warps == 1 else 1

    @property
    def joined(self) -> bool:
        """Whether a tile's streams are joined into one operand in channel order: worth it for many rows, and more than two streams."""
        return not self.decode and self.format.streams > 2

    @property
    def streams(self) -> int:
        """Operands that a tile's channels are multiplied in."""
        return 1 if self.joined else len(self.operand_lanes)

    @property
    def small_vectors(self) -> bool:
        """Whether a vector of keys has fewer elements than the program has threads. Triton (3.6) takes loads of so few for cheap, and
        repeats them in every layout they are wanted in, where each thread loads many; loaded in pairs they are not."""
        return self.keys < self.warps * 32

    @property
    def keys_an_id(self) -> int:
        """Neighbouring keys whose block is looked up once, where all keys of a tile are there: each thread looks one up. Keys that share a
        row of lanes are slower so (int2's heads of 64)."""
        return math.gcd(self.block_size, max(1, self.keys // (32 * self.warps))) if self.decode and self.fold == 1 else 1

    @property
    def width(self) -> int:
        """Lanes of a key or value tile: the same for both. Triton 3.6 addresses shared memory wrongly where they differ (seen on sm_90)."""
        return max(Heads(size, self.format.streams).width for size in (self.head_size, self.head_size_v))

    @property
    def key_heads(self) -> Heads:
        return Heads(self.head_size, self.format.streams, self.width)

    @property
    def value_heads(self) -> Heads:
        return Heads(self.head_size_v, self.format.streams, self.width)

    @property
    def slices(self) -> int:
        """The most slices that a row can be merged in: of its streams if they are mixed already, of lanes if nothing mixes them."""
        if self.format.rotated:
            return self.format.streams if self.mixed else 1
        return self.width


@dataclass(frozen=True)
class WriteConfig(Constant):
    """Compile-time facts of a write kernel."""

    format: Format
    head_size: int
    head_size_v: int
    block_size: int
    num_kv_heads: int
    rows: int
    warps: int
    use_asm: bool
    fp8_hardware: bool  # it converts to e4m3
    upcast_dots: bool

    @property
    def key_heads(self) -> Heads:
        return Heads(self.head_size, self.format.streams)

    @property
    def value_heads(self) -> Heads:
        return Heads(self.head_size_v, self.format.streams)

    @property
    def unpadded_heads(self) -> Heads:
        """Those of keys, where values' are the same, in as many lanes as there are."""
        return Heads(self.head_size, self.format.streams, 1)


@dataclass(frozen=True)
class MergeTile(Constant):
    """Compile-time facts of a merge: up to ``few`` pieces eight rows go together; of more, ``pieces`` of a row are loaded together, by
    a program for the same row of ``blocks`` row blocks and one of ``slices`` of its channels."""

    few: int
    pieces: int
    blocks: int
    slices: int
