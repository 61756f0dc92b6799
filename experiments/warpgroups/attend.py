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
    gl.static_assert(output_scale is None, "no fp8 output")
    SCALED: gl.constexpr = C.format.streams > 1 and C.format.variant != "fp8_per_tensor"
    # Sums of fp8 codes times the scale of a huge key overflow; others stay small enough.
    SMALL_FIRST: gl.constexpr = C.format.variant == "fp8"
    ADJACENT: gl.constexpr = C.format.streams <= 2
    if C.format.streams == 1:
        attend_in_groups(
            queries, keys, values, output, batch, scoring, num_seqs, table_stride, table_width, num_blocks,
            1.0, 1.0, SCALED, SMALL_FIRST, ADJACENT, as_stored, as_stored, C,
        )  # fmt: skip
    elif C.format.streams == 4:
        attend_in_groups(
            queries, keys, values, output, batch, scoring, num_seqs, table_stride, table_width, num_blocks,
            int4.WORTH / C.key_heads.block, int4.WORTH / C.value_heads.block, SCALED, SMALL_FIRST, ADJACENT, int4.unpack, int4.scale_of, C,
        )  # fmt: skip
    elif C.format.streams == 8:
        attend_in_groups(
            queries, keys, values, output, batch, scoring, num_seqs, table_stride, table_width, num_blocks,
            int2.WORTH, int2.WORTH, SCALED, SMALL_FIRST, ADJACENT, int2.unpack, as_stored, C,
        )  # fmt: skip
    elif C.format.variant == "int8":
        attend_in_groups(
            queries, keys, values, output, batch, scoring, num_seqs, table_stride, table_width, num_blocks,
            int8fp8.INT8_WORTH, int8fp8.INT8_WORTH, SCALED, SMALL_FIRST, ADJACENT, int8fp8.unpack_int8, as_stored, C,
        )  # fmt: skip
    elif SCALED:
        attend_in_groups(
            queries, keys, values, output, batch, scoring, num_seqs, table_stride, table_width, num_blocks,
            int8fp8.FP8_WORTH, int8fp8.FP8_WORTH, SCALED, SMALL_FIRST, ADJACENT, int8fp8.unpack_fp8, as_stored, C,
        )  # fmt: skip
    else:
        key_worth = gl.load(keys.scales) * int8fp8.FP8_WORTH
        value_worth = gl.load(values.scales) * int8fp8.FP8_WORTH
        attend_in_groups(
            queries, keys, values, output, batch, scoring, num_seqs, table_stride, table_width, num_blocks,
            key_worth, value_worth, SCALED, SMALL_FIRST, ADJACENT, int8fp8.unpack_fp8, as_stored, C,
        )  # fmt: skip
