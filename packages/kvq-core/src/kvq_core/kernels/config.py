"""What the kernels are compiled for: frozen dataclasses, each of which is one constant."""

import math
from dataclasses import dataclass, field, replace

import triton

from kvq_core.kernels.formats import Constant, Format, PlaneFormat
from kvq_core.kernels.heads import Heads, Row, tile_channels

MASKED_KEYS = 32
"""Keys of a tile in masked iterations of decode, where others have four times as many or more."""


@dataclass(frozen=True)
class Shape(Constant):
    """What the model and the pages give: head sizes, and how rows lie in memory."""

    head_size: int
    head_size_v: int
    block_size: int
    group: int  # query heads per KV head
    same_strides: bool  # of the two planes
    key_alignment: int  # what every row of keys' codes starts at a multiple of: a power of two up to 16
    value_alignment: int  # and of values', which may lie between scales
    wide_planes: bool  # offsets in a plane need 64 bits
    wide_pages: bool  # those inside a page do, too
    wide_rows: bool  # those of a row's heads

    @property
    def row_alignment(self) -> int:
        """What rows of either plane start at a multiple of."""
        return min(self.key_alignment, self.value_alignment)

    def width(self, ways: int) -> int:
        """Lanes of a tile: the same for K and V where they have as many ways. Triton 3.6 addresses shared memory wrongly where they
        differ (seen on sm_90)."""
        return max(Heads(size, ways).width for size in (self.head_size, self.head_size_v))


@dataclass(frozen=True)
class Tile(Constant):
    """What the launch plan chose: the tile, the loops over it, and how keys are split."""

    rows: int
    keys: int = field()  # type: ignore[assignment]  # Constant is a dict: else its method would be the default
    fold: int  # keys that are neighbours in memory and share a row of lanes, which one would fill in part (pack_keys.py)
    warps: int
    stages: int
    decode: bool  # a tile of few rows; or one of many
    keys_first: bool
    narrow_n: bool  # at most half of the rows can be valid, and have two columns each (:mod:`.narrow_n`)
    min_query_len: int
    max_query_len: int
    max_row_blocks: int  # of a sequence; only a split needs it
    loops: int  # over a work tile's key tiles: 2 (one of unmasked iterations, one of masked ones) or 1 (all masked)
    alone: bool  # the launch has one row block, split equally: a program has at most one work tile (not asked of warp groups)
    prefetch: bool  # programs of a row block on its own ask for their first tile ahead (:mod:`.prefetch`)
    split: str  # "" (2D), "equal" (equal ones), "chunks" (of fixed length) or "segments" (an engine's scratch)
    least_splits: int  # fewest splits the combine kernel must handle: 1 if partials are always written, else 2
    overlap: str  # launch what comes next early, at the "start" or "end" of programs: it waits on the device; else ""
    waits: bool  # launched early, and waits at its end: who waits for it finds the launch before it done, too
    registers: int  # of a thread that multiplies, where other warp groups have other numbers; else 0

    @property
    def score_rows(self) -> int:
        """Rows of a tile whose scores are taken."""
        return self.rows // 2 if self.narrow_n else self.rows

    @property
    def lane_rows(self) -> int:
        """Rows of lanes in a tile."""
        return self.keys // self.fold

    @property
    def keys_transposed(self) -> bool:
        """Whether keys are loaded as [lanes, KEYS]: the right operand of a product in which few rows come first."""
        return self.decode and not self.keys_first

    @property
    def sum_parts(self) -> int:
        """In how many partial sums a row's sum of weights is kept within the loop, which saves reductions over a warp's threads."""
        return 8 if self.decode and self.warps == 1 else 1

    @property
    def small_vectors(self) -> bool:
        """Whether a vector of keys has fewer elements than the program has threads. Triton (3.6) takes loads of so few for cheap, and
        repeats them in every layout they are wanted in, where each thread loads many; loaded in pairs they are not."""
        return self.keys < self.warps * 32


@dataclass(frozen=True)
class Features(Constant):
    """The call's options, and what the device has."""

    alibi_sqrt: bool
    shifted: bool  # a softcap, sinks or an LSE would notice that smoothed keys lack their mean
    rotary_pairs: int  # pairs of channels that have a rotary mean (:mod:`.rotary`); 0: none
    output: str  # "e4m3fn" or "e5m2", the fp8 format of results; else ""
    mixed: bool  # partials have their ways mixed: the part of the un-rotation that crosses ways is done
    use_asm: bool
    fp8_hardware: bool  # it converts e4m3 to float16, NaN included
    upcast_dots: bool


