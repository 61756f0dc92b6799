"""Rounding and small floats, in integer arithmetic: the same bits on every target, with or without fp8 hardware."""

import triton
import triton.language as tl


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
def floor_float(bits, zero, ASM: tl.constexpr):
    """What :func:`floor_bits` found, as a float32, less ``zero``, whole [ROWS] float32 below 2^16."""
    if ASM:
        # The bits are those of floor + 2^23, which one subtraction takes off, exactly.
        value = bits.to(tl.float32, bitcast=True) - (zero + 8388608.0)[:, None]
    else:
        value = bits.to(tl.float32) - zero[:, None]
    return value


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
