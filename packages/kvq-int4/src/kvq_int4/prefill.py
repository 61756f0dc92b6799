"""Prefill over int4 pages by warp groups: what a word of eight codes becomes. (The Triton kernel: kernels.py.)

A masked nibble n with the bits of 1024 on top is the float16 1024 + n, one in the high half of its byte 1024 + 16 n. One multiply-add makes
either (n - z) * 2^-14, exactly: zero points come off here, where it costs nothing, and no sum of such operands overflows with its scale.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvq_core.kernels.api import UNSPECIALIZED
from kvq_core.kernels.api.sm90 import attend_in_groups

OPERAND_SCALE = gl.constexpr(2.0**14)


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def attend(
    queries, keys, values, output, output_scale, batch, scoring, splits, partials, num_seqs, table_stride, table_width, num_blocks,
    C: gl.constexpr,
):  # fmt: skip
    attend_in_groups(
        queries, keys, values, output, batch, scoring, num_seqs, table_stride, table_width, num_blocks,
        OPERAND_SCALE / C.key_heads.block, OPERAND_SCALE / C.value_heads.block,
        SCALED=True, KEY_PRESCALE=1.0, FINITE=True, ADJACENT=False, UNPACK=unpack, SCALE_OF=scale_of, C=C,
    )  # fmt: skip


@gluon.jit
def scale_of(words):
    """The scales in scale words."""
    return (words.to(gl.int32, bitcast=True) & -16).to(gl.float32, bitcast=True)


@gluon.jit
def unpack(words, scales):
    """[KEYS, n] words, scale words [KEYS] -> [KEYS, 2, 2, n] pairs of float16: (n - z) * 2^-14 of the same nibble of both lanes."""
    zero = (scales.to(gl.int32, bitcast=True) & 15).to(gl.float32)
    low_offset = twice((zero + 1024.0) * (-(2.0**-14)))
    high_offset = twice((zero + 64.0) * (-(2.0**-14)))
    a, b, c, d = gl.inline_asm_elementwise(
        """
        {
        .reg .b32 x, unit, sixteenth;
        mov.b32 unit, 0x04000400;
        mov.b32 sixteenth, 0x00400040;
        lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea;
        lop3.b32 $1, $4, 0x00f000f0, 0x64006400, 0xea;
        shr.u32 x, $4, 8;
        lop3.b32 $2, x, 0x000f000f, 0x64006400, 0xea;
        lop3.b32 $3, x, 0x00f000f0, 0x64006400, 0xea;
        fma.rn.f16x2 $0, $0, unit, $5;
        fma.rn.f16x2 $1, $1, sixteenth, $6;
        fma.rn.f16x2 $2, $2, unit, $5;
        fma.rn.f16x2 $3, $3, sixteenth, $6;
        }
        """,
        "=&r,=&r,=&r,=&r,r,r,r",
        [words, low_offset[:, None], high_offset[:, None]],
        dtype=(gl.uint32, gl.uint32, gl.uint32, gl.uint32),
        is_pure=True,
        pack=1,
    )
    return gl.permute(gl.join(gl.join(a, c), gl.join(b, d)), (0, 2, 3, 1))


@gluon.jit
def twice(x):
    """x as float16, in both halves of a word."""
    bits = x.to(gl.float16).to(gl.uint16, bitcast=True).to(gl.uint32)
    return bits | (bits << 16)
