"""Finished rows: what a sink takes of them, the division by the softmax's sum, and out."""

import triton
import triton.language as tl

from kvq_core.kernels.queries import store_rows
from kvq_core.kernels.softmax import add_sink, reciprocal_sum


@triton.jit
def write_rows(acc, state, output, output_scale, token, head, valid, scoring, C: tl.constexpr):
    """Write the rows [ROWS] of which ``state`` (log2 units) and ``acc`` (streams [ROWS, WIDTH]) are the softmax over all keys."""
    ROWS: tl.constexpr = valid.shape[0]
    state, factor = add_sink(state, head, valid, scoring)
    scale = factor * reciprocal_sum(state.sum)
    result = ()
    for s in tl.static_range(tl.constexpr(C.format.streams)):
        result = result + (acc[s] * scale[:, None],)
    store_rows(result, output, output_scale, token, head, valid, ROWS, C)
