"""What a mode's codes are as numbers, and how its lanes become the left operands of both products."""

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvq_core.kernels.sm90.decode_multirow.layouts import left_operand, offsets_of, stacked
from kvq_core.kernels.sm90.layouts import HALF


@dataclass(frozen=True)
class Numbers:
    """A key's operand is ``unit`` times (number - ``offset``), in odd ways ``odd`` times that.

    ``scaled``: rows have scales, and those of keys are multiplied by ``key_prescale``. ``zeros``: rows have zero points, too, and
    ``offset`` is per unit of these. Rows of queries are scaled to a peak of ``peak`` to twice that, so that no sum overflows.
    """

    scaled: bool = True
    key_prescale: float = 1.0
    zeros: bool = False
    peak: float = 32.0
    unit: float = 1.0
    offset: float = 0.0
    odd: float = 1.0


@gluon.jit
def key_operands(tile, UNPACK: gl.constexpr, C: gl.constexpr):
    """A tile of lanes [KEYS, LANES] as two left operands [KEYS, 64], each of half of the ways, one beside the other."""
    KEYS: gl.constexpr = C.tile.keys
    S: gl.constexpr = C.format.key.ways
    LEFT: gl.constexpr = left_operand(C.tile.rows)
    ways = UNPACK(tile.load(LEFT))
    if S == 2:
        low, high = ways
    elif S == 4:
        low = gl.join(ways[0], ways[1]).permute((0, 2, 1)).reshape([KEYS, HALF])
        high = gl.join(ways[2], ways[3]).permute((0, 2, 1)).reshape([KEYS, HALF])
    else:
        low = four_beside(ways[0], ways[1], ways[2], ways[3], C)
        high = four_beside(ways[4], ways[5], ways[6], ways[7], C)
    return gl.convert_layout(low, LEFT, assert_trivial=True), gl.convert_layout(high, LEFT, assert_trivial=True)


@gluon.jit
def four_beside(a, b, c, d, C: gl.constexpr):
    """Ways [KEYS, LANES] -> [KEYS, 4 LANES]."""
    together = gl.join(gl.join(a, c), gl.join(b, d))
    return together.permute((0, 2, 3, 1)).reshape([C.tile.keys, 4 * (C.shape.head_size // C.format.key.ways)])


@gluon.jit
def value_operands(tile, offsets, UNPACK: gl.constexpr, N: gl.constexpr, C: gl.constexpr):
    """A tile of lanes [KEYS, LANES] as two left operands [64, KEYS], each of half of the ways, one above the other. Each warp unpacks
    the ways that its rows are, and no others."""
    KEYS: gl.constexpr = C.tile.keys
    LANES: gl.constexpr = C.shape.head_size // C.format.key.ways
    LEFT: gl.constexpr = left_operand(C.tile.rows)
    transposed = tile.permute((1, 0))
    if LANES == HALF:
        low, high = UNPACK(transposed.load(LEFT))
    else:
        LAYOUT: gl.constexpr = stacked(LANES, KEYS)
        lanes = transposed.load(gl.SliceLayout(0, LAYOUT))
        way = gl.arange(0, HALF // LANES, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
        if N.zeros:
            offset = offsets.load(gl.SliceLayout(1, LAYOUT))
            low, high = UNPACK(lanes[None, :, :], way[:, None, None], offset[:, None, :])
        else:
            low, high = UNPACK(lanes[None, :, :], way[:, None, None])
        low = gl.convert_layout(low.reshape([HALF, KEYS]), LEFT, assert_trivial=True)
        high = gl.convert_layout(high.reshape([HALF, KEYS]), LEFT, assert_trivial=True)
    return low, high


@gluon.jit
def value_offsets(words, OFFSETS: gl.constexpr, C: gl.constexpr):
    """What takes a tile's zero points off: scale words [KEYS] in shared memory -> [64 / LANES, KEYS] float16, for each way of a half."""
    WAYS: gl.constexpr = HALF // (C.shape.head_size // C.format.key.ways)
    LAYOUT: gl.constexpr = offsets_of(WAYS)
    way = gl.arange(0, WAYS, gl.SliceLayout(1, LAYOUT))
    return OFFSETS(words.load(gl.SliceLayout(0, LAYOUT))[None, :], way[:, None])
