"""Unquantized pages: rows are copied, and multiplied as they are. The format and the kernels of mode ``none``."""

import triton
import triton.language as tl

from kvq_core.kernels.attention import UNSPECIALIZED, attend_share
from kvq_core.kernels.formats import Format, Kernels, PlaneFormat, Sm90Kernels
from kvq_core.kernels.slots import copy_plane, write_share

ROWS = PlaneFormat("none", streams=1, scales="", has_nan=True, write_plane=copy_plane)
FORMAT = Format(ROWS, ROWS)


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def write(key, value, keys, values, slot_mapping, num_tokens, num_slots, C: tl.constexpr):
    write_share(key, value, keys, values, slot_mapping, num_tokens, num_slots, C)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attend(
    queries, keys, values, output, output_scale, batch, scoring, splits, partials, num_seqs, table_stride, table_width, num_blocks,
    C: tl.constexpr,
):  # fmt: skip
    attend_share(
        queries, keys, values, output, output_scale, batch, scoring, splits, partials, num_seqs, table_stride, table_width, num_blocks, C
    )  # fmt: skip


def sm90() -> Sm90Kernels:
    """The kernel for Hopper."""
    from kvq_core.kernels.warpgroups import dense

    return Sm90Kernels(dense.attend)


KERNELS = Kernels(FORMAT, write, attend, sm90)
