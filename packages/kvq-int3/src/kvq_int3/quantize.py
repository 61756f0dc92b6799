"""int3's writes in Triton: from rotated rows to codes and scales. The mathematics is codec.py's."""

import triton
import triton.language as tl

from kvq_core.hadamard import LARGEST_SCALE as _LARGEST_SCALE
from kvq_core.hadamard import sign_bits
from kvq_core.kernels.api import (
    ROOM,
    in_head,
    least,
    load_rows,
    reciprocal,
    rotated_pairs,
    rounded_scale,
    store_lanes,
    store_scales,
    store_side_bytes,
    ways_of,
)
from kvq_int3.codec import LARGEST_FACTOR as _LARGEST_FACTOR
from kvq_int3.codec import STEP as _STEP
from kvq_int3.codec import ZERO as _ZERO

SIGNS = tl.constexpr(sign_bits(0, 256))
STEP = tl.constexpr(_STEP)
ZERO = tl.constexpr(_ZERO)
LARGEST_FACTOR = tl.constexpr(_LARGEST_FACTOR)
LARGEST_SCALE = tl.constexpr(_LARGEST_SCALE)
SMALLEST_NORMAL = tl.constexpr(2.0**-126)


@triton.jit
def write_plane(source, plane, rows, IS_VALUE: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr):
    """New rows into their slots, with the keys' scales or the values'."""
    y = ways_of(rotated_pairs(load_rows(source, rows, HEADS, C), HEADS, SIGNS, C, ROOM), 1)
    peak = tl.abs(y[0])
    for s in tl.static_range(1, 8):
        peak = tl.maximum(peak, tl.abs(y[s]))
    # The largest magnitude out first: squares of huge rows stay finite, those of tiny rows above zero.
    peak = tl.maximum(tl.max(peak, 1), SMALLEST_NORMAL)
    inverse = reciprocal(peak, C.use_asm)
    unit = ()
    for s in tl.static_range(8):
        unit = unit + (y[s] * inverse[:, None],)
    squares = unit[0] * unit[0]
    for s in tl.static_range(1, 8):
        squares += unit[s] * unit[s]
    squares = tl.sum(squares, 1)
    per_step = reciprocal(tl.maximum(tl.sqrt(squares * (1.0 / HEADS.size)) * STEP, SMALLEST_NORMAL), C.use_asm)
    word = (y[0].to(tl.int32, bitcast=True) & 0).to(tl.int32)
    side = word
    shadow = word.to(tl.float32)
    level_squares = shadow
    for s in tl.static_range(8):
        # Clamped below 8 first: flooring gives the same code, and NaN one, too.
        code = tl.floor(tl.minimum(tl.maximum(unit[s] * per_step[:, None] + 4.0, 0.0), 7.5))
        level = code - ZERO
        shadow += unit[s] * level
        level_squares += level * level
        if s < 5:
            word |= code.to(tl.int32) << (3 * s)
        else:
            side |= code.to(tl.int32) << (3 * (s - 5))
    word |= (side >> 8) << 15
    shadow = tl.sum(shadow, 1)
    per_level = reciprocal(tl.sum(in_head(level_squares, 0.0, HEADS), 1), C.use_asm)
    if IS_VALUE:
        factor = squares / tl.maximum(shadow, SMALLEST_NORMAL)
    else:
        factor = tl.sqrt(squares * per_level)
    factor = least(factor, shadow * (per_level * LARGEST_FACTOR))
    store_lanes(plane, rows, word.to(tl.uint16), HEADS, C)
    store_side_bytes(plane, rows, side & 0xFF, HEADS, C)
    store_scales(plane, rows, rounded_scale(least(peak * factor * (1.0 / (ROOM * HEADS.block)), LARGEST_SCALE)))
