"""The kernel around the groups: finds a program's work, lays out its shared memory, and sends the groups off."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kvq_core.kernels.sm90.layouts import (
    GROUPS,
    HALF,
    OPERAND,
    PLAIN,
    ROTARY,
    THREADS,
    WARPS,
    Buffers,
    KeyRange,
    OwnBuffers,
    QueryBlock,
    QueryTile,
    codes_of_head,
)
from kvq_core.kernels.sm90.mma import LOG2E, multiply_tiles
from kvq_core.kernels.sm90.rotary import PAIRS, rotary_of
from kvq_core.kernels.sm90.scheduler import find_work
from kvq_core.kernels.sm90.unpack import fill_tiles

__all__ = ["as_stored", "attend_in_groups"]


@gluon.jit
def as_stored(word):
    """A scale word that is the scale."""
    return word


@gluon.jit
def attend_in_groups(
    queries,
    keys,
    values,
    output,
    batch,
    scoring,
    num_seqs,
    table_stride,
    table_width,
    num_blocks,
    key_operand_scale,
    value_operand_scale,
    SCALED: gl.constexpr,
    KEY_PRESCALE: gl.constexpr,
    FINITE: gl.constexpr,
    ADJACENT: gl.constexpr,
    UNPACK: gl.constexpr,
    SCALE_OF: gl.constexpr,
    C: gl.constexpr,
    COPIED: gl.constexpr = False,
):
    """Causal attention of one row block and kv head; arguments as those of the Triton kernels (args.py), and what a mode brings:

    ``key_operand_scale``, ``value_operand_scale``: what an operand of 1 stands for, beside its row's scale. SCALED: rows have scales,
    SCALE_OF(word).
    KEY_PRESCALE: keys' are taken times it, so that a score is finite whatever the scale. FINITE: operands are, whatever the codes.
    COPIED: tiles are operands already, unquantized or, with scales, staged; the hooks are not used.
    UNPACK(words [KEYS, n], scale words [KEYS]): operands in pairs, [KEYS, ..., n] 32-bit words whose dimensions between count a word's
    pairs. With side bytes it gets (words, bytes [KEYS, n]) for the words. ADJACENT: see queries.py.
    """
    STAGED: gl.constexpr = COPIED and SCALED
    gl.static_assert(C.shape.head_size == C.shape.head_size_v and (COPIED or C.shape.head_size == 128), "heads of 128, if not copied")
    gl.static_assert(C.tile.rows == GROUPS * HALF and C.tile.keys == 128, "tiles of 128 x 128")
    gl.static_assert(C.shape.row_alignment == 16, "rows of codes start at multiples of 16 bytes")
    gl.static_assert(scoring.window_left is None and scoring.softcap is None and scoring.alibi_slopes is None, "no window, softcap, ALiBi")
    gl.static_assert(scoring.qq_bias is None and scoring.ranges is None, "no bias, no prefix ranges")
    gl.static_assert(C.tile.split == "", "no split")
    gl.static_assert(C.features.output == "", "no fp8 output")
    kv_head = gl.program_id(1)
    found, seq, row_start, num_rows, first_token, context_len, stop = find_work(gl.program_id(0), num_seqs, table_width, batch, STAGED, C)
    if found:
        span = span_of(seq, kv_head, context_len + row_start, stop, batch, table_stride, num_blocks, COPIED, STAGED, C)
        dtype: gl.constexpr = gl.float16 if C.format.key.in_float16 else queries.ptr.dtype.element_ty
        shared, own = allocate(dtype, COPIED, SCALED, C)
        rotary = rotary_of(queries, kv_head, seq, scoring.softmax_scale, own.rotary, batch, C)
        matrix_ptr = queries.ptr
        if STAGED and C.format.key.rotated:
            # kvq_core.kernels.staging.store_matrix put it behind the keys.
            matrix_ptr = keys.codes + (table_stride * gl.num_programs(1)).to(gl.int64) * (C.tile.keys * C.staged_key_size)
        k = codes_of_head(keys, kv_head, queries.ptr, SCALED)
        v = codes_of_head(values, kv_head, queries.ptr, SCALED)
        score_unit = key_operand_scale * scoring.softmax_scale * LOG2E
        value_unit = value_operand_scale * 1.0
        if SCALED and not COPIED:
            # Their scales are over half of the largest (unpack.py).
            value_unit = value_operand_scale * 0.5
        where = QueryBlock(row_start, num_rows, first_token, context_len, kv_head)
        work = query_tile(queries, output, scoring, score_unit, value_unit, where, own, matrix_ptr, C)
        BALANCED: gl.constexpr = queries.factor is not None
        SINKS: gl.constexpr = scoring.sinks is not None
        LSE: gl.constexpr = output.lse is not None
        JOINS: gl.constexpr = output.other is not None
        gl.warp_specialize(
            [
                (fill_tiles, (k, v, span, shared, rotary, COPIED, SCALED, KEY_PRESCALE, FINITE, UNPACK, SCALE_OF, C)),
                (multiply_tiles, (0, work, span, shared, rotary, COPIED, SCALED, BALANCED, SINKS, LSE, JOINS, ADJACENT, C)),
                (multiply_tiles, (1, work, span, shared, rotary, COPIED, SCALED, BALANCED, SINKS, LSE, JOINS, ADJACENT, C)),
            ],
            [WARPS, WARPS],
            [C.tile.registers, C.tile.registers],
        )


@gluon.jit
def span_of(seq, kv_head, position, stop, batch, table_stride, num_blocks, COPIED: gl.constexpr, STAGED: gl.constexpr, C: gl.constexpr):
    """A sequence's keys before ``stop``, for rows of which the first is at ``position``."""
    last = gl.cdiv(stop, C.tile.keys)
    whole = gl.maximum(gl.minimum(position + 1, stop), 0) // C.tile.keys
    if COPIED:
        # The ping-pong loop starts from a tile's scores. If there are no keys, it masks that whole tile, and nothing is loaded.
        last = gl.maximum(last, 1)
    first = 0
    table = batch.block_table
    if STAGED:
        first = gl.load(batch.first_tiles + seq)
        table += kv_head.to(gl.int64) * table_stride + first
    else:
        table += seq.to(gl.int64) * table_stride
    return KeyRange(table, first, num_blocks, whole, last, stop)


