"""int3 as numbers: what 16-bit lanes of eight channels and the bytes beside them become (codec.py draws them), and :data:`FORMAT`.

A masked field of three bits, read as float16, is the subnormal ``n * 2^-24``, or 8 or 64 times that, by its place. In decode the queries'
streams and the outputs bring what is in excess; otherwise all fields are shifted to one place.
"""

import triton
import triton.language as tl

from kvq_core.kernels.api import Format, PlaneFormat
from kvq_int3.codec import ZERO
from kvq_int3.quantize import SIGNS, write_plane

FIELDS = ("0x00070007", "0x00380038", "0x01c001c0")


def four_lanes() -> str:
    """PTX: two registers of two lanes each and one of the four bytes beside them -> for each stream two registers of two float16 fields.

    A shift brings bits of the upper lane into the lower one, but only above those that the masks keep.
    """
    lines = [".reg .b32 x, y;"]
    for half, bytes_of in enumerate(("0x4140", "0x4342")):
        lanes = f"${16 + half}"
        lines.append(f"prmt.b32 y, $18, 0, {bytes_of};")
        lines += [f"and.b32 ${2 * n + half}, {lanes}, {mask};" for n, mask in enumerate(FIELDS)]
        lines.append(f"shr.u32 x, {lanes}, 9;")
        lines += [f"and.b32 ${2 * (3 + n) + half}, x, {mask};" for n, mask in enumerate(FIELDS[:2])]
        lines.append(f"shr.u32 x, {lanes}, 7;")
        lines.append("lop3.b32 y, x, 0x01000100, y, 0xea;")
        lines += [f"and.b32 ${2 * (5 + n) + half}, y, {mask};" for n, mask in enumerate(FIELDS)]
    return "{ " + " ".join(lines) + " }"


FOUR_LANES = tl.constexpr(four_lanes())
REGISTERS = tl.constexpr(",".join(["=&r"] * 16 + ["r"] * 3))


@triton.jit
def unpack(packed, C: tl.constexpr):
    """(lanes, the byte beside each) -> eight float16 streams of fields, each in its place; or, for many rows, all times 64."""
    lanes, side = packed
    if C.decode and C.use_asm:
        streams = unpack_asm(lanes, side)
    else:
        side = side.to(tl.uint16) | ((lanes >> 7) & 0x0100)
        high = lanes >> 9
        if C.decode:
            streams = (
                field(lanes, 0x0007), field(lanes, 0x0038), field(lanes, 0x01C0), field(high, 0x0007), field(high, 0x0038),
                field(side, 0x0007), field(side, 0x0038), field(side, 0x01C0),
            )  # fmt: skip
        else:
            streams = (
                field(lanes << 6, 0x01C0), field(lanes << 3, 0x01C0), field(lanes, 0x01C0), field(high << 6, 0x01C0),
                field(high << 3, 0x01C0), field(side << 6, 0x01C0), field(side << 3, 0x01C0), field(side, 0x01C0),
            )  # fmt: skip
    return streams


@triton.jit
def field(lanes, MASK: tl.constexpr):
    return (lanes & MASK).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def unpack_asm(lanes, side):
    return tl.inline_asm_elementwise(
        FOUR_LANES,
        REGISTERS,
        [lanes, side],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=4,
    )


ROWS = PlaneFormat(
    "int3",
    streams=8,
    side_bytes=True,
    rotated=True,
    signs=SIGNS.value,
    unit=2.0**24,
    gains=((1.0, 8.0, 64.0, 1.0, 8.0, 1.0, 8.0, 64.0), (64.0,) * 8),
    zero=ZERO,
    unpack=unpack,
    write_plane=write_plane,
)
FORMAT = Format(ROWS, ROWS)
