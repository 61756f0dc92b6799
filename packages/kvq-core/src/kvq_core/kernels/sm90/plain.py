"""Prefill by warp groups over tiles that are copied, not unpacked: of unquantized pages, or staged (:mod:`kvq_core.kernels.staging`)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvq_core.kernels.attention import UNSPECIALIZED
from kvq_core.kernels.sm90.prefill import as_stored, attend_in_groups


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def attend(
    queries, keys, values, output, output_scale, batch, scoring, splits, partials, num_seqs, table_stride, table_width, num_blocks,
    C: gl.constexpr,
):  # fmt: skip
    attend_in_groups(
        queries, keys, values, output, batch, scoring, num_seqs, table_stride, table_width, num_blocks,
        C.key_number_scale, C.value_number_scale, SCALED=C.format.key.staged, KEY_PRESCALE=1.0, FINITE=True, ADJACENT=True,
        UNPACK=as_stored, SCALE_OF=as_stored, C=C, COPIED=True,
    )  # fmt: skip
