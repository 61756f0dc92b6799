"""int2's writes of keys with an order of channels, in Triton. The mathematics is ordered.py's."""

import triton
import triton.language as tl

from kvq_core.hadamard import LARGEST_SCALE as _LARGEST_SCALE
from kvq_core.kernels.api import ROOM, in_head, least, load_rows, rotated_pairs, rounded_scale, store_lanes, store_scales, ways_of
from kvq_core.smoothing.order import FINER as _FINER
from kvq_core.smoothing.order import FIRST as _FIRST
from kvq_core.smoothing.order import PARTS as _PARTS
from kvq_int2.ordered import GAIN as _GAIN
from kvq_int2.quantize import BOUNDARY, INNER, OUTER, SMALLEST_NORMAL, peaks, scaled, sign_bit, sign_shifted_in

LARGEST_SCALE = tl.constexpr(_LARGEST_SCALE)
FINER = tl.constexpr(_FINER)
FIRST = tl.constexpr(_FIRST)
PARTS = tl.constexpr(_PARTS)
GAIN = tl.constexpr(_GAIN)


@triton.jit
def write_ordered(source, plane, rows, IS_VALUE: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr):
    """New keys into their slots, with their scales."""
    tl.static_assert(not IS_VALUE, "an order is of keys")
    y = ways_of(rotated_pairs(load_rows(source, rows, HEADS, C), HEADS, None, C, ROOM), 1)
    part = tl.arange(0, HEADS.width)[None, :] // (HEADS.lanes // PARTS)
    # Squares of huge values overflow and those of tiny ones vanish, but not of a row over its largest magnitude.
    unit = tl.maximum(peaks(y), SMALLEST_NORMAL)
    y = scaled(y, 1.0 / unit)
    size = tl.sqrt(tl.sum(in_head(squares(y, part), 0.0, HEADS), 1) * (PARTS / ((PARTS - 1) * HEADS.size)))
    # A NaN of the row is in the sum of its squares.
    scales = rounded_scale(least(size * unit * (GAIN / (ROOM * HEADS.block)), LARGEST_SCALE))
    step = scales * (ROOM * HEADS.block) / unit
    boundary = tl.maximum(size * BOUNDARY, SMALLEST_NORMAL)[:, None]
    is_fine = part >= PARTS - 1
    for s in tl.static_range(8):
        # In the last part the first one's codes are found anew, of the same numbers.
        coarse = tl.where(tl.abs(y[s]) >= boundary * FINER, OUTER, INNER) * (step * FINER)[:, None]
        left = y[s] - tl.where(y[s] < 0.0, -coarse, coarse)
        x = tl.where(is_fine, left, y[s])
        beyond = tl.abs(x) - tl.where(is_fine, (step * BOUNDARY)[:, None], boundary)
        if s == 0:
            negative = sign_bit(x)
            inner = sign_bit(beyond)
        else:
            negative = sign_shifted_in(negative, x, C.use_asm)
            inner = sign_shifted_in(inner, beyond, C.use_asm)
    lanes = (negative << 8 | inner ^ 0xFF).to(tl.uint16)
    store_lanes(plane, rows, lanes, HEADS, C)
    store_scales(plane, rows, scales)


@triton.jit
def squares(y, part):
    """Of the coarse places, the first part's as large as the others': sums over ways, [ROWS, WIDTH]."""
    total = y[0] * y[0]
    for s in tl.static_range(1, 8):
        total += y[s] * y[s]
    return tl.where(part == 0, total * (1.0 / (FIRST * FIRST)), tl.where(part < PARTS - 1, total, 0.0))
