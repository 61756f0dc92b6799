"""Prefill over int3 pages by warp groups: what a word of two lanes and the bytes beside them become. (Why these bits: format.py.)

One multiply-add makes a masked field, a subnormal, (code - 3.5) * 2^-10, exactly.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvq_core.kernels.api import UNSPECIALIZED
from kvq_core.kernels.api.sm90 import as_stored, attend_in_groups
from kvq_int3.format import IN_PLACE, REGISTERS

OPERAND_SCALE = gl.constexpr(2.0**10)
CENTERED = gl.constexpr(
    IN_PLACE.value.rstrip().removesuffix("}")
    + """
    .reg .b32 minus, by1, by4, by8, by32, by64;
    mov.b32 minus, 0x9b009b00;
    mov.b32 by1, 0x74007400;
    mov.b32 by4, 0x6c006c00;
    mov.b32 by8, 0x68006800;
    mov.b32 by32, 0x60006000;
    mov.b32 by64, 0x5c005c00;
    fma.rn.f16x2 $0, $0, by1, minus;
    fma.rn.f16x2 $1, $1, by8, minus;
    fma.rn.f16x2 $2, $2, by64, minus;
    fma.rn.f16x2 $3, $3, by4, minus;
    fma.rn.f16x2 $4, $4, by32, minus;
    fma.rn.f16x2 $5, $5, by1, minus;
    fma.rn.f16x2 $6, $6, by8, minus;
    fma.rn.f16x2 $7, $7, by64, minus;
    }
"""
)
"""Factors are 2^14 over the gain of a field's place."""


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
def unpack(packed, scales):
    """([KEYS, n] words, the bytes beside their lanes) -> [KEYS, 2, 2, 2, n] pairs of float16: (code - 3.5) * 2^-10 of both lanes' ways."""
    words, side = packed
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        CENTERED,
        REGISTERS,
        [words, side],
        dtype=(gl.uint32, gl.uint32, gl.uint32, gl.uint32, gl.uint32, gl.uint32, gl.uint32, gl.uint32),
        is_pure=True,
        pack=1,
    )
    even = gl.join(gl.join(a, e), gl.join(c, g))
    odd = gl.join(gl.join(b, f), gl.join(d, h))
    return gl.permute(gl.join(even, odd), (0, 2, 3, 4, 1))
