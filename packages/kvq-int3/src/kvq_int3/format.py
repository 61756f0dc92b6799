"""int3 as numbers: what 16-bit lanes of eight channels and the bytes beside them become (codec.py draws them), and :data:`FORMAT`.

A masked field of three bits, read as float16, is the subnormal ``n * 2^-24``, or 8 or 64 times that, by its place. In decode the queries'
ways and the outputs bring what is in excess; otherwise all fields are shifted to one place.
"""

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
def unpack(packed, C: tl.constexpr):
    """(lanes, the byte beside each) -> eight float16 ways of fields, each in its place; or, for many rows, all times 64."""
    lanes, side = packed
    if C.features.use_asm:
        ways = unpack_asm(lanes, side, IN_PLACE if C.tile.decode else ALIGNED)
    else:
        high = lanes >> 7
        last = (side & 0x00C0) | (high & 0x0100)
        if C.tile.decode:
            ways = (
                field(lanes, 0x0007), field(lanes, 0x0038), field(lanes, 0x01C0), field(high, 0x001C), field(high, 0x00E0),
                field(side, 0x0007), field(side, 0x0038), field(last, 0x01C0),
            )  # fmt: skip
        else:
            ways = (
                field(lanes << 6, 0x01C0), field(lanes << 3, 0x01C0), field(lanes, 0x01C0), field(high << 4, 0x01C0),
                field(high << 1, 0x01C0), field(side << 6, 0x01C0), field(side << 3, 0x01C0), field(last, 0x01C0),
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


ROWS = PlaneFormat(
    "int3",
    ways=8,
    side_bytes=True,
    rotated=True,
    signs=SIGNS.value,
    exponent_scale=2.0**24,
    gains=((1.0, 8.0, 64.0, 4.0, 32.0, 1.0, 8.0, 64.0), (64.0,) * 8),
    zero=ZERO,
    unpack=unpack,
    write_plane=write_plane,
)
FORMAT = Format(ROWS, ROWS)