@gluon.jit
def query_tile(queries, output, scoring, score_unit, value_unit, where, own, matrix_ptr, C: gl.constexpr):
    """What a multiplying group is given. Another pointer stands for each that is missing (layouts.py)."""
    mean = queries.ptr
    factor = queries.ptr
    lse = queries.ptr
    other = queries.ptr
    other_lse = queries.ptr
    sinks = queries.ptr
    if C.features.shifted:
        mean = queries.mean
    if queries.factor is not None:
        factor = queries.factor
    if output.lse is not None:
        lse = output.lse
    if output.other is not None:
        other = output.other
        other_lse = output.other_lse
    if scoring.sinks is not None:
        sinks = scoring.sinks
    return QueryTile(
        queries.ptr,
        queries.token_stride,
        queries.head_stride,
        mean,
        factor,
        output.ptr,
        output.token_stride,
        output.head_stride,
        lse,
        other,
        other_lse,
        sinks,
        score_unit,
        value_unit,
        where.row_start,
        where.num_rows,
        where.first_token,
        where.context_len,
        where.kv_head,
        own.tile,
        own.matrix,
        matrix_ptr,
        own.ready,
    )


@gluon.jit
def allocate(dtype: gl.constexpr, COPIED: gl.constexpr, SCALED: gl.constexpr, C: gl.constexpr):
    """A program's shared memory: (what goes between the groups, what the multiplying groups have for themselves)."""
    KEYS: gl.constexpr = C.tile.keys
    STAGES: gl.constexpr = C.tile.stages
    k = gl.allocate_shared_memory(dtype, [STAGES, KEYS, C.channels], OPERAND)
    v = gl.allocate_shared_memory(dtype, [STAGES, KEYS, C.channels], OPERAND)
    tile = gl.allocate_shared_memory(dtype, [GROUPS, HALF, C.channels], OPERAND)
    matrix = tile
    if C.format.key.rotated:
        matrix = gl.allocate_shared_memory(gl.bfloat16, [C.channels, C.channels], OPERAND)
    positions = gl.allocate_shared_memory(gl.int32, [STAGES, KEYS], PLAIN)
    k_scales = positions
    v_scales = positions
    v_largest = positions
    if SCALED:
        k_scales = gl.allocate_shared_memory(gl.float32, [STAGES, KEYS], PLAIN)
        v_scales = gl.allocate_shared_memory(gl.float32, [STAGES, KEYS], PLAIN)
        v_largest = gl.allocate_shared_memory(gl.float32, [STAGES, HALF], PLAIN)
    # The producer group arrives once for an unpacked tile. For a round each thread's copies do, and the group for what it stores.
    k_full = barriers(STAGES, THREADS + 1 if COPIED else 1)
    k_free = barriers(STAGES, GROUPS)
    v_full = k_full
    v_free = k_free
    turn_0 = k_full
    turn_1 = k_full
    if COPIED:
        turn_0 = barriers(1, 1).index(0)
        turn_1 = barriers(1, 1).index(0)
    else:
        v_full = barriers(STAGES, 1)
        v_free = barriers(STAGES, GROUPS)
    ready = k_full
    if C.format.key.rotated:
        ready = barriers(1, GROUPS).index(0)
    rotary = k
    rotary_rows = tile
    if C.features.rotary_pairs > 0:
        rotary = gl.allocate_shared_memory(gl.float16, [STAGES, KEYS, 2 * PAIRS], ROTARY)
        rotary_rows = gl.allocate_shared_memory(gl.float16, [GROUPS, HALF, 2 * PAIRS], ROTARY)
    shared = Buffers(k, v, k_scales, v_scales, v_largest, positions, k_full, v_full, k_free, v_free, rotary, turn_0, turn_1)
    return shared, OwnBuffers(tile, matrix, ready, rotary_rows)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers, each of which that many arrivals complete, [COUNT, 1]."""
    result = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(COUNT):
        mbarrier.init(result.index(at), count=ARRIVALS)
    return result
