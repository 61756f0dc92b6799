"""The end of a work tile: the result, or this split's partial of it for the combine kernel (combine.py).

kvq's own workspace has one row per (item, kv head, tile row), an engine's one per (token, query head, segment). The program that takes
a row block's first split notes how many there are and where they start.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from kvq_core.kernels.args import LOG2E, QueryRows, SoftmaxState
from kvq_core.kernels.compiler_hints import opaque_zero
from kvq_core.kernels.hadamard import butterfly
from kvq_core.kernels.pack_keys import unfold
from kvq_core.kernels.queries import store_rows
from kvq_core.kernels.softmax import add_other, add_sink, reciprocal_sum, store_lse


@triton.jit
def epilogue(acc, state, output, output_scale, rows, work, kv_head, partials, splits, scoring, C: tl.constexpr):
    """Store the result if the whole row is here, else this split's partial of it."""
    if C.tile.fold > 1:
        acc, state = unfold(acc, state, C)
        first = tl.arange(0, C.tile.rows) < C.tile.rows // C.tile.fold
        rows = QueryRows(rows.index, rows.token, rows.head, rows.position, rows.valid & first, rows.shift)
    if C.tile.overlap == "end":
        # The combine kernel is put in place; it waits for this launch's end before it reads.
        gdc_launch_dependents()
    if C.features.shifted and scoring.softcap is None:
        # Scores were all short of it, which the softmax does not see, but a sink does. A softcap has had it.
        state = SoftmaxState(state.max + rows.shift * LOG2E, state.sum)
    if C.tile.split == "":
        write_result(acc, state, output, output_scale, rows, work, scoring, C)
    else:
        note_plan(work, kv_head, partials, C)
        if C.tile.least_splits == 1:
            write_partial(acc, state, rows, work, kv_head, partials, splits, C)
        elif work.num_splits == 1:
            write_result(acc, state, output, output_scale, rows, work, scoring, C)
        else:
            write_partial(acc, state, rows, work, kv_head, partials, splits, C)


@triton.jit
def write_partial(acc, state, rows, work, kv_head, partials, splits, C: tl.constexpr):
    row = partial_row(work, kv_head, tl.arange(0, C.tile.rows), rows.token, rows.head, splits, C)
    lane = tl.arange(0, C.value_heads.width)
    mask = rows.valid[:, None] & (lane < C.value_heads.lanes)[None, :]
    if C.features.mixed:
        acc = butterfly(acc, C.format.value.ways)
    at = partials.acc + row[:, None] * partials.row_stride + lane[None, :]
    for s in tl.static_range(tl.constexpr(C.format.value.ways)):
        tl.store(at + s * C.value_heads.lanes, acc[s], mask=mask)
    tl.store(partials.max + row, state.max, mask=rows.valid)
    tl.store(partials.sum + row, state.sum, mask=rows.valid)


@triton.jit
def note_plan(work, kv_head, partials, C: tl.constexpr):
    """Tell the combine kernel how many splits the row block has, and the item of the first."""
    first = (work.unit == 0) & (kv_head == 0)
    note = partials.plan + (work.seq * C.tile.max_row_blocks + work.row_start // C.tokens) * 2
    tl.store(note, work.num_splits, mask=first)
    tl.store(note + 1, work.item, mask=first)


@triton.jit
def write_result(acc, state, output, output_scale, rows, work, scoring, C: tl.constexpr):
    state, factor = add_sink(state, rows.head, rows.valid, scoring)
    state, factor, share = add_other(state, factor, rows.token, rows.head, rows.valid, output, C)
    store_lse(state, rows.token, rows.head, rows.valid, output, C)
    inverse = reciprocal_sum(state.sum)
    scale = factor * inverse
    result = ()
    for s in tl.static_range(tl.constexpr(C.format.value.ways)):
        result = result + (acc[s] * scale[:, None],)
    # Of another number than the queries' matrix, or that would be kept for this.
    zero = opaque_zero(work.first_token, C)
    store_rows(result, share * inverse, output, output_scale, rows.token, rows.head, rows.valid, C.tile.rows, C, zero=zero)


@triton.jit
def partial_row(work, kv_head, r, token, head, splits, C: tl.constexpr):
    """Index of a partial in the workspace."""
    if C.tile.split == "segments":
        row = (token.to(tl.int64) * (tl.num_programs(1) * C.shape.group) + head) * splits.segments + work.unit
    else:
        row = ((work.item.to(tl.int64) * tl.num_programs(1) + kv_head) * C.tile.rows) + r
    return row
