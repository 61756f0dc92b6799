"""Prefill over int2 pages by warp groups: what a word of sixteen codes becomes. (kvq's own kernel, and why these bits: kvq_int2.read.)"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvq_int2.codec import READ_LEVEL

WORTH = gl.constexpr(READ_LEVEL * 2.0**24)


@gluon.jit
def unpack(words, scales):
    """[KEYS, n] words -> [KEYS, 2, 2, 2, n] pairs of float16: +-55 or +-183 in units of 2^-24, of the same channel of both lanes."""
    # A shift carries bits from the lower lane of the word into the upper one, but only below the ones the mask keeps.
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        """
        {
        .reg .b32 x;
        lop3.b32 $0, $8, 0x80808080, 0x00370037, 0xea;
        shl.b32 x, $8, 1;
        lop3.b32 $1, x, 0x80808080, 0x00370037, 0xea;
        shl.b32 x, $8, 2;
        lop3.b32 $2, x, 0x80808080, 0x00370037, 0xea;
        shl.b32 x, $8, 3;
        lop3.b32 $3, x, 0x80808080, 0x00370037, 0xea;
        shl.b32 x, $8, 4;
        lop3.b32 $4, x, 0x80808080, 0x00370037, 0xea;
        shl.b32 x, $8, 5;
        lop3.b32 $5, x, 0x80808080, 0x00370037, 0xea;
        shl.b32 x, $8, 6;
        lop3.b32 $6, x, 0x80808080, 0x00370037, 0xea;
        shl.b32 x, $8, 7;
        lop3.b32 $7, x, 0x80808080, 0x00370037, 0xea;
        }
        """,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r",
        [words],
        dtype=(gl.uint32, gl.uint32, gl.uint32, gl.uint32, gl.uint32, gl.uint32, gl.uint32, gl.uint32),
        is_pure=True,
        pack=1,
    )
    even = gl.join(gl.join(a, e), gl.join(c, g))
    odd = gl.join(gl.join(b, f), gl.join(d, h))
    return gl.permute(gl.join(even, odd), (0, 2, 3, 4, 1))
