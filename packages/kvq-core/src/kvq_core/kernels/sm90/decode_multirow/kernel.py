"""From a program's keys to partial results: the loop, in which one tile's values are multiplied beside the next one's scores."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents

from kvq_core.kernels.epilogue import note_plan
from kvq_core.kernels.sm90.decode_multirow.copying import copy_tile, find_tile
from kvq_core.kernels.sm90.decode_multirow.layouts import (
    FARTHEST,
    OFFSETS_TILE,
    KeyBlocks,
    SharedTiles,
    State,
    lane_tile,
    product,
    right_operand,
)
from kvq_core.kernels.sm90.decode_multirow.operands import key_operands, value_operands
from kvq_core.kernels.sm90.decode_multirow.queries import load_queries, score_shift, write_partial
from kvq_core.kernels.sm90.decode_multirow.rotary import load_rotary
from kvq_core.kernels.sm90.decode_multirow.weights import compare, load_scales, sum_of_threads, weigh
from kvq_core.kernels.sm90.layouts import HALF, PLAIN, WARPS, codes_of_head
from kvq_core.kernels.sm90.mma import LOG2E
from kvq_core.kernels.sm90.renamed import thread_barrier
from kvq_core.kernels.sm90.rotary import PAIRS
from kvq_core.kernels.sm90.scheduler import all_exist, assigned_range, next_work_tile


@gluon.jit
def attend_multirow(
    queries,
    keys,
    values,
    batch,
    scoring,
    splits,
    partials,
    num_seqs,
    table_stride,
    table_width,
    num_blocks,
    key_operand_scale,
    value_operand_scale,
    UNPACK_KEYS: gl.constexpr,
    UNPACK_VALUES: gl.constexpr,
    SPLIT: gl.constexpr,
    OFFSETS: gl.constexpr,
    N: gl.constexpr,
    C: gl.constexpr,
):
    """Arguments as those of the Triton kernels (args.py), and what a mode brings:

    ``key_operand_scale``, ``value_operand_scale``: factors of all keys and values beside their rows' scales. N: :class:`Numbers`.

    UNPACK_KEYS(lanes [64, n]): the operands of all ways. UNPACK_VALUES(lanes [64, n]): of both; or, where there are more,
    UNPACK_VALUES(lanes [1, LANES, n], i [64 / LANES, 1, 1]): of ways i, and of those as far on in the other half of the ways.

    If N.zeros, SPLIT(scale words): scales and zero points, float32; OFFSETS(scale words [1, KEYS], i [64 / LANES, 1]): what takes the zero
    points off ways i, float16, which UNPACK_VALUES is then given, [64 / LANES, 1, n].
    """
    ROWS: gl.constexpr = C.tile.rows
    KEYS: gl.constexpr = C.tile.keys
    STAGES: gl.constexpr = C.tile.stages
    P: gl.constexpr = product(ROWS)
    LANES: gl.constexpr = C.shape.head_size // C.format.key.ways
    gl.static_assert(C.shape.head_size == 128 and C.shape.head_size_v == 128 and C.format.key.packed, "packed heads of 128")
    gl.static_assert(ROWS >= 16, "16 rows")
    OFFSET_ROWS: gl.constexpr = HALF // LANES
    gl.static_assert(C.shape.row_alignment == 16, "rows of codes start at multiples of 16 bytes")
    gl.static_assert(scoring.window_left is None and scoring.softcap is None and scoring.alibi_slopes is None, "no window, softcap, ALiBi")
    gl.static_assert(scoring.qq_bias is None and scoring.ranges is None, "no bias, no prefix ranges")
    gl.static_assert(STAGES >= 3, "at least three stages")
    gl.static_assert(C.tile.split == "equal" and C.tile.least_splits == 1, "an equal split, all of it combined")
    if C.tile.overlap == "start":
        gdc_launch_dependents()
    kv_head = gl.program_id(1)
    k = codes_of_head(keys, kv_head, queries.ptr, N.scaled)
    v = codes_of_head(values, kv_head, queries.ptr, N.scaled)
    tiles = SharedTiles(
        gl.allocate_shared_memory(gl.uint16, [STAGES, KEYS, LANES], lane_tile(LANES)),
        gl.allocate_shared_memory(gl.uint16, [STAGES, KEYS, LANES], lane_tile(LANES)),
        gl.allocate_shared_memory(gl.float32, [STAGES, KEYS], PLAIN),
        gl.allocate_shared_memory(gl.float32, [STAGES, KEYS], PLAIN),
        gl.allocate_shared_memory(gl.float16, [2, KEYS, ROWS], right_operand(ROWS)),
        gl.allocate_shared_memory(gl.float16, [2, ROWS, HALF], right_operand(HALF)),
        gl.allocate_shared_memory(gl.float16, [2, OFFSET_ROWS, KEYS if N.zeros else 1], OFFSETS_TILE),
        gl.allocate_shared_memory(gl.int32, [2, WARPS], PLAIN),
    )
    rotary_rows = tiles.query
    if C.features.rotary_pairs > 0:
        rotary_rows = gl.allocate_shared_memory(gl.float16, [2, ROWS, PAIRS], right_operand(PAIRS))
    score_unit = key_operand_scale * scoring.softmax_scale * LOG2E
    assigned = assigned_range(num_seqs, table_width, batch, scoring, splits, C)
    while assigned.next < assigned.stop:
        work, assigned = next_work_tile(assigned, num_seqs, table_width, batch, scoring, splits, C)
        first = work.start // KEYS
        last = gl.maximum(gl.cdiv(work.stop, KEYS), first)
        whole = gl.maximum(gl.minimum(work.context_len + work.row_start + 1, work.stop) // KEYS, first)
        span = KeyBlocks(batch.block_table + work.seq.to(gl.int64) * table_stride, num_blocks, work.stop, False)
        span = KeyBlocks(span.table, num_blocks, work.stop, all_exist(first * KEYS, work.stop, span, C))
        whole = gl.where(span.complete, whole, first)
        for ahead in gl.static_range(STAGES - 1):
            copy_tile(find_tile(first + ahead, span, True, N.scaled, C), ahead, k, v, tiles, True, N.scaled, C)
        rows = load_queries(queries, tiles, work, kv_head, score_unit, N, C)
        rotary = load_rotary(queries, rotary_rows, work, kv_head, scoring.softmax_scale, batch, C)
        nothing = gl.zeros([HALF, ROWS], gl.float32, P)
        total = sum_of_threads(gl.zeros([KEYS, ROWS], gl.float32, P), C)
        shift = gl.full([ROWS], FARTHEST, gl.float32, gl.SliceLayout(0, P))
        state = State(nothing, nothing, total, shift, gl.to_tensor(1e-30 if N.scaled else 1.0), gl.to_tensor(256.0))
        if first < last:
            async_copy.wait_group(STAGES - 2)
            thread_barrier()
            scales = load_scales(0, tiles, SPLIT, OFFSETS, N, C)
            s = warpgroup_mma_wait(0, deps=(begin_scores(0, scales, rows, tiles, UNPACK_KEYS, N, C),))
            s, z, too_high = compare(first, first, s, scales, state, rows, rotary, tiles, span, True, N, C)
            state = weigh(first, first, s, z, too_high, scales, state, rows, tiles, N, C)
            # Step n scores tile n, copies tile n + STAGES - 2 and looks up the blocks of tile n + STAGES - 1. While the last of these is
            # seen whole, none of them needs a mask.
            middle = gl.maximum(whole - (STAGES - 1), first + 1)
            location = find_tile(first + STAGES - 1, span, True, N.scaled, C)
            for n in range(first + 1, middle):
                state, location = step(
                    n, first, state, location, rows, rotary, k, v, tiles, span, False, UNPACK_KEYS, UNPACK_VALUES, SPLIT, OFFSETS, N, C
                )  # fmt: skip
            for n in range(middle, last):
                state, location = step(
                    n, first, state, location, rows, rotary, k, v, tiles, span, True, UNPACK_KEYS, UNPACK_VALUES, SPLIT, OFFSETS, N, C
                )  # fmt: skip
            thread_barrier()
            low, high = begin_values(last - 1 - first, state, tiles, UNPACK_VALUES, N, C)
            low, high = warpgroup_mma_wait(0, deps=(low, high))
            state = State(low, high, state.total, state.shift, state.largest, state.grow)
        async_copy.wait_group(0)
        # The next work tile's copies overwrite this one's tiles.
        thread_barrier()
        if C.tile.overlap == "end":
            gdc_launch_dependents()
        note_plan(work, kv_head, partials, C)
        shift = nothing
        if C.features.shifted:
            shift = score_shift(queries, work, kv_head, scoring.softmax_scale * LOG2E, C)
        write_partial(state, shift, value_operand_scale * state.largest * (1.0 / 256.0), work, kv_head, partials, C)


@gluon.jit
def step(
    n, first, state, location, rows, rotary, k, v, tiles, span, EDGE: gl.constexpr,
    UNPACK_KEYS: gl.constexpr, UNPACK_VALUES: gl.constexpr, SPLIT: gl.constexpr, OFFSETS: gl.constexpr,
    N: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Tile n's scores and weights, and the values of the tile before it. ``location`` is the next tile's to copy; those after it come back,
    asked for a whole turn before the copy that needs them.

    Shared memory is read in the first half, up to the barrier in :func:`compare`, and copied to in the second: Triton takes all places of a
    buffer for one, and would have a barrier between them otherwise."""
    STAGES: gl.constexpr = C.tile.stages
    at = n - first
    async_copy.wait_group(STAGES - 3)
    thread_barrier()
    later = find_tile(n + STAGES - 1, span, EDGE, N.scaled, C)
    scales = load_scales(at % STAGES, tiles, SPLIT, OFFSETS, N, C)
    s = begin_scores(at % STAGES, scales, rows, tiles, UNPACK_KEYS, N, C)
    low, high = begin_values(at - 1, state, tiles, UNPACK_VALUES, N, C)
    s = warpgroup_mma_wait(2, deps=(s,))
    state = State(low, high, state.total, state.shift, state.largest, state.grow)
    s, z, too_high = compare(n, first, s, scales, state, rows, rotary, tiles, span, EDGE, N, C)
    copy_tile(location, (at + STAGES - 2) % STAGES, k, v, tiles, EDGE, N.scaled, C)
    return weigh(n, first, s, z, too_high, scales, state, rows, tiles, N, C), later


