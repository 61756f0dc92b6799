"""int4 write: rotate, quantize, pack and scatter K and V rows in one launch. The mathematics is codec.py's, word for word."""

import triton
import triton.language as tl

from kvq_core.hadamard import sign_bits
from kvq_core.kernels.args import Format
from kvq_core.kernels.packing import to_streams
from kvq_core.kernels.rotation import rotate
from kvq_core.kernels.rounding import floor_bits, floor_float
from kvq_core.kernels.slots import load_rows, new_rows, store_lanes, store_scales
from kvq_core.launch import launch_rows
from kvq_core.launched import Launched
from kvq_core.spec import NewRows
from kvq_int4.codec import CLIP as _CLIP
from kvq_int4.codec import LEVELS
from kvq_int4.codec import MIN_SCALE as _MIN_SCALE
from kvq_int4.codec import SMALLEST_LENGTH as _SMALLEST_LENGTH

FORMAT = Format(streams=4, rotated=True, signs=sign_bits(0, 256))
MIN_SCALE = tl.constexpr(_MIN_SCALE)
CLIP = tl.constexpr(_CLIP)
SMALLEST_LENGTH = tl.constexpr(_SMALLEST_LENGTH)
STEP = tl.constexpr((1 - 2 * _CLIP) / (LEVELS - 1))


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
    x = to_streams(load_rows(source, rows, HEADS, C), C.rows, HEADS.width, 4)
    SIGNS: tl.constexpr = C.format.signs
    y = rotate(x, HEADS, SIGNS, C.upcast_dots)
    low = y[0]
    high = y[0]
    for s in tl.static_range(1, 4):
        low = tl.minimum(low, y[s])
        high = tl.maximum(high, y[s])
    # Padding lanes are 0, and 0 is in the range.
    low = tl.minimum(tl.min(low, 1), 0.0)
    high = tl.maximum(tl.max(high, 1), 0.0)
    step = tl.maximum((high - low) * STEP, MIN_SCALE)
    inverse = 1.0 / step
    zero = tl.minimum(tl.maximum(tl.floor((low + CLIP * (high - low)) * -inverse + 0.5), 0.0), 15.0)
    lanes = tl.zeros_like(y[0]).to(tl.int32)
    length = tl.zeros_like(y[0])
    shadow = tl.zeros_like(y[0])
    for s in tl.static_range(4):
        # Clamped below 16 first: flooring needs it, and gives the same code.
        level = tl.minimum(tl.maximum(y[s] * inverse[:, None] + (zero + 0.5)[:, None], 0.0), 15.5)
        bits = floor_bits(level, C.use_asm)
        # Only the low 16 bits of each are its own, so that a sum packs them.
        lanes += bits << (4 * s)
        length += y[s] * y[s]
        shadow += y[s] * floor_float(bits, zero, C.use_asm)
    store_lanes(plane, rows, lanes.to(tl.uint16), HEADS, C)
    length = tl.sum(length, 1)
    # What is NaN passes both tests.
    scale = tl.where((length < SMALLEST_LENGTH) | (length == float("inf")), step, length / tl.sum(shadow, 1))
    word = (scale.to(tl.int32, bitcast=True) & -16) | zero.to(tl.int32)
    store_scales(plane, rows, word.to(tl.float32, bitcast=True))
