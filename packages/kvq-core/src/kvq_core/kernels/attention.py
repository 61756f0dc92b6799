"""Attention over pages of any format: the loop over a program's work tiles, and over the key tiles of each.

What a format's codes are as numbers is data, and what its lanes become a jit function (:class:`~kvq_core.kernels.formats.PlaneFormat`).
Neither scales nor zero points touch an element:

    sum_c q_c (n_c - z) s = s (sum_c q_c n_c - z sum_c q_c)        K: one multiplication a score; the zero point is the product's start
    sum_j p_j s_j (n_j - z_j) = sum_j w_j n_j - sum_j w_j z_j      V: w = p s, and one sum a row and tile

Queries are rotated as K is, outputs un-rotated once as V is. Query rows are scaled to fit float16 (:func:`.queries.row_factors`).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from kvq_core.kernels.args import QueryOperand
from kvq_core.kernels.epilogue import epilogue
from kvq_core.kernels.masks import by_key, by_row
from kvq_core.kernels.mma import (
    accumulate,
    accumulated_rows,
    accumulator,
    operands,
    query_operand,
    scores,
    seed_of_rows,
    sum_over_keys,
    unweigh,
    weigh,
)
from kvq_core.kernels.narrow_n import narrow, narrow_rows
from kvq_core.kernels.paged_kv import (
    first_blocks,
    key_tile,
    load_chunks,
    load_scales,
    seen_tiles,
    tile_offsets,
    tiles_of,
    unmasked_tiles,
)
from kvq_core.kernels.prefetch import prefetch_tiles
from kvq_core.kernels.queries import load_queries, query_ways, scaled_queries
from kvq_core.kernels.rotary import rotary_rows
from kvq_core.kernels.scheduler import assigned_range, next_work_tile, query_rows
from kvq_core.kernels.scores import finish_scores, score_base, score_unit, softmax_unit
from kvq_core.kernels.side_bytes import side_selectors
from kvq_core.kernels.softmax import softmax_end, softmax_start, softmax_step

UNSPECIALIZED = ("num_seqs", "table_stride", "table_width", "num_blocks")
"""Arguments of an attention kernel that it must not be specialized on."""


@triton.jit
def attention_kernel(
    queries, keys, values, output, output_scale, batch, scoring, splits, partials, num_seqs, table_stride, table_width, num_blocks,
    C: tl.constexpr,
):  # fmt: skip
    """Process this program's work tiles: all that an attention kernel does.

    A row block on its own leaves a program at most one work tile. Then there is no loop, out of which the compiler would hoist work to
    before the first load.
    """
    kv_head = tl.program_id(1)
    assigned = assigned_range(num_seqs, table_width, batch, scoring, splits, C)
    if C.tile.alone:
        if assigned.next < assigned.stop:
            work, _ = next_work_tile(assigned, num_seqs, table_width, batch, scoring, splits, C)
            attend_work_tile(
                work, kv_head, queries, keys, values, output, output_scale, batch, scoring, splits, partials, table_stride, num_blocks, C
            )  # fmt: skip
    else:
        while assigned.next < assigned.stop:
            work, assigned = next_work_tile(assigned, num_seqs, table_width, batch, scoring, splits, C)
            attend_work_tile(
                work, kv_head, queries, keys, values, output, output_scale, batch, scoring, splits, partials, table_stride, num_blocks, C
            )  # fmt: skip
    if C.tile.waits:
        gdc_wait()


@triton.jit
def attend_work_tile(
    work, kv_head, queries, keys, values, output, output_scale, batch, scoring, splits, partials, table_stride, num_blocks, C: tl.constexpr
):
    """Some query rows against some keys."""
    K: tl.constexpr = C.format.key
    V: tl.constexpr = C.format.value
    K_HEADS: tl.constexpr = C.key_heads
    V_HEADS: tl.constexpr = C.value_heads
    K_ROW: tl.constexpr = C.key_row
    V_ROW: tl.constexpr = C.value_row
    tl.static_assert(K.scales == V.scales, "scales of K and V are of one kind")
    rows = query_rows(work, queries, kv_head, scoring, C)
    factor = score_unit(scoring)
    if K.scales == "plane":
        factor = factor * tl.load(keys.scales)
    x = load_queries(queries, rows, C)
    seen = seen_tiles(work, scoring, C)
    ids = first_blocks(seen, work, batch, table_stride, C)
    prefetch_tiles(keys, values, work, seen, kv_head, batch, table_stride, num_blocks, scoring, C)
    q, unit, q_zero = scaled_queries(query_ways(x, work, C), queries, factor, C)
    q, unit = query_operand(q, C), narrow(unit, C)
    score_factor = unit
    if K.huge_scales:
        score_factor = tl.full(unit.shape, 1.0, tl.float32)
    query = QueryOperand(q, unit, score_factor, softmax_unit(score_factor, scoring, C), q_zero)
    state = softmax_start(C)
    acc = accumulator(C)
    largest = 1e-30
    k_selectors, v_selectors = None, None
    if K.side_bytes:
        k_selectors = side_selectors(keys, num_blocks, K_HEADS, K_ROW)
    if V.side_bytes:
        v_selectors = side_selectors(values, num_blocks, V_HEADS, V_ROW)
    rotary = None
    if C.features.rotary_pairs > 0:
        rotary = rotary_rows(queries, rows, work, kv_head, score_unit(scoring), batch, C)
    unmasked = unmasked_tiles(seen, ids, work, batch, table_stride, num_blocks, C)
    scored = narrow_rows(rows, C)
    FIRST: tl.constexpr = C.tile.loops - 1 if C.masked_first else 0
    STEP: tl.constexpr = -1 if C.masked_first else 1
    for loop in tl.static_range(FIRST, tl.constexpr(FIRST + STEP * C.tile.loops), STEP):
        tiles = tiles_of(work, unmasked, loop, C)
        state, acc, largest = attend_tiles(
            state, acc, largest, tiles, query, scored, rotary, work, kv_head, keys, values, k_selectors, v_selectors, batch, table_stride,
            num_blocks, scoring, loop, C,
        )  # fmt: skip
    if V.scales == "plane":
        largest = tl.load(values.scales)
    if V.packed:
        acc = accumulated_rows(acc, C.value_operand_scale * unweigh(largest), C)
    else:
        acc = accumulated_rows(acc, 1.0, C)
    state = softmax_end(state, query.score_scale, score_base(scoring), C)
    epilogue(acc, state, output, output_scale, rows, work, kv_head, partials, splits, scoring, C)


@triton.jit
def attend_tiles(
    state, acc, largest, tiles, query, rows, rotary, work, kv_head, keys, values, k_selectors, v_selectors, batch, table_stride, num_blocks,
    scoring, LOOP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The loop over key tiles: (state, accumulator, largest scale of values) with those of ``tiles``."""
    C: tl.constexpr = WHOLE.masked if LOOP > 0 else WHOLE
    K: tl.constexpr = C.format.key
    V: tl.constexpr = C.format.value
    K_HEADS: tl.constexpr = C.key_heads
    V_HEADS: tl.constexpr = C.value_heads
    K_ROW: tl.constexpr = C.key_row
    V_ROW: tl.constexpr = C.value_row
    common_seed = None
    if K.zero != 0.0:
        common_seed = seed_of_rows(query.zero * K.zero, C)
    for t in tl.range(tiles.first, tiles.last, num_stages=C.tile.stages if LOOP == 0 else WHOLE.masked_stages):
        tile = key_tile(t, tiles, work, batch, table_stride, num_blocks, scoring, LOOP, C)
        k_offset, v_offset = tile_offsets(keys, values, tile, C)
        k = load_chunks(
            keys,
            tile,
            k_offset,
            kv_head,
            K_HEADS,
            K_ROW,
            K.side_bytes,
            C,
            TRANSPOSED=C.tile.keys_transposed,
            CLEAR=C.clear_keys,
            selectors=k_selectors,
        )
        k_scale = None
        if K.scales == "row":
            k_scale, v_scale = load_scales(keys, values, tile, kv_head, C)
            v_word = v_scale
            if K.split is not None:
                k_scale, k_zero = K.split(k_scale)
            if V.split is not None:
                v_scale, _ = V.split(v_word)
        v = load_chunks(
            values,
            tile,
            v_offset,
            kv_head,
            V_HEADS,
            V_ROW,
            V.side_bytes,
            C,
            TRANSPOSED=C.tile.keys_first,
            CLEAR=C.clear_values,
            selectors=v_selectors,
        )
        k, v = operands(k, K, K_ROW, C), operands(v, V, V_ROW, C)
        seed = common_seed
        if K.split is not None:
            seed = by_key(k_zero, C) * by_row(query.zero, C)
        s = scores(query.ways, k, seed, C)
        if K.huge_scales:
            s = s * by_row(query.unit, C)
        s = finish_scores(s, query.factor, k_scale, rotary, rows, tile, work, scoring, LOOP, C)
        p, alpha, state = softmax_step(s, query.score_scale, state, C, EXACT=K.packed)
        zeros = None
        if V.scales == "row":
            weights, shrink, largest = weigh(p, v_scale, largest, C)
            alpha = alpha * shrink
            if V.split is not None:
                zeros = V.weighted_zeros(weights, v_word, C) * C.value_zero
        elif V.scales == "plane":
            weights = (p * 256.0).to(tl.float16)
        else:
            weights = p.to(v[0].dtype)
        if V.zero != 0.0:
            if V.ways > 2:
                zeros = sum_over_keys(weights, C) * (V.zero * C.value_zero)
            else:
                zeros = tl.sum(weights.to(tl.float32), 0 if C.tile.keys_first else 1) * (V.zero * C.value_zero)
        acc = accumulate(weights, v, acc, alpha, zeros, C)
    return state, acc, largest
