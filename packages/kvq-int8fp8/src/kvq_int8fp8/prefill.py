"""Prefill over int8 and fp8 pages by warp groups: what a word of four codes becomes. (The Triton kernel: kernels.py.)

Operands are adjacent pairs of channels in float16. int8: a code's byte beside 0x64 is 1024 + n, n = code + 128; one multiply-add makes it
code * 2^-14, exactly, and no sum of such operands overflows with its scale. fp8: the hardware's own conversion, which gives numbers as they
are, NaN included. So values of unseen keys load as 0, since a weight of 0 times NaN is NaN; unseen keys are masked as scores.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvq_core.kernels.api import UNSPECIALIZED
from kvq_core.kernels.api.sm90 import as_stored, attend_in_groups
from kvq_int8fp8.unpacking import int8_numbers

INT8_NUMBERS = int8_numbers("0x4140", "0x4342")
"""Pairs of neighbouring channels."""
INT8_OPERAND_SCALE = gl.constexpr(2.0**14)
KEY_PRESCALE = gl.constexpr(2.0**-8)
"""Of a key's scale: 128 products with a code of 448 times that of a huge key would overflow."""


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def attend(
    queries, keys, values, output, output_scale, batch, scoring, splits, partials, num_seqs, table_stride, table_width, num_blocks,
    C: gl.constexpr,
):  # fmt: skip
    if C.format.key.name == "int8":
        attend_in_groups(
            queries, keys, values, output, batch, scoring, num_seqs, table_stride, table_width, num_blocks,
            INT8_OPERAND_SCALE, INT8_OPERAND_SCALE,
            SCALED=True, KEY_PRESCALE=1.0, FINITE=True, ADJACENT=True, UNPACK=unpack_int8, SCALE_OF=as_stored, C=C,
        )  # fmt: skip
    elif C.format.key.name == "fp8_per_tensor":
        attend_in_groups(
            queries, keys, values, output, batch, scoring, num_seqs, table_stride, table_width, num_blocks,
            gl.load(keys.scales), gl.load(values.scales),
            SCALED=False, KEY_PRESCALE=1.0, FINITE=False, ADJACENT=True, UNPACK=unpack_fp8, SCALE_OF=as_stored, C=C,
        )  # fmt: skip
    else:
        attend_in_groups(
            queries, keys, values, output, batch, scoring, num_seqs, table_stride, table_width, num_blocks,
            1.0 / KEY_PRESCALE, 1.0,
            SCALED=True, KEY_PRESCALE=KEY_PRESCALE, FINITE=False, ADJACENT=True, UNPACK=unpack_fp8, SCALE_OF=as_stored, C=C,
        )  # fmt: skip


@gluon.jit
def unpack_int8(words, scales):
    """[KEYS, n] words -> [KEYS, 2, n] pairs of float16: code * 2^-14."""
    low, high = gl.inline_asm_elementwise(
        INT8_NUMBERS,
        "=&r,=&r,r",
        [words],
        dtype=(gl.uint32, gl.uint32),
        is_pure=True,
        pack=1,
    )
    return gl.permute(gl.join(low, high), (0, 2, 1))


@gluon.jit
def unpack_fp8(words, scales):
    """[KEYS, n] words -> [KEYS, 2, n] pairs of float16: e4m3 numbers."""
    low, high = gl.inline_asm_elementwise(
        """
        {
        .reg .b16 first, second;
        mov.b32 {first, second}, $2;
        cvt.rn.f16x2.e4m3x2 $0, first;
        cvt.rn.f16x2.e4m3x2 $1, second;
        }
        """,
        "=&r,=&r,r",
        [words],
        dtype=(gl.uint32, gl.uint32),
        is_pure=True,
        pack=1,
    )
    return gl.permute(gl.join(low, high), (0, 2, 1))
