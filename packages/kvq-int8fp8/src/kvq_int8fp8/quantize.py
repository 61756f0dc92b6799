"""int8's and fp8's writes in Triton: scale, round, pack two codes a lane. The mathematics is codec.py's."""

import triton
import triton.language as tl

from kvq_core.hadamard import LARGEST_SCALE as _LARGEST_SCALE
from kvq_core.kernels.api import deinterleave, e4m3_pair, floor_bits, load_rows, reciprocal, store_lanes, store_scales, to_float, widest
from kvq_int8fp8.codec import E4M3_MAX, INT8_MAX
from kvq_int8fp8.codec import MIN_SCALE as _MIN_SCALE

MIN_SCALE = tl.constexpr(_MIN_SCALE)
LARGEST_SCALE = tl.constexpr(_LARGEST_SCALE)
PER_INT8_MAX = tl.constexpr(1.0 / INT8_MAX)
PER_E4M3_MAX = tl.constexpr(1.0 / E4M3_MAX)


@triton.jit
def write_int8(source, plane, rows, IS_VALUE: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr):
    """New rows into their slots, K and V alike, as in all three modes."""
    low, high = halves(source, rows, HEADS, C)
    peak, scale = row_scale(low, high, PER_INT8_MAX)
    inverse = reciprocal(scale, C.use_asm)[:, None]
    lanes = (int8_bits(low * inverse, C.use_asm) | int8_bits(high * inverse, C.use_asm) << 8).to(tl.uint16)
    store_row_scales(plane, rows, peak, scale)
    store_lanes(plane, rows, lanes, HEADS, C, 4)


@triton.jit
def write_fp8(source, plane, rows, IS_VALUE: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr):
    low, high = halves(source, rows, HEADS, C)
    peak, scale = row_scale(low, high, PER_E4M3_MAX)
    inverse = reciprocal(scale, C.use_asm)[:, None]
    lanes = e4m3_pair(low * inverse, high * inverse, C.fp8_hardware)
    store_row_scales(plane, rows, peak, scale)
    store_lanes(plane, rows, lanes, HEADS, C, 4)


@triton.jit
def write_fp8_per_tensor(source, plane, rows, IS_VALUE: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr):
    low, high = halves(source, rows, HEADS, C)
    inverse = 1.0 / tl.load(plane.scales)
    store_lanes(plane, rows, e4m3_pair(low * inverse, high * inverse, C.fp8_hardware), HEADS, C, 4)


@triton.jit
def halves(source, rows, HEADS: tl.constexpr, C: tl.constexpr):
    """The channels of new rows that go into the lower and the upper half of lanes, float32 [ROWS, WIDTH] each."""
    return deinterleave(to_float(load_rows(source, rows, HEADS, C), C.use_asm), C.rows, HEADS.width, 2)


@triton.jit
def row_scale(low, high, PER_LARGEST: tl.constexpr):
    """(largest magnitude, scale) of each row, [ROWS]."""
    peak = tl.reduce(widest(tl.abs(low), tl.abs(high)), 1, widest)
    return peak, tl.maximum(peak * PER_LARGEST, MIN_SCALE)


@triton.jit
def store_row_scales(plane, rows, peak, scale):
    """Scales, [ROWS]; NaN where the peak is no number."""
    store_scales(plane, rows, tl.fma(peak, 0.0, tl.minimum(scale, LARGEST_SCALE)))


@triton.jit
def int8_bits(x, ASM: tl.constexpr):
    """The nearest int8, ties away from zero, as the byte 0..255 in an int32; |x| < 127.5, as scaled rows are."""
    size = floor_bits(tl.abs(x) + 0.5, ASM) & 0x7F
    negative = x.to(tl.int32, bitcast=True) >> 31
    return ((size ^ negative) - negative) & 0xFF
