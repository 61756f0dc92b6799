"""Rounding and small floats, in integer arithmetic: the same bits on every target, with or without fp8 hardware."""

import triton
import triton.language as tl

LAST_SCALE_BIT = tl.constexpr(1 << 17)
"""The last bit of a float32 scale with seven significant bits (kvq_core.hadamard.SCALE_BITS)."""


@triton.jit
def floor_bits(x, ASM: tl.constexpr):
    """int32 whose low 16 bits are floor(x), for 0 <= x < 2^16; whatever for NaN.

    x + 2^23, rounded down, has floor(x) in its last mantissa bits: one addition, where a conversion runs at a quarter of its rate.
    """
    if ASM:
        sum = tl.inline_asm_elementwise("add.rz.f32 $0, $1, 0f4B000000;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
        bits = sum.to(tl.int32, bitcast=True)
    else:
        bits = tl.floor(x).to(tl.int32)
    return bits


@triton.jit
def reciprocal(x, ASM: tl.constexpr):
    """1 / x for 2^-126 <= x <= 2^126, infinity and NaN: Triton's quotient (two units in the last place), but for other x."""
    if ASM:
        result = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        result = 1.0 / x
    return result


@triton.jit
def square_root(x, ASM: tl.constexpr):
    """The root of 0, of x >= 2^-126, infinity and NaN, as near as Triton's (a unit in the last place), but for other x."""
    if ASM:
        result = tl.inline_asm_elementwise("sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        result = tl.sqrt(x)
    return result


@triton.jit
def rounded_scale(x):
    """kvq_core.hadamard.rounded_scale of finite scales and NaN, float32 of any shape."""
    bits = (x.to(tl.int32, bitcast=True) + LAST_SCALE_BIT // 2) & -LAST_SCALE_BIT
    # The addition may carry into a NaN's sign and leave a number.
    return tl.fma(x, 0.0, bits.to(tl.float32, bitcast=True))


@triton.jit
def largest(a, b, c, ASM: tl.constexpr):
    """Of three int32 or uint32. sm_90 has an instruction for it, which the compiler does not find in what it makes of long chains."""
    if ASM:
        TYPE: tl.constexpr = "s32" if a.dtype == tl.int32 else "u32"
        result = tl.inline_asm_elementwise(
            "{ .reg .b32 t; max." + TYPE + " t, $1, $2; max." + TYPE + " $0, t, $3; }",
            "=r,r,r,r",
            [a, b, c],
            dtype=a.dtype,
            is_pure=True,
            pack=1,
        )
    else:
        result = tl.maximum(tl.maximum(a, b), c)
    return result


@triton.jit
def to_float(x, ASM: tl.constexpr):
    """x as float32. Two bfloat16 of a register are one instruction each, which the compiler does not find."""
    if ASM and x.dtype == tl.bfloat16:
        y = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def to_nearest(x, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """float32 -> a float of at most 32 bits, nearest even. The interpreter, by itself, truncates to bfloat16."""
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        near = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).to(tl.uint16)
        y = tl.where(x == x, near, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(DTYPE)
    return y


@triton.jit
def to_fp8_bits(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """float32 -> the byte of a clamped 8-bit float, nearest even (e4m3fn: 3, 7, 448; e5m2: 2, 15, 57344). NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.minimum(tl.abs(x), LARGEST)
    size_bits = size.to(tl.int32, bitcast=True)
    SHIFT: tl.constexpr = 23 - MANTISSA
    tie = (size_bits >> SHIFT) & 1
    normal = ((size_bits + ((1 << (SHIFT - 1)) - 1) + tie) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    # Adding 2^k whose last bit has the weight of the smallest subnormal rounds to it, ties to even.
    MAGIC: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
    MAGIC_BITS: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
    subnormal = (size + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS
    code = tl.where(size < 2.0 ** (1 - BIAS), subnormal, normal)
    code = tl.where(x == x, code, 0x7F)
    return (code | sign).to(tl.uint8)


@triton.jit
def least(a, b):
    """The smaller, or NaN where one is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def widest(a, b):
    """The larger, or NaN where one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def in_float16(y):
    """float16 with its largest number in place of infinity: a quantized row may be longer than it was. (Rows not finite are NaN.)"""
    return widest(least(y, 65504.0), -65504.0)


@triton.jit
def e4m3_pair(low, high, HARDWARE: tl.constexpr):
    """float32 pairs -> uint16, the bytes of :func:`to_fp8_bits`, ``low`` in the low one. HARDWARE (sm_89 and later) does it at once.

    Its NaN has no sign, but no arithmetic on such hardware leaves one with a sign, either.
    """
    if HARDWARE:
        pair = tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [low, high], dtype=tl.uint16, is_pure=True, pack=1
        )
    else:
        below = to_fp8_bits(low, 3, 7, 448.0).to(tl.int32)
        pair = (below | to_fp8_bits(high, 3, 7, 448.0).to(tl.int32) << 8).to(tl.uint16)
    return pair
