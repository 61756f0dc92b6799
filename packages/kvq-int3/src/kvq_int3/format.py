"""int3 as numbers: what 16-bit lanes of eight channels and the bytes beside them become (codec.py draws them), and :data:`FORMAT`.

A masked field of three bits, read as float16, is ``n * 2^-24`` times a power of two, by its place: the ten bits of a subnormal and the one
above them count alike. In decode the queries' ways and the outputs bring what is in excess; otherwise all fields are shifted to one place.

The tensor cores align products by their operands' exponents, which subnormals share, and truncate: of a field in the lowest place ten bits
are lost. Codes of values are all positive, and so is the error, which the inverse rotation then adds up in a head's first channel. So in
values no field lies below bit 4. A key's errors have the signs of a query's channels.
"""

from dataclasses import replace

import triton
import triton.language as tl

from kvq_core.kernels.api import Format, PlaneFormat
from kvq_int3.codec import ZERO
from kvq_int3.quantize import SIGNS, write_plane

IN_PLACE = tl.constexpr("""
    {
    .reg .b32 x, y;
    shr.u32 x, $8, 7;
    and.b32 $0, $8, 0x00070007;
    and.b32 $1, $8, 0x00380038;
    and.b32 $2, $8, 0x01c001c0;
    and.b32 $3, x, 0x001c001c;
    and.b32 $4, x, 0x00e000e0;
    and.b32 $5, $9, 0x00070007;
    and.b32 $6, $9, 0x00380038;
    lop3.b32 y, x, $9, 0x01000100, 0xe4;
    and.b32 $7, y, 0x01c001c0;
    }
""")
"""A pair of lanes and the bytes beside them -> eight ways, each two float16. A shift carries bits of the upper lane into the lower one, but
only above those that the masks keep."""
RAISED = tl.constexpr("""
    {
    .reg .b32 x, y;
    shl.b32 x, $8, 4;
    and.b32 $0, x, 0x00700070;
    and.b32 $1, x, 0x03800380;
    and.b32 $2, $8, 0x01c001c0;
    shr.u32 x, $8, 5;
    and.b32 $3, x, 0x00700070;
    and.b32 $4, x, 0x03800380;
    shl.b32 y, $9, 4;
    and.b32 $5, y, 0x00700070;
    and.b32 $6, y, 0x03800380;
    shl.b32 y, $9, 2;
    lop3.b32 y, x, y, 0x04000400, 0xe4;
    and.b32 $7, y, 0x07000700;
    }
""")
"""The same with no field below bit 4."""
ALIGNED = tl.constexpr("""
    {
    .reg .b32 x, y;
    shl.b32 x, $8, 6;
    and.b32 $0, x, 0x01c001c0;
    shl.b32 x, $8, 3;
    and.b32 $1, x, 0x01c001c0;
    and.b32 $2, $8, 0x01c001c0;
    shr.u32 x, $8, 3;
    and.b32 $3, x, 0x01c001c0;
    shr.u32 x, $8, 6;
    and.b32 $4, x, 0x01c001c0;
    shl.b32 y, $9, 6;
    and.b32 $5, y, 0x01c001c0;
    shl.b32 y, $9, 3;
    and.b32 $6, y, 0x01c001c0;
    shr.u32 x, $8, 7;
    lop3.b32 y, x, $9, 0x01000100, 0xe4;
    and.b32 $7, y, 0x01c001c0;
    }
""")
"""The same with all fields in bits 6 to 8."""
REGISTERS = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 2))


@triton.jit
def unpack_keys(packed, C: tl.constexpr):
    """(lanes, the byte beside each) -> eight float16 ways of fields, each in its place; or, for many rows, all times 64."""
    if C.tile.decode:
        lanes, side = packed
        if C.features.use_asm:
            ways = unpack_asm(lanes, side, IN_PLACE)
        else:
            high = lanes >> 7
            ways = (
                field(lanes, 0x0007), field(lanes, 0x0038), field(lanes, 0x01C0), field(high, 0x001C), field(high, 0x00E0),
                field(side, 0x0007), field(side, 0x0038), field((side & 0x00C0) | (high & 0x0100), 0x01C0),
            )  # fmt: skip
    else:
        ways = unpack_aligned(packed, C)
    return ways


@triton.jit
def unpack_values(packed, C: tl.constexpr):
    """The same with all fields raised."""
    if C.tile.decode:
        lanes, side = packed
        if C.features.use_asm:
            ways = unpack_asm(lanes, side, RAISED)
        else:
            low, high, beside = lanes << 4, lanes >> 5, side << 4
            ways = (
                field(low, 0x0070), field(low, 0x0380), field(lanes, 0x01C0), field(high, 0x0070), field(high, 0x0380),
                field(beside, 0x0070), field(beside, 0x0380), field(((side << 2) & 0x0300) | (high & 0x0400), 0x0700),
            )  # fmt: skip
    else:
        ways = unpack_aligned(packed, C)
    return ways


@triton.jit
def unpack_aligned(packed, C: tl.constexpr):
    lanes, side = packed
    if C.features.use_asm:
        ways = unpack_asm(lanes, side, ALIGNED)
    else:
        high = lanes >> 7
        ways = (
            field(lanes << 6, 0x01C0), field(lanes << 3, 0x01C0), field(lanes, 0x01C0), field(high << 4, 0x01C0), field(high << 1, 0x01C0),
            field(side << 6, 0x01C0), field(side << 3, 0x01C0), field((side & 0x00C0) | (high & 0x0100), 0x01C0),
        )  # fmt: skip
    return ways


@triton.jit
def field(lanes, MASK: tl.constexpr):
    return (lanes & MASK).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def unpack_asm(lanes, side, ASM: tl.constexpr):
    return tl.inline_asm_elementwise(
        ASM,
        REGISTERS,
        [lanes, side],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


KEYS = PlaneFormat(
    "int3",
    ways=8,
    side_bytes=True,
    rotated=True,
    signs=SIGNS.value,
    exponent_scale=2.0**24,
    gains=((1.0, 8.0, 64.0, 4.0, 32.0, 1.0, 8.0, 64.0), (64.0,) * 8),
    zero=ZERO,
    grid=2.0,
    unpack=unpack_keys,
    write_plane=write_plane,
)
VALUES = replace(KEYS, gains=((16.0, 128.0, 64.0, 16.0, 128.0, 16.0, 128.0, 256.0), (64.0,) * 8), unpack=unpack_values)
FORMAT = Format(KEYS, VALUES)
