"""Decode of a few query rows over int8 and fp8 pages by one warp group: what lanes of two codes become. (The Triton kernel: kernels.py.)

Keys are what they are in the Triton kernel. Of values no sum over a row is at hand, which would take an int8 code's 128 off afterwards: a
code's byte beside 0x64 is the float16 1024 + n, n = code + 128, and one multiply-add makes it code * 2^-14, exactly.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvq_core.kernels.api import UNSPECIALIZED
from kvq_core.kernels.api.sm90 import Numbers, attend_multirow
from kvq_int8fp8.unpacking import convert_fp8_asm, int8_numbers, unpack_int8_asm

INT8_NUMBERS = int8_numbers("0x4240", "0x4341")
"""Pairs of one way: of neighbouring lanes."""
INT8 = gl.constexpr(Numbers(unit=2.0**-24, offset=-128.0))
# Sums of 128 products with codes of 448 times the scale of a huge key stay finite with small queries and a smaller scale.
FP8 = gl.constexpr(Numbers(key_prescale=2.0**-8, peak=0.5))
PER_TENSOR = gl.constexpr(Numbers(scaled=False))


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def attend(
    queries, keys, values, output, output_scale, batch, scoring, splits, partials, num_seqs, table_stride, table_width, num_blocks,
    C: gl.constexpr,
):  # fmt: skip
    if C.format.key.name == "int8":
        attend_multirow(
            queries, keys, values, batch, scoring, splits, partials, num_seqs, table_stride, table_width, num_blocks,
            1.0, 2.0**14,
            unpack_int8_asm, unpack_int8_values, None, None, INT8, C,
        )  # fmt: skip
    elif C.format.key.name == "fp8_per_tensor":
        attend_multirow(
            queries, keys, values, batch, scoring, splits, partials, num_seqs, table_stride, table_width, num_blocks,
            gl.load(keys.scales), gl.load(values.scales),
            convert_fp8_asm, convert_fp8_asm, None, None, PER_TENSOR, C,
        )  # fmt: skip
    else:
        attend_multirow(
            queries, keys, values, batch, scoring, splits, partials, num_seqs, table_stride, table_width, num_blocks,
            2.0**8, 1.0,
            convert_fp8_asm, convert_fp8_asm, None, None, FP8, C,
        )  # fmt: skip


@gluon.jit
def unpack_int8_values(lanes):
    """Lanes of two codes -> their ways: code * 2^-14."""
    return gl.inline_asm_elementwise(
        INT8_NUMBERS,
        "=&r,=&r,r",
        [lanes],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )
