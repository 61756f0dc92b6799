"""int2's writes in Triton: rotate, compare with the three boundaries, pack two bit planes. The mathematics is codec.py's."""

import triton
import triton.language as tl

from kvq_core.hadamard import LARGEST_SCALE as _LARGEST_SCALE
from kvq_core.kernels.api import (
    ROOM,
    any_row,
    in_head,
    least,
    load_rows,
    reciprocal,
    rotated_pairs,
    rounded_scale,
    square_root,
    store_lanes,
    store_scales,
    ways_of,
)
from kvq_int2.backend import Int2PerTokenHead
from kvq_int2.bound import fewest_outer
from kvq_int2.codec import BOUNDARY as _BOUNDARY
from kvq_int2.codec import INNER as _INNER
from kvq_int2.codec import LARGEST_FACTOR as _LARGEST_FACTOR
from kvq_int2.codec import OUTER as _OUTER

BOUNDARY = tl.constexpr(_BOUNDARY)
INNER = tl.constexpr(_INNER)
OUTER = tl.constexpr(_OUTER)
LARGEST_FACTOR = tl.constexpr(_LARGEST_FACTOR)
LARGEST_SCALE = tl.constexpr(_LARGEST_SCALE)
SMALLEST_NORMAL = tl.constexpr(2.0**-126)
MULTIPLE = tl.constexpr(Int2PerTokenHead.head_size_multiple)
# For each multiple of MULTIPLE channels the fewest outer cells of keys whose scales need no bound. Others are written again, with it.
ENOUGH_OUTER = tl.constexpr(tuple(fewest_outer(size) for size in range(0, Int2PerTokenHead.max_head_size + 1, MULTIPLE.value)))
SHORTEST = tl.constexpr(2.0**-90)


@triton.jit
def write_plane(source, plane, rows, IS_VALUE: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr):
    """New rows into their slots, with the keys' scales or the values'."""
    pairs = rotated_pairs(load_rows(source, rows, HEADS, C), HEADS, None, C, ROOM)
    lanes, scales = quantized(pairs, IS_VALUE, 1, HEADS, C)
    store_lanes(plane, rows, lanes[0], HEADS, C)
    store_scales(plane, rows, scales)


