"""int4 as numbers: what 16-bit lanes of four codes become, and :data:`FORMAT`. Codes are never converted: a masked nibble *is* a number.

``lane & 0x000f``, read as float16, is the subnormal ``n * 2^-24``, and ``lane & 0x00f0`` is ``16 n * 2^-24``. The powers of two fold into
the queries' ways and the output's scale.
"""

from dataclasses import replace

import triton
import triton.language as tl

from kvq_core.kernels.api import Format, PlaneFormat, by_key, dot
from kvq_int4.quantize import SIGNS, write_plane

SUBNORMAL = 2.0**24
"""float16's smallest step is 2^-24."""
SIXTEENTH = tl.constexpr(SUBNORMAL / 16)


@triton.jit
def split_word(word):
    """Scale words -> (scale, zero point), float32."""
    bits = word.to(tl.int32, bitcast=True)
    return (bits & -16).to(tl.float32, bitcast=True), (bits & 0xF).to(tl.float32)


@triton.jit
def weighted_zeros(weights, v_word, C: tl.constexpr):
    """sum_j w_j z_j, [ROWS] float32. Where 16 rows come first it is a product: 16 z_j is float16 as codes are (:func:`unpack_values`)."""
    if C.tile.keys_transposed:
        bits = (v_word.to(tl.int32, bitcast=True) & 0xF) << 4
        z = bits.to(tl.uint16).to(tl.float16, bitcast=True)
        total = tl.reshape(dot(weights, z[:, None], None, C.features.upcast_dots), [C.tile.rows]) * SIXTEENTH
    else:
        _, z = split_word(v_word)
        total = tl.sum(weights.to(tl.float32) * by_key(z, C), 0 if C.tile.keys_first else 1)
    return total


@triton.jit
def unpack_keys(lanes, C: tl.constexpr):
    """16-bit lanes -> float16 ways ``n, 16 n, n, 16 n`` in units of 2^-24 in decode, else channels of ``16 n``."""
    if not C.tile.decode:
        ways = unpack_values(lanes, C)
    elif C.features.use_asm:
        ways = unpack_keys_asm(lanes)
    else:
        high = lanes >> 8
        ways = (
            (lanes & 0x000F).to(tl.float16, bitcast=True),
            (lanes & 0x00F0).to(tl.float16, bitcast=True),
            (high & 0x000F).to(tl.float16, bitcast=True),
            (high & 0x00F0).to(tl.float16, bitcast=True),
        )
    return ways


@triton.jit
def unpack_keys_asm(lanes):
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 high;
        shr.u32 high, $4, 8;
        and.b32 $0, $4, 0x000f000f;
        and.b32 $1, $4, 0x00f000f0;
        and.b32 $2, high, 0x000f000f;
        and.b32 $3, high, 0x00f000f0;
        }
        """,
        "=&r,=&r,=&r,=&r,r",
        [lanes],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def unpack_values(lanes, C: tl.constexpr):
    """16-bit lanes -> float16 operands ``16 n`` in units of 2^-24.

    The tensor cores truncate a subnormal's product as if it had the exponent of the smallest normal number: four bits less are lost of
    16 n than of n. What n loses is a bias that all channels of a way share, which un-rotation gathers in one or two channels (measured
    on sm_90). For scores it does not matter: there it is the same for every key.
    """
    if C.features.use_asm:
        ways = unpack_values_asm(lanes)
    else:
        ways = (
            ((lanes << 4) & 0x00F0).to(tl.uint16).to(tl.float16, bitcast=True),
            (lanes & 0x00F0).to(tl.float16, bitcast=True),
            ((lanes >> 4) & 0x00F0).to(tl.float16, bitcast=True),
            ((lanes >> 8) & 0x00F0).to(tl.float16, bitcast=True),
        )
    return ways


@triton.jit
def unpack_values_asm(lanes):
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 x;
        shl.b32 x, $4, 4;
        and.b32 $0, x, 0x00f000f0;
        and.b32 $1, $4, 0x00f000f0;
        shr.u32 x, $4, 4;
        and.b32 $2, x, 0x00f000f0;
        shr.u32 x, $4, 8;
        and.b32 $3, x, 0x00f000f0;
        }
        """,
        "=&r,=&r,=&r,=&r,r",
        [lanes],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


KEYS = PlaneFormat(
    "int4",
    ways=4,
    rotated=True,
    signs=SIGNS.value,
    divided=True,
    exponent_scale=SUBNORMAL,
    gains=((1.0, 16.0, 1.0, 16.0), (16.0,) * 4),
    grid=1.0,
    unpack=unpack_keys,
    split=split_word,
    write_plane=write_plane,
)
VALUES = replace(KEYS, exponent_scale=SUBNORMAL / 16, gains=((), ()), unpack=unpack_values, weighted_zeros=weighted_zeros)
FORMAT = Format(KEYS, VALUES)