@dataclass(frozen=True)
class ReadConfig(Constant):
    """Compile-time facts of an attention kernel. What follows from one part is that part's property, and what needs several is here."""

    format: Format
    shape: Shape
    tile: Tile
    features: Features

    @property
    def tokens(self) -> int:
        """Query tokens in a tile."""
        return self.tile.rows // self.tile.fold // self.shape.group

    @property
    def masked(self) -> "ReadConfig":
        """That of masked iterations. In decode a work tile has one or two, whose code no other program has run lately: it comes from the
        L2 or from further. Smaller tiles have less of it, and less to do where few keys are left; beside tiles of 64 keys they cost more
        than they bring (docs/dev/experiments/2026-11.md)."""
        tile = self.tile
        whole = tile.fold > 1 or tile.narrow_n or self.features.rotary_pairs > 0  # what is made for all keys of a tile
        if whole or not tile.decode or tile.warps > 1 or tile.loops == 1 or tile.keys < 4 * MASKED_KEYS:
            return self
        return replace(self, tile=replace(tile, keys=MASKED_KEYS))

    @property
    def masked_first(self) -> bool:
        """Whether masked iterations come before the others, in a pipeline of their own, and the last ones prefetched. Loads of small tiles
        of two-bit codes are so short that they wait for the memory and not for its bandwidth. With wider codes, the pipeline's code costs
        more than that (docs/dev/experiments/2026-11.md)."""
        short = all(plane.ways >= 8 and not plane.side_bytes for plane in (self.format.key, self.format.value))
        return short and self.masked.tile.keys < self.tile.keys

    @property
    def masked_stages(self) -> int:
        """num_stages of masked iterations. In decode there are usually one or two, not worth a pipeline's code and buffers but for
        :attr:`masked_first`."""
        return self.tile.stages if not self.tile.decode or self.masked_first else 1

    @property
    def keys_an_id(self) -> int:
        """Neighbouring keys whose block is looked up once, where all keys of a tile are there: each thread looks one up. Keys that share a
        row of lanes are slower so (int2's heads of 64)."""
        tile = self.tile
        if not tile.decode or tile.fold > 1:
            return 1
        return math.gcd(self.shape.block_size, max(1, tile.keys // (32 * tile.warps)))

    def _row(self, plane: PlaneFormat, size: int, alignment: int) -> Row:
        shape, tile = self.shape, self.tile
        lanes = tile.fold * max(shape.head_size, shape.head_size_v) // plane.ways
        width = max(shape.width(plane.ways), triton.next_power_of_2(lanes))
        chunked = tile.keys_first and plane.packed and shape.head_size == shape.head_size_v
        # Operands in channel order pay for many rows, and more than two ways.
        joined = not tile.decode and plane.ways > 2
        return Row(size, plane.ways, tile.fold, width, chunked, joined, alignment, self._most_loaded(alignment), plane.parts)

    def _most_loaded(self, alignment: int) -> int:
        """Bytes that a thread loads at once of rows that start at a multiple of ``alignment``.

        In decode of rows with side bytes at most 8. Such a row ends in the middle of one of the 32-byte sectors that the L2 sends, and two
        loads need that sector. Copies of 16 bytes bypass the L1, and would have the L2 send it twice: decode is a fifth slower so (H100).
        """
        has_side_bytes = self.format.key.side_bytes or self.format.value.side_bytes
        return min(alignment, 8) if has_side_bytes and self.tile.decode else alignment

    @property
    def key_row(self) -> Row:
        return self._row(self.format.key, self.shape.head_size, self.shape.key_alignment)

    @property
    def value_row(self) -> Row:
        return self._row(self.format.value, self.shape.head_size_v, self.shape.value_alignment)

    @property
    def rematerialized(self) -> bool:
        """Whether the rotation's matrix and the rows' offsets are recomputed per work tile (:mod:`.compiler_hints`).

        Where a program may have several, and the matrix takes many registers.
        """
        widest = max(self.key_heads.width, self.value_heads.width)
        return self.format.rotated and self.tile.split == "equal" and not self.tile.alone and widest >= 32

    @property
    def key_heads(self) -> Heads:
        ways = self.format.key.ways
        return Heads(self.shape.head_size, ways, self.shape.width(ways), self.format.key.parts)

    @property
    def value_heads(self) -> Heads:
        ways = self.format.value.ways
        return Heads(self.shape.head_size_v, ways, self.shape.width(ways))

    @property
    def channels(self) -> int:
        """:func:`tile_channels`."""
        return tile_channels(self.shape.head_size)

    @property
    def staged_key_size(self) -> int:
        """Channels of a staged key (:mod:`.staging`)."""
        return self.channels + 2 * self.features.rotary_pairs

    @property
    def stays_rotated(self) -> bool:
        """Whether rows are staged as they are rotated: those of K and V alike, in heads for which warp groups have a rotation."""
        key, value = self.format.halves
        alike = (key.rotated, key.ways, key.signs, key.parts) == (True, value.ways, value.signs, value.parts)
        fits = self.shape.head_size == self.shape.head_size_v == 128 and not self.key_heads.padded
        return fits and alike and min(key.grid, value.grid) > 0

    @property
    def key_gains(self) -> tuple[float, ...]:
        """:attr:`PlaneFormat.gains`, of every way."""
        return self._gains(self.format.key)

    @property
    def value_gains(self) -> tuple[float, ...]:
        return self._gains(self.format.value)

    def _gains(self, plane: PlaneFormat) -> tuple[float, ...]:
        return plane.gains[0 if self.tile.decode else 1] or (1.0,) * plane.ways

    @property
    def key_product_scale(self) -> float:
        """What a score's product is multiplied by, a power of two."""
        key = self.format.key
        block = self.key_heads.block if key.divided else 1
        return self._exponent_scale(key) / block

    @property
    def key_zero(self) -> float:
        """What each unit of a query's sum adds to a product, of a zero point of 1."""
        return -1.0 / self._exponent_scale(self.format.key)

    @property
    def value_operand_scale(self) -> float:
        """What an operand of 1 stands for, beside its row's scale."""
        return self._exponent_scale(self.format.value) * self.format.value.level

    @property
    def value_zero(self) -> float:
        """What a weight of 1 adds to a product, of a zero point of 1."""
        return 1.0 / self._exponent_scale(self.format.value)

    @property
    def key_number_scale(self) -> float:
        """What a key's number (an operand times its exponent scale, less its zero point), once un-rotated, is multiplied by, beside its
        row's scale; where rows stay rotated, its number on the grid."""
        return self._number_scale(self.format.key, self.key_heads)

    @property
    def value_number_scale(self) -> float:
        return self._number_scale(self.format.value, self.value_heads)

    @property
    def key_number_units(self) -> tuple[float, ...]:
        """What each way's operands are multiplied by to become numbers, zero point included; on the grid where rows stay rotated."""
        return self._number_units(self.format.key, self.key_gains)

    @property
    def value_number_units(self) -> tuple[float, ...]:
        return self._number_units(self.format.value, self.value_gains)

    def _number_units(self, plane: PlaneFormat, gains: tuple[float, ...]) -> tuple[float, ...]:
        grid = plane.grid if self.stays_rotated else 1.0
        return tuple(grid * self._exponent_scale(plane) / gain for gain in gains)

    def _number_scale(self, plane: PlaneFormat, heads: Heads) -> float:
        level = plane.level / (heads.block if plane.divided else 1)
        return level / plane.grid if self.stays_rotated else level

    def _exponent_scale(self, plane: PlaneFormat) -> float:
        return 1.0 if plane.converts and self.features.fp8_hardware else plane.exponent_scale

    @property
    def clear_keys(self) -> bool:
        return self._clear(self.format.key)

    @property
    def clear_values(self) -> bool:
        return self._clear(self.format.value)

    def _clear(self, plane: PlaneFormat) -> bool:
        """Whether codes of keys that are not there are read as 0: 0 * NaN is NaN. e4m3's is none where its bits are only moved."""
        return plane.has_nan and (self.features.fp8_hardware or not plane.converts)

    @property
    def slices(self) -> int:
        """The most slices that a row can be combined in: of its ways if they are mixed already, of lanes if nothing mixes them."""
        value = self.format.value
        if value.rotated:
            return value.ways if self.features.mixed else 1
        return self.value_heads.width


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
        return Heads(self.head_size, self.format.key.ways, parts=self.format.key.parts)

    @property
    def value_heads(self) -> Heads:
        return Heads(self.head_size_v, self.format.value.ways)

    @property
    def unpadded_heads(self) -> Heads:
        """Those of keys, where values' are the same, in as many lanes as there are."""
        return Heads(self.head_size, self.format.key.ways, 1)


@dataclass(frozen=True)
class CombineTile(Constant):
    """Compile-time facts of a combine kernel.

    Rows with up to ``few`` splits go eight together. Of rows with more, ``splits`` are loaded together, by a program that serves the same
    row of ``blocks`` row blocks and one of ``slices`` slices of its channels.
    """

    few: int
    splits: int
    blocks: int
    slices: int
