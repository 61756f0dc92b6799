"""Attention over unquantized pages: the baseline, and the loop in its plainest form."""

import triton
import triton.language as tl

from kvq_core.kernels.pieces import attend_pieces
from kvq_core.kernels.products import accumulate, accumulated_rows, accumulator, query_operand, scores
from kvq_core.kernels.queries import in_own_dtype, load_queries, query_streams
from kvq_core.kernels.scores import finish_scores, score_base, score_unit, softmax_unit
from kvq_core.kernels.shares import query_rows
from kvq_core.kernels.softmax import softmax_end, softmax_start, softmax_step
from kvq_core.kernels.splits import finish
from kvq_core.kernels.tiles import first_blocks, key_tile, load_lanes, places, seen_tiles, tiles_of, unmasked_tiles


@triton.jit(do_not_specialize=["num_seqs", "table_stride", "table_width", "num_blocks"])
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
    C: tl.constexpr,
):
    attend_pieces(
        attend_piece, queries, keys, values, output, output_scale, batch, scoring, splits, partials, num_seqs, table_stride, table_width,
        num_blocks, C,
    )  # fmt: skip


@triton.jit
def attend_piece(
    work, kv_head, queries, keys, values, output, output_scale, batch, scoring, splits, partials, table_stride, num_blocks, C: tl.constexpr
):
    K_HEADS: tl.constexpr = C.key_heads
    V_HEADS: tl.constexpr = C.value_heads
    ROWS: tl.constexpr = C.rows
    rows = query_rows(work, queries, kv_head, scoring, C)
    x = load_queries(queries, rows, C)
    seen = seen_tiles(work, scoring, C)
    ids = first_blocks(seen, work, batch, table_stride, C)
    q = query_operand(in_own_dtype(query_streams(x, work, C), queries), C)
    unit = tl.full([ROWS], 1.0, tl.float32) * score_unit(scoring)
    left = softmax_unit(unit, scoring)
    state = softmax_start(C)
    acc = accumulator(C)
    unmasked = unmasked_tiles(seen, ids, work, batch, table_stride, num_blocks, C)
    for part in tl.static_range(tl.constexpr(C.parts)):
        tiles = tiles_of(work, unmasked, part, C)
        for t in tl.range(tiles.first, tiles.last, num_stages=C.stages if part == 0 else C.edge_stages):
            tile = key_tile(t, tiles, work, batch, table_stride, num_blocks, scoring, part, C)
            k_place, v_place = places(keys, values, tile, C)
            k = load_lanes(keys, tile, k_place, kv_head, K_HEADS, C, TURNED=C.keys_turned, CLEAR=True)
            v = load_lanes(values, tile, v_place, kv_head, V_HEADS, C, TURNED=C.keys_first, CLEAR=True)
            s = finish_scores(scores(q, (k,), None, C), unit, None, rows, tile, work, scoring, part, C)
            p, alpha, state = softmax_step(s, left, state, C, EXACT=False)
            acc = accumulate(p.to(v.dtype), (v,), acc, alpha, None, C)
    acc = accumulated_rows(acc, 1.0, C)
    finish(acc, softmax_end(state, left, score_base(scoring), C), output, output_scale, rows, work, kv_head, partials, splits, scoring, C)
