"""Decode of a few query rows over int2 pages by one warp group: what lanes of eight codes become. (The Triton kernel: kernels.py.)

Operands are those of the Triton kernel. Of values a warp unpacks two ways of the eight, whose bits it moves to where they are wanted
by a distance of its own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvq_core.kernels.api import UNSPECIALIZED
from kvq_core.kernels.api.sm90 import Numbers, attend_multirow
from kvq_int2.codec import READ_LEVEL
from kvq_int2.format import SUBNORMAL, unpack_asm

INT2 = gl.constexpr(Numbers(unit=2.0**-24))
LEVEL = gl.constexpr(READ_LEVEL * SUBNORMAL)
"""Of a value's operand of 1."""


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def attend(
    queries, keys, values, output, output_scale, batch, scoring, splits, partials, num_seqs, table_stride, table_width, num_blocks,
    C: gl.constexpr,
):  # fmt: skip
    attend_multirow(
        queries, keys, values, batch, scoring, splits, partials, num_seqs, table_stride, table_width, num_blocks,
        LEVEL * 2.0**-24, LEVEL,
        unpack_asm, unpack_values, None, None, INT2, C,
    )  # fmt: skip


@gluon.jit
def unpack_values(lanes, way):
    """Lanes [1, LANES, n], ``way`` 0 to 3 -> +-55 or +-183, in units of 2^-24, of that way and of the one four after it."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 x, y, by;
        and.b32 by, $3, 31;
        shl.b32 x, $2, by;
        shl.b32 y, x, 4;
        lop3.b32 $0, x, 0x80808080, 0x00370037, 0xea;
        lop3.b32 $1, y, 0x80808080, 0x00370037, 0xea;
        }
        """,
        "=&r,=&r,r,r",
        [lanes, way.to(gl.uint16)],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )
