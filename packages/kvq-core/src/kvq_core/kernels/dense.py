"""Attention over unquantized pages: the baseline, and the loop in its plainest form."""

import triton
import triton.language as tl

from kvq_core.kernels.products import accumulate, accumulator, query_operand, scores
from kvq_core.kernels.queries import load_queries
from kvq_core.kernels.scores import finish_scores, score_unit
from kvq_core.kernels.softmax import softmax_start, softmax_step
from kvq_core.kernels.splits import finish
from kvq_core.kernels.tiles import find_work, key_tile, load_lanes, places, query_rows


@triton.jit(do_not_specialize=["num_seqs", "table_stride", "num_blocks"])
def attend(
    queries, keys, values, output, output_scale, batch, scoring, splits, partials, num_seqs, table_stride, num_blocks, C: tl.constexpr
):
    K_HEADS: tl.constexpr = C.key_heads
    V_HEADS: tl.constexpr = C.value_heads
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    work = find_work(item, num_seqs, batch, scoring, splits, C)
    if work.seq >= num_seqs:
        return
    rows = query_rows(work, kv_head, C)
    q = query_operand(load_queries(queries, rows, C), C)
    unit = score_unit(scoring)
    state = softmax_start(C.rows)
    acc = accumulator(C)
    for start in tl.range(work.start, work.stop, C.keys, num_stages=C.stages):
        tile = key_tile(start, work, batch, table_stride, num_blocks, C)
        k_place, v_place = places(keys, values, tile, C)
        k = load_lanes(keys, tile, k_place, kv_head, K_HEADS, CLEAR=True)
        v = load_lanes(values, tile, v_place, kv_head, V_HEADS, CLEAR=True)
        s = finish_scores(scores(q, (k,), C) * unit, rows, tile, work, scoring, C)
        p, alpha, state = softmax_step(s, state, C)
        acc = accumulate(p.to(v.dtype), (v,), acc, alpha, C)
    finish(acc, state, output, output_scale, rows, work, item, kv_head, partials, splits, scoring, C)
