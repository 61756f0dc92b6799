"""int8 and fp8 write: scale, round, pack two codes a lane and scatter, K and V in one launch. The mathematics is codec.py's."""

import triton
import triton.language as tl

from kvq_core.hadamard import LARGEST_SCALE as _LARGEST_SCALE
from kvq_core.kernels.facts import Format
from kvq_core.kernels.packing import to_streams
from kvq_core.kernels.rounding import e4m3_pair, floor_bits, reciprocal, to_float, widest
from kvq_core.kernels.slots import load_rows, new_rows, store_lanes, store_scales
from kvq_core.launch import launch_rows
from kvq_core.launched import Launched
from kvq_core.spec import NewRows
from kvq_int8fp8.codec import E4M3_MAX, INT8_MAX
from kvq_int8fp8.codec import MIN_SCALE as _MIN_SCALE

MIN_SCALE = tl.constexpr(_MIN_SCALE)
LARGEST_SCALE = tl.constexpr(_LARGEST_SCALE)
PER_INT8_MAX = tl.constexpr(1.0 / INT8_MAX)
PER_E4M3_MAX = tl.constexpr(1.0 / E4M3_MAX)


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
    low, high = to_streams(to_float(load_rows(source, rows, HEADS, C), C.use_asm), C.rows, HEADS.width, 2)
    if C.format.variant == "fp8_per_tensor":
        inverse = 1.0 / tl.load(plane.scales)
        lanes = e4m3_pair(low * inverse, high * inverse, C.fp8_hardware)
    else:
        peak = tl.reduce(widest(tl.abs(low), tl.abs(high)), 1, widest)
        if C.format.variant == "int8":
            scale = tl.maximum(peak * PER_INT8_MAX, MIN_SCALE)
            inverse = reciprocal(scale, C.use_asm)[:, None]
            lanes = (int8_bits(low * inverse, C.use_asm) | int8_bits(high * inverse, C.use_asm) << 8).to(tl.uint16)
        else:
            scale = tl.maximum(peak * PER_E4M3_MAX, MIN_SCALE)
            inverse = reciprocal(scale, C.use_asm)[:, None]
            lanes = e4m3_pair(low * inverse, high * inverse, C.fp8_hardware)
        # NaN where the peak is no number.
        store_scales(plane, rows, tl.fma(peak, 0.0, tl.minimum(scale, LARGEST_SCALE)))
    store_lanes(plane, rows, lanes, HEADS, C, 4)


@triton.jit
def int8_bits(x, ASM: tl.constexpr):
    """The nearest int8, ties away from zero, as the byte 0..255 in an int32; |x| < 127.5, as scaled rows are."""
    size = floor_bits(tl.abs(x) + 0.5, ASM) & 0x7F
    negative = x.to(tl.int32, bitcast=True) >> 31
    return ((size ^ negative) - negative) & 0xFF
