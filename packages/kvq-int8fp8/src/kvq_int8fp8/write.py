"""int8 and fp8 write: scale, round, pack two codes a lane and scatter, K and V in one launch. The mathematics is codec.py's."""

import triton
import triton.language as tl

from kvq_core.kernels.args import Format
from kvq_core.kernels.packing import to_streams
from kvq_core.kernels.rounding import floor_bits, to_fp8_bits
from kvq_core.kernels.slots import load_rows, new_rows, store_lanes, store_scales
from kvq_core.launch import launch_rows
from kvq_core.launched import Launched
from kvq_core.spec import NewRows
from kvq_int8fp8.codec import E4M3_MAX, INT8_MAX
from kvq_int8fp8.codec import MIN_SCALE as _MIN_SCALE

MIN_SCALE = tl.constexpr(_MIN_SCALE)
PER_INT8_MAX = tl.constexpr(1.0 / INT8_MAX)
PER_E4M3_MAX = tl.constexpr(1.0 / E4M3_MAX)
INFINITY_BITS = tl.constexpr(0x7F800000)


def format_of(is_int8: bool, per_tensor: bool) -> Format:
    """The mode's rows as the kernels see them."""
    return Format(streams=2, variant="int8" if is_int8 else "fp8_per_tensor" if per_tensor else "fp8")


def launch_write(rows: NewRows, *, is_int8: bool, per_tensor: bool) -> Launched:
    """Run the kernel on validated rows."""
    return launch_rows(write, rows, format_of(is_int8, per_tensor))


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
    x = load_rows(source, rows, HEADS, C).to(tl.float32)
    if C.format.variant == "fp8_per_tensor":
        inverse = 1.0 / tl.load(plane.scales)
        code = to_fp8_bits(x * inverse, 3, 7, 448.0).to(tl.int32)
    else:
        # As integers, magnitudes are in the order of the numbers, and NaN is above infinity.
        peak_bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
        peak = peak_bits.to(tl.float32, bitcast=True)
        if C.format.variant == "int8":
            scale = tl.maximum(peak * PER_INT8_MAX, MIN_SCALE)
            code = int8_bits(x * (1.0 / scale)[:, None], C.use_asm)
        else:
            scale = tl.maximum(peak * PER_E4M3_MAX, MIN_SCALE)
            code = to_fp8_bits(x * (1.0 / scale)[:, None], 3, 7, 448.0).to(tl.int32)
        store_scales(plane, rows, tl.where(peak_bits > INFINITY_BITS, float("nan"), scale))
    low, high = to_streams(code, C.rows, HEADS.width, 2)
    store_lanes(plane, rows, (low | high << 8).to(tl.uint16), HEADS, C)


@triton.jit
def int8_bits(x, ASM: tl.constexpr):
    """The nearest int8, ties away from zero, as the byte 0..255 in an int32; |x| < 127.5, as scaled rows are."""
    size = floor_bits(tl.abs(x) + 0.5, ASM) & 0x7F
    negative = x.to(tl.int32, bitcast=True) >> 31
    return ((size ^ negative) - negative) & 0xFF
