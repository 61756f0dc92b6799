"""int3's kernels: write rows into pages, attend over pages. What they do with codes is quantize.py's and format.py's."""

import triton
import triton.language as tl

from kvq_core.kernels.api import UNSPECIALIZED, Kernels, Sm90Kernels, attention_kernel, write_kernel
from kvq_int3.format import FORMAT


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
    """The kernels for Hopper."""
    from kvq_int3 import prefill

    return Sm90Kernels(prefill.attend)


KERNELS = Kernels(FORMAT, write, attend, sm90)
