"""What lanes of two codes become, two at a time in PTX: a float16 number for each of their ways. For kernels in Triton and in Gluon."""

import triton
import triton.language as tl


def int8_numbers(first: str, second: str) -> tl.constexpr:
    """PTX: four codes -> two pairs of float16, code * 2^-14. ``first``, ``second``: which codes, as ``prmt`` selects bytes (4: the 0x64).

    A code's byte beside 0x64 is 1024 + n, n = code + 128, and one multiply-add makes it code * 2^-14, exactly.
    """
    return tl.constexpr(f"""
        {{
        .reg .b32 x, unit, offset;
        mov.b32 unit, 0x04000400;
        mov.b32 offset, 0xac80ac80;
        xor.b32 x, $2, 0x80808080;
        prmt.b32 $0, x, 0x64646464, {first};
        prmt.b32 $1, x, 0x64646464, {second};
        fma.rn.f16x2 $0, $0, unit, offset;
        fma.rn.f16x2 $1, $1, unit, offset;
        }}
        """)


@triton.jit
def unpack_int8_asm(lanes):
    """float16 subnormals: code + 128 in units of 2^-24."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 high;
        shr.u32 high, $2, 8;
        lop3.b32 $0, $2, 0x00ff00ff, 0x00800080, 0x6a;
        lop3.b32 $1, high, 0x00ff00ff, 0x00800080, 0x6a;
        }
        """,
        "=&r,=&r,r",
        [lanes],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def unpack_fp8_asm(lanes):
    """e4m3 numbers in units of 2^-8."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 sign, size;
        shl.b32 size, $2, 7;
        and.b32 size, size, 0x3f803f80;
        shl.b32 sign, $2, 8;
        lop3.b32 $0, sign, 0x80008000, size, 0xea;
        shr.u32 size, $2, 1;
        and.b32 size, size, 0x3f803f80;
        lop3.b32 $1, $2, 0x80008000, size, 0xea;
        }
        """,
        "=&r,=&r,r",
        [lanes],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def convert_fp8_asm(lanes):
    """e4m3 numbers, NaN included, by the hardware (sm_89 and later)."""
    # A lane's two codes go to two ways; an instruction converts two of one way, which are a lane apart.
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b16 low, high;
        .reg .b32 bytes;
        prmt.b32 bytes, $2, 0, 0x3120;
        mov.b32 {low, high}, bytes;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }
        """,
        "=&r,=&r,r",
        [lanes],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )
