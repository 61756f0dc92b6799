"""Prefill over int2 pages by warp groups: what a word of sixteen codes becomes. (Why these bits: format.py.)"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvq_core.kernels.api import UNSPECIALIZED
from kvq_core.kernels.api.sm90 import as_stored, attend_in_groups
from kvq_int2.codec import READ_LEVEL
from kvq_int2.format import EIGHT_WAYS

OPERAND_SCALE = gl.constexpr(READ_LEVEL * 2.0**24)


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def attend(
    queries, keys, values, output, output_scale, batch, scoring, splits, partials, num_seqs, table_stride, table_width, num_blocks,
    C: gl.constexpr,
):  # fmt: skip
    attend_in_groups(
        queries, keys, values, output, batch, scoring, num_seqs, table_stride, table_width, num_blocks,
        OPERAND_SCALE, OPERAND_SCALE, SCALED=True, KEY_PRESCALE=1.0, FINITE=True, ADJACENT=False, UNPACK=unpack, SCALE_OF=as_stored, C=C,
    )  # fmt: skip


@gluon.jit
def unpack(words, scales):
    """[KEYS, n] words -> [KEYS, 2, 2, 2, n] pairs of float16: +-55 or +-183 in units of 2^-24, of the same channel of both lanes."""
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        EIGHT_WAYS,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r",
        [words],
        dtype=(gl.uint32, gl.uint32, gl.uint32, gl.uint32, gl.uint32, gl.uint32, gl.uint32, gl.uint32),
        is_pure=True,
        pack=1,
    )
    even = gl.join(gl.join(a, e), gl.join(c, g))
    odd = gl.join(gl.join(b, f), gl.join(d, h))
    return gl.permute(gl.join(even, odd), (0, 2, 3, 4, 1))
