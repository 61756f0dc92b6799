"""int2 write: rotate, compare with the three boundaries, pack two bit planes and scatter. The mathematics is codec.py's."""

import triton
import triton.language as tl

from kvq_core.kernels.args import Format
from kvq_core.kernels.rotation import rotated_pairs, stream
from kvq_core.kernels.slots import in_head, load_rows, new_rows, store_lanes, store_scales
from kvq_core.launch import launch_rows
from kvq_core.launched import Launched
from kvq_core.spec import NewRows
from kvq_int2.codec import BOUNDARY as _BOUNDARY
from kvq_int2.codec import INNER as _INNER
from kvq_int2.codec import OUTER as _OUTER

FORMAT = Format(streams=8, rotated=True)
BOUNDARY = tl.constexpr(_BOUNDARY)
INNER = tl.constexpr(_INNER)
OUTER = tl.constexpr(_OUTER)
SMALLEST_NORMAL = tl.constexpr(2.0**-126)


def launch_write(rows: NewRows) -> Launched:
    """Run the kernel on validated rows."""
    return launch_rows(write, rows, FORMAT)


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def write(key, value, keys, values, slot_mapping, num_tokens, num_slots, C: tl.constexpr):
    K_HEADS: tl.constexpr = C.key_heads
    V_HEADS: tl.constexpr = C.value_heads
    rows = new_rows(slot_mapping, num_tokens, num_slots, C)
    if tl.program_id(1) == 0:
        write_plane(key, keys, rows, K_HEADS, False, C)
    else:
        write_plane(value, values, rows, V_HEADS, True, C)


@triton.jit
def write_plane(source, plane, rows, HEADS: tl.constexpr, UNBIASED: tl.constexpr, C: tl.constexpr):
    pairs = rotated_pairs(load_rows(source, rows, HEADS, C), HEADS, None, C)
    # The longer of a + b and a - b is as long as a and b together.
    peak = tl.abs(pairs[0]) + tl.abs(pairs[1])
    for i in tl.static_range(1, 4):
        peak = tl.maximum(peak, tl.abs(pairs[2 * i]) + tl.abs(pairs[2 * i + 1]))
    peak = tl.max(peak, 1)
    # Squares of the row over its largest magnitude neither overflow nor vanish; 1 / a subnormal would.
    inverse = 1.0 / tl.maximum(peak, SMALLEST_NORMAL)
    squares = tl.zeros_like(pairs[0])
    for s in tl.static_range(8):
        unit = stream(pairs, s) * inverse[:, None]
        squares += unit * unit
    squares = tl.sum(squares, 1)
    ROOT: tl.constexpr = HEADS.size**0.5
    # Above 0, so that a row of zeros has inner levels.
    boundary = tl.maximum(peak * tl.sqrt(squares) * (BOUNDARY / ROOT), SMALLEST_NORMAL)
    negative = tl.zeros_like(pairs[0]).to(tl.uint32)
    inner = tl.zeros_like(negative)
    shadow = tl.zeros_like(pairs[0])
    for s in tl.static_range(8):
        y = stream(pairs, s)
        beyond = tl.abs(y) - boundary[:, None]
        # Sign bits, shifted in from the right: of y, and of |y| - boundary, which is clear in the outer cells.
        negative = negative << 1 | y.to(tl.uint32, bitcast=True) >> 31
        inner = inner << 1 | beyond.to(tl.uint32, bitcast=True) >> 31
        level = tl.where(beyond >= 0.0, OUTER, INNER)
        shadow += level * (tl.abs(y) * inverse[:, None] if UNBIASED else level)
    store_lanes(plane, rows, (negative << 8 | inner ^ 0xFF).to(tl.uint16), HEADS, C)
    shadow = tl.sum(in_head(shadow, 0.0, HEADS), 1)
    if UNBIASED:
        factor = squares / tl.maximum(shadow, SMALLEST_NORMAL)
    else:
        factor = tl.sqrt(squares / shadow)
    # A NaN of the row is in the sum of its squares.
    store_scales(plane, rows, peak * factor * (1.0 / HEADS.block))
