"""Decode of a few query rows over int4 pages by one warp group: what lanes of four codes become. (The Triton kernel: kernels.py.)

Keys are what they are in the Triton kernel. Of values a warp unpacks two ways of the four, those of its nibble, as prefill.py does:
four warps would have to meet for the sum that takes zero points off there.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvq_core.kernels.api import UNSPECIALIZED
from kvq_core.kernels.api.sm90 import Numbers, attend_multirow
from kvq_int4.format import split_word, unpack_keys_asm

# A zero point is -1 of the numbers that it comes off: a seed for each key.
INT4 = gl.constexpr(Numbers(zeros=True, unit=2.0**-24, offset=-1.0, odd=16.0))
OPERAND_SCALE = gl.constexpr(2.0**14)
"""Of a value's operand, (n - z) * 2^-14."""


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def attend(
    queries, keys, values, output, output_scale, batch, scoring, splits, partials, num_seqs, table_stride, table_width, num_blocks,
    C: gl.constexpr,
):  # fmt: skip
    attend_multirow(
        queries, keys, values, batch, scoring, splits, partials, num_seqs, table_stride, table_width, num_blocks,
        1.0 / C.key_heads.block, OPERAND_SCALE,
        unpack_keys_asm, unpack_values, split_word, offsets, INT4, C,
    )  # fmt: skip


@gluon.jit
def unpack_values(lanes, way, offset):
    """Lanes [1, LANES, n], ``way`` 0 or 1, and their offsets -> (n - z) * 2^-14 of that way and of the one two after it."""
    high = way == 1
    mask = gl.where(high, 0xF0, 0xF).to(gl.uint16)
    unit = gl.where(high, 0x40, 0x400).to(gl.uint16)
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 x;
        lop3.b32 $0, $2, $3, 0x64006400, 0xea;
        shr.u32 x, $2, 8;
        lop3.b32 $1, x, $3, 0x64006400, 0xea;
        fma.rn.f16x2 $0, $0, $4, $5;
        fma.rn.f16x2 $1, $1, $4, $5;
        }
        """,
        "=&r,=&r,r,r,r,r",
        [lanes, mask, unit, offset],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def offsets(words, way):
    """-(1024 + z) * 2^-14 for a low nibble (way 0) and -(64 + z) * 2^-14 for a high one, as bits of a float16."""
    zero = words.to(gl.int32, bitcast=True) & 15
    return gl.where(way == 1, 0x9C00 | (zero << 4), 0xAC00 | zero).to(gl.uint16).to(gl.float16, bitcast=True)
