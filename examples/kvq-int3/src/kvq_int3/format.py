"""int3 as numbers: what 16-bit lanes of eight channels and the bytes beside them become (codec.py draws them), and :data:`FORMAT`.

A masked field of three bits, read as float16, is the subnormal ``n * 2^-24``, or 8 or 64 times that, by its place. In decode the queries'
ways and the outputs bring what is in excess; otherwise all fields are shifted to one place.
"""

import triton
import triton.language as tl

from kvq_core.kernels.api import Format, PlaneFormat
from kvq_int3.codec import ZERO
from kvq_int3.quantize import SIGNS, write_plane


def four_lanes(shifts: tuple[int, ...], masks: tuple[int, ...]) -> str:
    """PTX: two registers of two lanes each and one of the four bytes beside them -> for each way two registers of two float16 fields.

    ``shifts``: of each way, how far its field goes up in its lane (0 to 4) or byte (5 to 7). A shift mixes the two lanes of a register only
    in bits that the masks do not keep.
    """
    lines = [".reg .b32 x, y;"]
    for half, bytes_of in enumerate(("0x4140", "0x4342")):
        lanes = f"${16 + half}"
        lines += [f"shr.u32 x, {lanes}, 7;", f"prmt.b32 y, $18, 0, {bytes_of};", "lop3.b32 y, x, 0x01000100, y, 0xea;"]
        for way, (shift, mask) in enumerate(zip(shifts, masks, strict=True)):
            moved = f"{'shl.b32' if shift > 0 else 'shr.u32'} x, {'y' if way > 4 else lanes}, {abs(shift)};"
            lines += [moved] * (shift != 0)
            source = "x" if shift else "y" if way > 4 else lanes
            lines.append(f"and.b32 ${2 * way + half}, {source}, {mask << 16 | mask:#010x};")
    return "{ " + " ".join(lines) + " }"


# Fields in bits 0 to 2, 3 to 5 or 6 to 8, and all of them in bits 6 to 8.
IN_PLACE = tl.constexpr(four_lanes((0, 0, 0, -9, -9, 0, 0, 0), (0x0007, 0x0038, 0x01C0, 0x0007, 0x0038, 0x0007, 0x0038, 0x01C0)))
ALIGNED = tl.constexpr(four_lanes((6, 3, 0, -3, -6, 6, 3, 0), (0x01C0,) * 8))
REGISTERS = tl.constexpr(",".join(["=&r"] * 16 + ["r"] * 3))


@triton.jit
def unpack(packed, C: tl.constexpr):
    """(lanes, the byte beside each) -> eight float16 ways of fields, each in its place; or, for many rows, all times 64."""
    lanes, side = packed
    if C.features.use_asm:
        ways = unpack_asm(lanes, side, IN_PLACE if C.tile.decode else ALIGNED)
    else:
        side = side.to(tl.uint16) | ((lanes >> 7) & 0x0100)
        high = lanes >> 9
        if C.tile.decode:
            ways = (
                field(lanes, 0x0007), field(lanes, 0x0038), field(lanes, 0x01C0), field(high, 0x0007), field(high, 0x0038),
                field(side, 0x0007), field(side, 0x0038), field(side, 0x01C0),
            )  # fmt: skip
        else:
            ways = (
                field(lanes << 6, 0x01C0), field(lanes << 3, 0x01C0), field(lanes, 0x01C0), field(high << 6, 0x01C0),
                field(high << 3, 0x01C0), field(side << 6, 0x01C0), field(side << 3, 0x01C0), field(side, 0x01C0),
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
        pack=4,
    )


ROWS = PlaneFormat(
    "int3",
    ways=8,
    side_bytes=True,
    rotated=True,
    signs=SIGNS.value,
    exponent_scale=2.0**24,
    gains=((1.0, 8.0, 64.0, 1.0, 8.0, 1.0, 8.0, 64.0), (64.0,) * 8),
    zero=ZERO,
    unpack=unpack,
    write_plane=write_plane,
)
FORMAT = Format(ROWS, ROWS)