@triton.jit
def quantized(pairs, IS_VALUE: tl.constexpr, APART: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr):
    """Rotated rows, times ROOM -> packed lanes [ROWS, WIDTH], one tensor, and scales [ROWS].

    ``pairs``, APART: as in :func:`kvq_core.kernels.hadamard.way`."""
    y = ways_of(pairs, APART)
    squares = squared_lengths(y)
    lanes, scales, num_outer = cells(y, squares, IS_VALUE, IS_VALUE, HEADS, C)
    # Squares of huge values overflow and those of tiny ones vanish, but not of a row over its largest magnitude. The rows beside it stay as
    # they are: bytes do not depend on what else is written.
    extreme = (squares < SHORTEST) | (squares == float("inf"))
    rare = extreme
    if not IS_VALUE:
        rare = extreme | (num_outer < ENOUGH_OUTER[HEADS.size // MULTIPLE])
    if any_row(rare, C.use_asm):
        unit = tl.where(extreme, tl.maximum(peaks(y), SMALLEST_NORMAL), 1.0)
        y = scaled(y, 1.0 / unit)
        lanes, scales, _ = cells(y, squared_lengths(y), IS_VALUE, True, HEADS, C)
        scales = least(unit * scales, LARGEST_SCALE)
    return (lanes,), rounded_scale(scales)


@triton.jit
def cells(y, squares, IS_VALUE: tl.constexpr, BOUNDED: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr):
    """The cells that eight ways lie in, as lanes, and scales; ``squares``: squared lengths of rows, neither huge nor tiny. And how many
    values lie in outer cells.

    BOUNDED: scales are as codec.py bounds them. Those of keys that have enough outer cells (bound.py) are anyway."""
    ROOT: tl.constexpr = HEADS.size**0.5
    # Above 0, so that a row of zeros has inner levels.
    length = square_root(squares, C.use_asm)
    boundary = tl.maximum(length * (BOUNDARY / ROOT), SMALLEST_NORMAL)
    for s in tl.static_range(8):
        beyond = tl.abs(y[s]) - boundary[:, None]
        # The sign of |y| - boundary is clear in the outer cells.
        if s == 0:
            negative = sign_bit(y[s])
            inner = sign_bit(beyond)
        else:
            negative = sign_shifted_in(negative, y[s], C.use_asm)
            inner = sign_shifted_in(inner, beyond, C.use_asm)
        if BOUNDED:
            if s == 0:
                total = tl.abs(y[s])
                apart = tl.abs(beyond)
            else:
                total += tl.abs(y[s])
                apart += tl.abs(beyond)
    outer = inner ^ 0xFF
    num_outer = tl.sum(in_head(bits_set(outer, C.use_asm), 0, HEADS), 1).to(tl.float32)
    level_squares = num_outer * (OUTER * OUTER - INNER * INNER) + INNER * INNER * HEADS.size
    inverse = reciprocal(level_squares, C.use_asm)
    factor = length * square_root(inverse, C.use_asm)
    if BOUNDED:
        # Of |y| - b the positive part is half of itself and its magnitude; b more each, and that is what lies in the outer cells.
        total = tl.sum(total, 1)
        apart = tl.sum(in_head(apart, 0.0, HEADS), 1)
        outside = (total - boundary * HEADS.size + apart) * 0.5 + num_outer * boundary
        shadow = tl.maximum(total * INNER + outside * (OUTER - INNER), SMALLEST_NORMAL)
        if IS_VALUE:
            factor = squares * reciprocal(shadow, C.use_asm)
        factor = least(factor, shadow * (inverse * LARGEST_FACTOR))
    # A NaN of the row is in the sum of its squares.
    return (negative << 8 | outer).to(tl.uint16), factor * (1.0 / (ROOM * HEADS.block)), num_outer


@triton.jit
def squared_lengths(y):
    """<y, y> of each row, [ROWS]."""
    squares = y[0] * y[0]
    for s in tl.static_range(1, 8):
        squares += y[s] * y[s]
    return tl.sum(squares, 1)


@triton.jit
def peaks(y):
    """The largest magnitude of each row, [ROWS]."""
    peak = tl.abs(y[0])
    for s in tl.static_range(1, 8):
        peak = tl.maximum(peak, tl.abs(y[s]))
    return tl.max(peak, 1)


@triton.jit
def scaled(y, factor):
    """Rows times a factor each, [ROWS]."""
    result = ()
    for s in tl.static_range(8):
        result = result + (y[s] * factor[:, None],)
    return result


@triton.jit
def sign_bit(x):
    """1 where the sign of a float32 is set, as uint32."""
    return x.to(tl.uint32, bitcast=True) >> 31


@triton.jit
def sign_shifted_in(bits, x, ASM: tl.constexpr):
    """``bits``, a place up, and the sign of a float32 in the lowest. ASM: for the first two the compiler would take three instructions."""
    if ASM:
        result = tl.inline_asm_elementwise("shf.l.wrap.b32 $0, $2, $1, 1;", "=r,r,r", [bits, x], dtype=tl.uint32, is_pure=True, pack=1)
    else:
        result = bits << 1 | sign_bit(x)
    return result


@triton.jit
def bits_set(x, ASM: tl.constexpr):
    """How many of the low eight bits are set."""
    if ASM:
        count = tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)
    else:
        x = (x & 0x55) + (x >> 1 & 0x55)
        x = (x & 0x33) + (x >> 2 & 0x33)
        count = ((x & 0xF) + (x >> 4)).to(tl.int32)
    return count
