"""int2 write: rotate, compare with the three boundaries, pack two bit planes and scatter. The mathematics is codec.py's."""

import triton
import triton.language as tl

from kvq_core.kernels.args import Format
from kvq_core.kernels.packing import to_streams
from kvq_core.kernels.rotation import rotate
from kvq_core.kernels.slots import has_nan, load_rows, new_rows, store_lanes, store_scales
from kvq_core.launch import launch_rows
from kvq_core.launched import Launched
from kvq_core.spec import NewRows
from kvq_int2.codec import BOUNDARY as _BOUNDARY

FORMAT = Format(streams=8, rotated=True)
BOUNDARY = tl.constexpr(_BOUNDARY)
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
        write_plane(key, keys, rows, K_HEADS, C)
    else:
        write_plane(value, values, rows, V_HEADS, C)


@triton.jit
def write_plane(source, plane, rows, HEADS: tl.constexpr, C: tl.constexpr):
    x = to_streams(load_rows(source, rows, HEADS, C), C.rows, HEADS.width, 8)
    y = rotate(x, HEADS, None, C.upcast_dots)
    peak = tl.max(tl.abs(y[0]), 1)
    for s in tl.static_range(1, 8):
        peak = tl.maximum(peak, tl.max(tl.abs(y[s]), 1))
    # Squares of the row over its largest magnitude neither overflow nor vanish; 1 / a subnormal would.
    inverse = 1.0 / tl.maximum(peak, SMALLEST_NORMAL)
    squares = tl.zeros_like(peak)
    for s in tl.static_range(8):
        unit = y[s] * inverse[:, None]
        squares += tl.sum(unit * unit, 1)
    norm = tl.sqrt(squares)
    ROOT: tl.constexpr = HEADS.size**0.5
    # Above 0, so that a row of zeros has inner levels.
    boundary = tl.maximum(peak * norm * (BOUNDARY / ROOT), SMALLEST_NORMAL)
    lanes = tl.zeros_like(y[0]).to(tl.int32)
    for s in tl.static_range(8):
        # Sign bits, shifted to their places: of y, and of |y| - boundary, which is clear in the outer cells.
        negative = y[s].to(tl.int32, bitcast=True)
        inner = (tl.abs(y[s]) - boundary[:, None]).to(tl.int32, bitcast=True)
        lanes |= (negative >> (16 + s)) & (0x8000 >> s)
        lanes |= (~inner >> (24 + s)) & (0x80 >> s)
    store_lanes(plane, rows, lanes.to(tl.uint16), HEADS, C)
    scale = peak * norm * (1.0 / (ROOT * HEADS.block))
    # A NaN of a row is in every channel of its block, and so in the first stream.
    store_scales(plane, rows, tl.where(has_nan(y[0]), float("nan"), scale))
