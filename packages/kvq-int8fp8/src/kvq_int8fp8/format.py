"""int8 and fp8 as numbers: what 16-bit lanes of two codes become, and the modes' formats. No integer is converted to a float.

int8: with its sign bit flipped a code is ``n = code + 128`` in 0..255, and ``n`` read as float16 is the subnormal ``n * 2^-24``, exact
in a tensor-core product. 128 is the zero point.

fp8: an e4m3 number's exponent and mantissa, moved to where float16 keeps them, are the number times 2^-8; subnormals included. Where the
hardware converts two at once (sm_89 and later), it does, and they are the number itself, or NaN.
"""

from dataclasses import replace

import triton
import triton.language as tl

from kvq_core.kernels.api import Format, PlaneFormat
from kvq_int8fp8.quantize import write_fp8, write_fp8_per_tensor, write_int8
from kvq_int8fp8.unpacking import convert_fp8_asm, unpack_fp8_asm, unpack_int8_asm


@triton.jit
def unpack_int8(lanes, C: tl.constexpr):
    """16-bit lanes -> float16 ways of ``code + 128`` in units of 2^-24."""
    if C.features.use_asm:
        ways = unpack_int8_asm(lanes)
    else:
        offset = lanes ^ 0x8080
        ways = ((offset & 0x00FF).to(tl.float16, bitcast=True), (offset >> 8).to(tl.float16, bitcast=True))
    return ways


@triton.jit
def unpack_fp8(lanes, C: tl.constexpr):
    """16-bit lanes -> float16 ways of the e4m3 number in units of 2^-8, or of 1 from the hardware."""
    if C.features.fp8_hardware:
        ways = convert_fp8_asm(lanes)
    elif C.features.use_asm:
        ways = unpack_fp8_asm(lanes)
    else:
        low = ((lanes & 0x0080) << 8) | ((lanes & 0x007F) << 7)
        high = (lanes & 0x8000) | ((lanes & 0x7F00) >> 1)
        ways = (low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True))
    return ways


_INT8 = PlaneFormat("int8", ways=2, exponent_scale=2.0**24, zero=128.0, unpack=unpack_int8, write_plane=write_int8)
_FP8 = PlaneFormat(
    "fp8", ways=2, exponent_scale=2.0**8, converts=True, huge_scales=True, has_nan=True, unpack=unpack_fp8, write_plane=write_fp8
)
_FP8_PER_TENSOR = replace(_FP8, name="fp8_per_tensor", scales="plane", huge_scales=False, write_plane=write_fp8_per_tensor)
INT8 = Format(_INT8, _INT8)
FP8 = Format(_FP8, _FP8)
FP8_PER_TENSOR = Format(_FP8_PER_TENSOR, _FP8_PER_TENSOR)
