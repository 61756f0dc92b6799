"""The kernel around the groups: finds a program's work, lays out its shared memory, and sends the groups off."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kvq_core.kernels.sm90.layouts import GROUPS, HALF, OPERAND, PLAIN, ROTARY, THREADS, WARPS, Buffers, Codes, QueryTile, Span
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
    D: gl.constexpr = C.channels
    KEYS: gl.constexpr = C.tile.keys
    STAGES: gl.constexpr = C.tile.stages
    STAGED: gl.constexpr = COPIED and SCALED
    gl.static_assert(C.shape.head_size == C.shape.head_size_v and (COPIED or C.shape.head_size == 128), "heads of 128, if not copied")
    gl.static_assert(C.tile.rows == GROUPS * HALF and KEYS == 128, "tiles of 128 x 128")
    gl.static_assert(C.shape.row_alignment == 16, "rows of codes start at multiples of 16 bytes")
    gl.static_assert(scoring.window_left is None and scoring.softcap is None and scoring.alibi_slopes is None, "no window, softcap, ALiBi")
    gl.static_assert(scoring.qq_bias is None and scoring.ranges is None, "no bias, no prefix ranges")
    gl.static_assert(C.tile.split == "", "no split")
    gl.static_assert(C.features.output == "", "no fp8 output")
    kv_head = gl.program_id(1)
    found, seq, row_start, num_rows, first_token, context_len, stop = find_work(gl.program_id(0), num_seqs, table_width, batch, STAGED, C)
    if found:
        last = gl.cdiv(stop, KEYS)
        whole = gl.maximum(gl.minimum(context_len + row_start + 1, stop), 0) // KEYS
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
        span = Span(table, first, num_blocks, whole, last, stop)

        dtype: gl.constexpr = gl.float16 if C.format.key.in_float16 else queries.ptr.dtype.element_ty
        k_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, D], OPERAND)
        v_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, D], OPERAND)
        q_tile = gl.allocate_shared_memory(dtype, [GROUPS, HALF, D], OPERAND)
        matrix = q_tile
        if C.format.key.rotated:
            matrix = gl.allocate_shared_memory(gl.bfloat16, [D, D], OPERAND)
        positions = gl.allocate_shared_memory(gl.int32, [STAGES, KEYS], PLAIN)
        k_scales = positions
        v_scales = positions
        v_largest = positions
        if SCALED:
            k_scales = gl.allocate_shared_memory(gl.float32, [STAGES, KEYS], PLAIN)
            v_scales = gl.allocate_shared_memory(gl.float32, [STAGES, KEYS], PLAIN)
            v_largest = gl.allocate_shared_memory(gl.float32, [STAGES, HALF], PLAIN)
        k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_full = k_full
        v_free = k_free
        turn_0 = k_full
        turn_1 = k_full
        for at in gl.static_range(STAGES):
            # The producer group arrives once for an unpacked tile. For a round each thread's copies do, and the group for what it stores.
            mbarrier.init(k_full.index(at), count=THREADS + 1 if COPIED else 1)
            mbarrier.init(k_free.index(at), count=GROUPS)
        if COPIED:
            turn_0 = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
            turn_1 = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
            mbarrier.init(turn_0, count=1)
            mbarrier.init(turn_1, count=1)
        else:
            v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
            v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
            for at in gl.static_range(STAGES):
                mbarrier.init(v_full.index(at), count=1)
                mbarrier.init(v_free.index(at), count=GROUPS)
        ready = k_full
        if C.format.key.rotated:
            ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
            mbarrier.init(ready, count=GROUPS)
        rotary_tiles = k_tiles
        rotary_queries = q_tile
        if C.features.rotary_pairs > 0:
            rotary_tiles = gl.allocate_shared_memory(gl.float16, [STAGES, KEYS, 2 * PAIRS], ROTARY)
            rotary_queries = gl.allocate_shared_memory(gl.float16, [GROUPS, HALF, 2 * PAIRS], ROTARY)
        rotary = rotary_of(queries, kv_head, seq, scoring.softmax_scale, rotary_queries, batch, C)
        shared = Buffers(
            k_tiles, v_tiles, k_scales, v_scales, v_largest, positions, k_full, v_full, k_free, v_free, rotary_tiles, turn_0, turn_1
        )  # fmt: skip

        BALANCED: gl.constexpr = queries.factor is not None
        SINKS: gl.constexpr = scoring.sinks is not None
        LSE: gl.constexpr = output.lse is not None
        JOINS: gl.constexpr = output.other is not None
        lse = queries.ptr
        if LSE:
            lse = output.lse
        other = queries.ptr
        other_lse = queries.ptr
        if JOINS:
            other = output.other
            other_lse = output.other_lse
        mean = queries.ptr
        if C.features.shifted:
            mean = queries.mean
        factor = queries.ptr
        if BALANCED:
            factor = queries.factor
        sinks = queries.ptr
        if SINKS:
            sinks = scoring.sinks
        matrix_ptr = queries.ptr
        if STAGED and C.format.key.rotated:
            # kvq_core.kernels.staging.store_matrix put it behind the keys.
            matrix_ptr = keys.codes + (table_stride * gl.num_programs(1)).to(gl.int64) * (KEYS * C.staged_key_size)
        k_scale = queries.ptr
        v_scale = queries.ptr
        head = kv_head.to(gl.int64)
        if SCALED:
            k_scale = keys.scales + head * keys.scale_head_stride
            v_scale = values.scales + head * values.scale_head_stride
        # All strides of codes are multiples of 16 bytes; said in a way that the compiler sees.
        k_codes = keys.codes + head * (keys.head_stride // 8) * 8
        v_codes = values.codes + head * (values.head_stride // 8) * 8
        k = Codes(k_codes, k_scale, keys.block_stride, keys.slot_stride, keys.scale_block_stride, keys.scale_slot_stride)
        v = Codes(v_codes, v_scale, values.block_stride, values.slot_stride, values.scale_block_stride, values.scale_slot_stride)
        score_unit = key_operand_scale * scoring.softmax_scale * LOG2E
        value_unit = value_operand_scale * 1.0
        if SCALED and not COPIED:
            # Their scales are over half of the largest (unpack.py).
            value_unit = value_operand_scale * 0.5
        work = QueryTile(
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
            row_start,
            num_rows,
            first_token,
            context_len,
            kv_head,
            q_tile,
            matrix,
            matrix_ptr,
            ready,
        )
        gl.warp_specialize(
            [
                (fill_tiles, (k, v, span, shared, rotary, COPIED, SCALED, KEY_PRESCALE, FINITE, UNPACK, SCALE_OF, C)),
                (multiply_tiles, (0, work, span, shared, rotary, COPIED, SCALED, BALANCED, SINKS, LSE, JOINS, ADJACENT, C)),
                (multiply_tiles, (1, work, span, shared, rotary, COPIED, SCALED, BALANCED, SINKS, LSE, JOINS, ADJACENT, C)),
            ],
            [WARPS, WARPS],
            [C.tile.registers, C.tile.registers],
        )