@gluon.jit
def begin_scores(at, scales, rows, tiles, UNPACK_KEYS: gl.constexpr, N: gl.constexpr, C: gl.constexpr):
    """q.k of a tile on top of what takes the codes' offset off, or their zero points, [KEYS, ROWS]: begun, not done."""
    KEYS: gl.constexpr = C.tile.keys
    ROWS: gl.constexpr = C.tile.rows
    low, high = key_operands(tiles.k.index(at), UNPACK_KEYS, C)
    s = gl.zeros([KEYS, ROWS], gl.float32, product(ROWS)) + rows.seed[None, :]
    if N.zeros:
        s = scales.k_zero[:, None] * s
    s = warpgroup_mma(low, tiles.query.index(0).permute((1, 0)), s, use_acc=N.offset != 0.0, is_async=True)
    return warpgroup_mma(high, tiles.query.index(1).permute((1, 0)), s, is_async=True)


@gluon.jit
def begin_values(number, state, tiles, UNPACK_VALUES: gl.constexpr, N: gl.constexpr, C: gl.constexpr):
    """Both halves of the ways' sums with the weighted values of key tile ``number``: begun, not done."""
    low, high = value_operands(tiles.v.index(number % C.tile.stages), tiles.offsets.index(number % 2), UNPACK_VALUES, N, C)
    weights = tiles.weights.index(number % 2)
    return warpgroup_mma(low, weights, state.low, is_async=True), warpgroup_mma(high, weights, state.high, is_async=True)
