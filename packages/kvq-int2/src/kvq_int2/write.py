"""int2 write: rotate, compare with the three boundaries, pack two bit planes and scatter. The mathematics is codec.py's."""

import triton
import triton.language as tl

from kvq_core.kernels.args import Format
from kvq_core.kernels.packing import to_streams
from kvq_core.kernels.rotation import rotate
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
    x = to_streams(load_rows(source, rows, HEADS, C), C.rows, HEADS.width, 8)
    y = rotate(x, HEADS, None, C.upcast_dots)
    peak = tl.abs(y[0])
    for s in tl.static_range(1, 8):
        peak = tl.maximum(peak, tl.abs(y[s]))
    peak = tl.max(peak, 1)
    # Squares of the row over its largest magnitude neither overflow nor vanish; 1 / a subnormal would.
    inverse = 1.0 / tl.maximum(peak, SMALLEST_NORMAL)
    squares = tl.zeros_like(y[0])
    for s in tl.static_range(8):
        unit = y[s] * inverse[:, None]
        squares += unit * unit
    squares = tl.sum(squares, 1)
    ROOT: tl.constexpr = HEADS.size**0.5
    # Above 0, so that a row of zeros has inner levels.
    boundary = tl.maximum(peak * tl.sqrt(squares) * (BOUNDARY / ROOT), SMALLEST_NORMAL)
    lanes = tl.zeros_like(y[0]).to(tl.int32)
    shadow = tl.zeros_like(y[0])
    for s in tl.static_range(8):
        # Sign bits, shifted to their places: of y, and of |y| - boundary, which is clear in the outer cells.
        negative = y[s].to(tl.int32, bitcast=True)
        beyond = tl.abs(y[s]) - boundary[:, None]
        inner = beyond.to(tl.int32, bitcast=True)
        lanes |= (negative >> (16 + s)) & (0x8000 >> s)
        lanes |= (~inner >> (24 + s)) & (0x80 >> s)
        level = tl.where(beyond >= 0.0, OUTER, INNER)
        shadow += level * (tl.abs(y[s]) * inverse[:, None] if UNBIASED else level)
    store_lanes(plane, rows, lanes.to(tl.uint16), HEADS, C)
    shadow = tl.sum(in_head(shadow, 0.0, HEADS), 1)
    if UNBIASED:
        factor = squares / tl.maximum(shadow, SMALLEST_NORMAL)
    else:
        factor = tl.sqrt(squares / shadow)
    # A NaN of the row is in the sum of its squares.
    store_scales(plane, rows, peak * factor * (1.0 / HEADS.block))
