"""Prefill over int8 and fp8 pages by warp groups: what a word of four codes becomes. (kvq's own kernel: kvq_int8fp8.read.)

Operands are adjacent pairs of channels in float16. int8: a code's byte beside 0x64 is 1024 + n, n = code + 128; one multiply-add makes it
code * 2^-14, exactly, and no sum of such operands overflows with its scale. fp8: exponent and mantissa, moved to where float16 keeps them,
are the number times 2^-8.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

INT8_WORTH = gl.constexpr(2.0**14)
FP8_WORTH = gl.constexpr(2.0**8)


@gluon.jit
def unpack_int8(words, scales):
    """[KEYS, n] words -> [KEYS, 2, n] pairs of float16: code * 2^-14."""
    low, high = gl.inline_asm_elementwise(
        """
        {
        .reg .b32 x, unit, offset;
        mov.b32 unit, 0x04000400;
        mov.b32 offset, 0xac80ac80;
        xor.b32 x, $2, 0x80808080;
        prmt.b32 $0, x, 0x64646464, 0x4140;
        prmt.b32 $1, x, 0x64646464, 0x4342;
        fma.rn.f16x2 $0, $0, unit, offset;
        fma.rn.f16x2 $1, $1, unit, offset;
        }
        """,
        "=&r,=&r,r",
        [words],
        dtype=(gl.uint32, gl.uint32),
        is_pure=True,
        pack=1,
    )
    return gl.permute(gl.join(low, high), (0, 2, 1))


@gluon.jit
def unpack_fp8(words, scales):
    """[KEYS, n] words -> [KEYS, 2, n] pairs of float16: e4m3 numbers * 2^-8."""
    low, high = gl.inline_asm_elementwise(
        """
        {
        .reg .b32 x, size;
        prmt.b32 x, $2, 0, 0x1404;
        shr.u32 size, x, 1;
        and.b32 size, size, 0x3f803f80;
        lop3.b32 $0, x, 0x80008000, size, 0xea;
        prmt.b32 x, $2, 0, 0x3424;
        shr.u32 size, x, 1;
        and.b32 size, size, 0x3f803f80;
        lop3.b32 $1, x, 0x80008000, size, 0xea;
        }
        """,
        "=&r,=&r,r",
        [words],
        dtype=(gl.uint32, gl.uint32),
        is_pure=True,
        pack=1,
    )
    return gl.permute(gl.join(low, high), (0, 2, 1))
