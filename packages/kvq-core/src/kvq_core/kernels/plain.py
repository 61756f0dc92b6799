"""Unquantized pages: rows are copied, and multiplied as they are. The format and the kernels of mode ``none``."""

import triton
import triton.language as tl

from kvq_core.kernels.attention import UNSPECIALIZED, attention_kernel
from kvq_core.kernels.formats import Format, Kernels, PlaneFormat, Sm90Kernels
from kvq_core.kernels.store import copy_plane, write_kernel

ROWS = PlaneFormat("none", ways=1, scales="", has_nan=True, write_plane=copy_plane)
FORMAT = Format(ROWS, ROWS)


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def write(key, value, keys, values, slot_mapping, num_tokens, num_slots, C: tl.constexpr):
    write_kernel(key, value, keys, values, slot_mapping, num_tokens, num_slots, C)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attend(
    queries, keys, values, output, output_scale, batch, scoring, splits, partials, num_seqs, table_stride, table_width, num_blocks,
    C: tl.constexpr,
):  # fmt: skip
    attention_kernel(
        queries, keys, values, output, output_scale, batch, scoring, splits, partials, num_seqs, table_stride, table_width, num_blocks, C
    )  # fmt: skip


def sm90() -> Sm90Kernels:
    """The kernel for Hopper."""
    from kvq_core.kernels.sm90 import plain

    return Sm90Kernels(plain.attend)


KERNELS = Kernels(FORMAT, write, attend, sm90)
