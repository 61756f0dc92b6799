"""The kernel, in place of each mode's own: the same arguments, and what the modes bring to their rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from warpgroups import int2, int4, int8fp8
from warpgroups.kernel import as_stored, attend_in_groups


@gluon.jit(do_not_specialize=["num_seqs", "table_stride", "table_width", "num_blocks"])
def attend(
    queries,
    keys,
    values,
    output,
    output_scale,
    batch,
    scoring,
    splits,
    partials,
    num_seqs,
    table_stride,
    table_width,
    num_blocks,
    C: gl.constexpr,
):
    if C.format.streams == 1:
        attend_in_groups(
            queries, keys, values, output, batch, scoring, num_seqs, table_stride, table_width, num_blocks,
            1.0, 1.0, False, False, True, as_stored, as_stored, C,
        )  # fmt: skip
    elif C.format.streams == 4:
        attend_in_groups(
            queries, keys, values, output, batch, scoring, num_seqs, table_stride, table_width, num_blocks,
            int4.WORTH / C.key_heads.block, int4.WORTH / C.value_heads.block, True, False, False, int4.unpack, int4.scale_of, C,
        )  # fmt: skip
    elif C.format.streams == 8:
        attend_in_groups(
            queries, keys, values, output, batch, scoring, num_seqs, table_stride, table_width, num_blocks,
            int2.WORTH, int2.WORTH, True, False, False, int2.unpack, as_stored, C,
        )  # fmt: skip
    elif C.format.variant == "int8":
        attend_in_groups(
            queries, keys, values, output, batch, scoring, num_seqs, table_stride, table_width, num_blocks,
            int8fp8.INT8_WORTH, int8fp8.INT8_WORTH, True, False, True, int8fp8.unpack_int8, as_stored, C,
        )  # fmt: skip
    elif C.format.variant == "fp8_per_tensor":
        key_worth = gl.load(keys.scales) * int8fp8.FP8_WORTH
        value_worth = gl.load(values.scales) * int8fp8.FP8_WORTH
        attend_in_groups(
            queries, keys, values, output, batch, scoring, num_seqs, table_stride, table_width, num_blocks,
            key_worth, value_worth, False, False, True, int8fp8.unpack_fp8, as_stored, C,
        )  # fmt: skip
    else:
        attend_in_groups(
            queries, keys, values, output, batch, scoring, num_seqs, table_stride, table_width, num_blocks,
            int8fp8.FP8_WORTH, int8fp8.FP8_WORTH, True, True, True, int8fp8.unpack_fp8, as_stored, C,
        )  # fmt: skip
