"""A few query rows over split keys, by one warp group: drafts of several tokens, or a group of many query heads.

With a warp a program, rows beyond 16 find no registers, and each 16 of them unpack all keys again. Here four warps share a tile: each
unpacks a quarter of it, straight into the registers that ``wgmma`` takes its left operand from, and has a quarter of the sums:

    S^T = K q^T        [keys, rows]      q in shared memory, written once
    O^T = V^T P^T      [channels, rows]  P by way of shared memory, since all warps need all of it

The products of one tile's values run beside those of the next tile's scores, and while that one's softmax is taken. Four warps have a
row's maximum only after they have met twice; so the maximum is left as it is while no score is :data:`HEADROOM` above it, which the range
of the weights allows, and hardly any tile after the first has such a score.

For modes of two streams, whose 64 lanes are what ``wgmma`` takes, which are not rotated; heads of 128, plain causal attention. Results are
left to the merge (:mod:`kvq_core.kernels.merge`), those of rows in one piece as well.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents

from kvq_core.kernels.queries import head_offset
from kvq_core.kernels.splits import note_plan
from kvq_core.kernels.warpgroups.layouts import HALF, PLAIN, QUERY, VECTOR, Codes, Span
from kvq_core.kernels.warpgroups.multiplying import LOG2E
from kvq_core.kernels.warpgroups.work import all_exist, next_work, take_share

# Triton 3.6 has the barrier of a program's threads under its first name.
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier

STREAMS = gl.constexpr(2)
HEADROOM = gl.constexpr(7.0)
"""How far scores may be above their row's maximum as last looked up, in log2 units: weights of float16 reach 2^16, and 256 is their usual
most."""
LANES_TILE = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
"""Rows of 64 lanes such that ``ldmatrix`` meets every bank once, turned or not."""
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
BY_ROW = gl.constexpr(gl.SliceLayout(1, COPY.value))


@gluon.constexpr_function
def product(rows):
    """Results [64, rows] of ``wgmma``, or several such one above the other."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, rows, 16])


@gluon.constexpr_function
def left_operand(rows):
    """[64, k] of 16 bits, in registers."""
    return gl.DotOperandLayout(0, product(rows), 2)


@gluon.constexpr_function
def right_operand(columns):
    """[k, columns] of 16 bits, or turned, in shared memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, columns * 2), element_bitwidth=16, rank=2)


class Tiles(NamedTuple):
    """Shared memory: ``stages`` tiles of lanes [KEYS, 64] and scales [KEYS] of K and V, the weights [KEYS, ROWS] of this tile and the one
    before, and the query's streams [ROWS, 64]."""

    k: Any
    v: Any
    k_scales: Any
    v_scales: Any
    weights: Any
    query: Any


class Places(NamedTuple):
    """Where a tile's codes and scales lie in their planes, and whether they are there, [KEYS]: by rows of COPY, and of VECTOR."""

    k: Any
    v: Any
    exists: Any
    k_scale: Any
    v_scale: Any
    scaled: Any


class Rows(NamedTuple):
    """Facts of the query rows, [ROWS]: what is left to multiply scores by, what the codes' offset adds to them, and positions."""

    left: Any
    seed: Any
    position: Any


class State(NamedTuple):
    """What was summed: values' two streams [64, ROWS], and weights [4, 8, ROWS], by every thread for its own keys.

    ``top`` [ROWS]: the maximum that both are relative to. ``largest``: the values' largest scale, likewise; ``grow``: 256 over it.
    """

    low: Any
    high: Any
    total: Any
    top: Any
    largest: Any
    grow: Any


@gluon.jit
def attend_drafts(
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
    key_worth,
    value_worth,
    SCALED: gl.constexpr,
    SHRUNK: gl.constexpr,
    PEAK: gl.constexpr,
    UNIT: gl.constexpr,
    OFFSET: gl.constexpr,
    UNPACK_KEYS: gl.constexpr,
    UNPACK_VALUES: gl.constexpr,
    C: gl.constexpr,
):
    """Arguments as those of the portable kernels (args.py), and what a mode brings:

    ``key_worth``, ``value_worth``: factors of all keys and values beside their rows' scales. SCALED: rows have such; SHRUNK: keys' are
    taken times it, and PEAK: rows of queries are brought to a peak of PEAK to twice that, so that no sum overflows. UNPACK_KEYS,
    UNPACK_VALUES(lanes [64, n], a left operand): operands of both streams; a key's is UNIT times (number - OFFSET).
    """
    ROWS: gl.constexpr = C.rows
    KEYS: gl.constexpr = C.keys
    STAGES: gl.constexpr = C.stages
    P: gl.constexpr = product(ROWS)
    gl.static_assert(C.head_size == 128 and C.head_size_v == 128 and C.format.streams == STREAMS, "heads of 128 in two streams")
    gl.static_assert(not C.format.rotated and C.format.signs is None, "no rotation")
    gl.static_assert(C.row_bytes == 16, "rows of codes start at multiples of 16 bytes")
    gl.static_assert(scoring.window_left is None and scoring.softcap is None and scoring.alibi_slopes is None, "no window, softcap, ALiBi")
    gl.static_assert(scoring.qq_bias is None and scoring.ranges is None and not C.shifted, "no bias, no prefix ranges, no shift")
    gl.static_assert(C.split == "shares" and C.least_pieces == 1, "equal shares, all of them merged")
    kv_head = gl.program_id(1)
    head = kv_head.to(gl.int64)
    # All strides of codes are multiples of 16 bytes; said in a way that the compiler sees.
    k_codes = keys.codes + head * (keys.head_stride // 8) * 8
    v_codes = values.codes + head * (values.head_stride // 8) * 8
    k_scale = queries.ptr
    v_scale = queries.ptr
    if SCALED:
        k_scale = keys.scales + head * keys.scale_head_stride
        v_scale = values.scales + head * values.scale_head_stride
    k = Codes(k_codes, k_scale, keys.block_stride, keys.slot_stride, keys.scale_block_stride, keys.scale_slot_stride)
    v = Codes(v_codes, v_scale, values.block_stride, values.slot_stride, values.scale_block_stride, values.scale_slot_stride)
    tiles = Tiles(
        gl.allocate_shared_memory(gl.uint16, [STAGES, KEYS, HALF], LANES_TILE),
        gl.allocate_shared_memory(gl.uint16, [STAGES, KEYS, HALF], LANES_TILE),
        gl.allocate_shared_memory(gl.float32, [STAGES, KEYS], PLAIN),
        gl.allocate_shared_memory(gl.float32, [STAGES, KEYS], PLAIN),
        gl.allocate_shared_memory(gl.float16, [2, KEYS, ROWS], right_operand(ROWS)),
        gl.allocate_shared_memory(gl.float16, [STREAMS, ROWS, HALF], right_operand(HALF)),
    )
    score_unit = key_worth * scoring.softmax_scale * LOG2E
    share = take_share(num_seqs, batch, scoring, splits, C)
    while share.next < share.stop:
        work, share = next_work(share, num_seqs, table_width, batch, scoring, splits, C)
        first = work.start // KEYS
        last = gl.maximum(gl.cdiv(work.stop, KEYS), first)
        whole = gl.maximum(gl.minimum(work.context_len + work.row_start + 1, work.stop) // KEYS, first)
        span = Span(batch.block_table + work.seq.to(gl.int64) * table_stride, num_blocks, whole, last, work.stop)
        whole = gl.where(all_exist(first * KEYS, whole * KEYS, span, C), whole, first)
        for ahead in gl.static_range(STAGES - 1):
            copy_tile(find_tile(first + ahead, k, v, span, True, SCALED, C), ahead, k, v, tiles, True, SCALED, C)
        rows = load_queries(queries, tiles, work, kv_head, score_unit, PEAK, UNIT, OFFSET, C)
        nothing = gl.zeros([HALF, ROWS], gl.float32, P)
        total = sum_of_threads(gl.zeros([KEYS, ROWS], gl.float32, P), C)
        top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, P))
        state = State(nothing, nothing, total, top, gl.to_tensor(1e-30 if SCALED else 1.0), gl.to_tensor(256.0))
        if first < last:
            async_copy.wait_group(STAGES - 2)
            thread_barrier()
            s = begin_scores(0, rows, tiles, UNPACK_KEYS, C)
            state = weigh(first, first, warpgroup_mma_wait(0, deps=(s,)), state, rows, tiles, span, True, SCALED, SHRUNK, C)
            # What is copied meanwhile is two tiles ahead: those away from the edges need no mask in either.
            middle = gl.maximum(whole - (STAGES - 2), first + 1)
            for n in range(first + 1, middle):
                state = step(n, first, state, rows, k, v, tiles, span, False, SCALED, SHRUNK, UNPACK_KEYS, UNPACK_VALUES, C)
            for n in range(middle, last):
                state = step(n, first, state, rows, k, v, tiles, span, True, SCALED, SHRUNK, UNPACK_KEYS, UNPACK_VALUES, C)
            thread_barrier()
            low, high = begin_values(last - 1 - first, state, tiles, UNPACK_VALUES, C)
            low, high = warpgroup_mma_wait(0, deps=(low, high))
            state = State(low, high, state.total, state.top, state.largest, state.grow)
        async_copy.wait_group(0)
        # The next piece's copies come over this one's tiles.
        thread_barrier()
        if C.overlap == "end":
            gdc_launch_dependents()
        note_plan(work, kv_head, partials, C)
        write_share(state, rows, value_worth * state.largest * (1.0 / 256.0), work, kv_head, partials, C)


@gluon.jit
def step(
    n, first, state, rows, k, v, tiles, span, EDGE: gl.constexpr,
    SCALED: gl.constexpr, SHRUNK: gl.constexpr, UNPACK_KEYS: gl.constexpr, UNPACK_VALUES: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """Tile n's scores and weights, and the values of the tile before it."""
    STAGES: gl.constexpr = C.stages
    async_copy.wait_group(STAGES - 3)
    thread_barrier()
    places = find_tile(n + STAGES - 2, k, v, span, EDGE, SCALED, C)
    s = begin_scores((n - first) % STAGES, rows, tiles, UNPACK_KEYS, C)
    low, high = begin_values(n - 1 - first, state, tiles, UNPACK_VALUES, C)
    copy_tile(places, (n - first + STAGES - 2) % STAGES, k, v, tiles, EDGE, SCALED, C)
    s = warpgroup_mma_wait(2, deps=(s,))
    state = State(low, high, state.total, state.top, state.largest, state.grow)
    return weigh(n, first, s, state, rows, tiles, span, EDGE, SCALED, SHRUNK, C)


@gluon.jit
def begin_scores(at, rows, tiles, UNPACK_KEYS: gl.constexpr, C: gl.constexpr):
    """q.k of a tile on top of what takes the codes' offset off, [KEYS, ROWS]: begun, not done."""
    KEYS: gl.constexpr = C.keys
    ROWS: gl.constexpr = C.rows
    low, high = UNPACK_KEYS(tiles.k.index(at).load(left_operand(ROWS)))
    s = gl.zeros([KEYS, ROWS], gl.float32, product(ROWS)) + rows.seed[None, :]
    s = warpgroup_mma(low, tiles.query.index(0).permute((1, 0)), s, is_async=True)
    return warpgroup_mma(high, tiles.query.index(1).permute((1, 0)), s, is_async=True)


@gluon.jit
def begin_values(number, state, tiles, UNPACK_VALUES: gl.constexpr, C: gl.constexpr):
    """Both streams' sums with the weighted values of a piece's tile ``number``: begun, not done."""
    low, high = UNPACK_VALUES(tiles.v.index(number % C.stages).permute((1, 0)).load(left_operand(C.rows)))
    weights = tiles.weights.index(number % 2)
    return warpgroup_mma(low, weights, state.low, is_async=True), warpgroup_mma(high, weights, state.high, is_async=True)


@gluon.jit
def weigh(
    n, first, s, state, rows, tiles, span, EDGE: gl.constexpr, SCALED: gl.constexpr, SHRUNK: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """From tile n's products to its weights in shared memory, while the values of the tile before are summed, and the state with both."""
    KEYS: gl.constexpr = C.keys
    ROWS: gl.constexpr = C.rows
    P: gl.constexpr = product(ROWS)
    BY_KEY: gl.constexpr = gl.SliceLayout(1, P)
    at = (n - first) % C.stages
    nothing = gl.zeros([KEYS, ROWS], gl.float32, P)
    v_scale = gl.full([KEYS], 1.0, gl.float32, BY_KEY)
    if SCALED:
        # Not a plain product, which may be merged with the difference below: of huge scores the largest would not be 0 away from it.
        s = gl.fma(s, nothing + (tiles.k_scales.index(at).load(BY_KEY) * SHRUNK)[:, None], nothing)
        v_scale = tiles.v_scales.index(at).load(BY_KEY)
    if EDGE:
        position = n * KEYS + gl.arange(0, KEYS, BY_KEY)
        _, _, exists = find_keys(n, span, BY_KEY, True, C)
        s = gl.where(exists[:, None] & (position[:, None] <= rows.position[None, :]), s, float("-inf"))
        z = s
        too_high = True
    else:
        # In a tile that all rows see, a row without a maximum has scores above it.
        z = relative(s, state.top, rows.left, 1e30, C)
        too_high = above(z, v_scale, state.largest, SCALED, C) > HEADROOM
    low, high = warpgroup_mma_wait(0, deps=(state.low, state.high))
    state = State(low, high, state.total, state.top, state.largest, state.grow)
    if too_high:
        state = raise_top(s, v_scale, state, rows, SCALED, C)
        z = relative(s, state.top, rows.left, 0.0, C)
    p = gl.exp2(z)
    total = state.total + sum_of_threads(p, C)
    tiles.weights.index((n - first) % 2).store((p * (v_scale * state.grow)[:, None]).to(gl.float16))
    fence_async_shared()
    return State(state.low, state.high, total, state.top, state.largest, state.grow)


@gluon.jit
def relative(s, top, left, unseen, C: gl.constexpr):
    """Scores in log2 units above their row's maximum; ``unseen`` above nothing where a row has none yet. ``left`` is a power of two, so
    that a multiply-add is exact but for its own rounding."""
    KEYS: gl.constexpr = C.keys
    ROWS: gl.constexpr = C.rows
    nothing = gl.zeros([KEYS, ROWS], gl.float32, product(ROWS))
    shift = gl.where(top == float("-inf"), unseen, -(top * left))
    return gl.fma(s, nothing + left[None, :], nothing + shift[None, :])


@gluon.jit
def above(z, v_scale, largest, SCALED: gl.constexpr, C: gl.constexpr):
    """The largest of all scores ``z``; or more, if a value's scale is larger than ``largest``."""
    THREADS: gl.constexpr = 128
    # Keys are spread over warps and eighths of them, rows over the quarters of those; first comes what a thread has to itself.
    z = z.reshape([C.keys // 64, 4, 2, 8, C.rows // 8, 4, 2])
    most = gl.max(gl.max(gl.max(gl.max(z, 6), 4), 2), 0)
    if SCALED:
        scale = gl.max(gl.max(v_scale.reshape([C.keys // 64, 4, 2, 8]), 2), 0)
        scale = gl.convert_layout(scale, gl.SliceLayout(2, most.type.layout), assert_trivial=True)
        most = gl.where(scale[:, :, None] > largest, 1e30, most)
    return gl.max(most.reshape([THREADS]), 0)


@gluon.jit
def raise_top(s, v_scale, state, rows, SCALED: gl.constexpr, C: gl.constexpr):
    """The state relative to maxima with these scores and scales among them."""
    top = gl.maximum(state.top, gl.max(s, 0))
    # A row that has seen nothing yet keeps -inf; subtracting 0 instead avoids inf - inf.
    alpha = gl.exp2((state.top - gl.where(top == float("-inf"), 0.0, top)) * rows.left)
    OF_THREADS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, state.total.type.layout))
    total = state.total * gl.convert_layout(alpha, OF_THREADS, assert_trivial=True)[None, None, :]
    largest = state.largest
    if SCALED:
        largest = gl.maximum(largest, gl.max(v_scale, 0))
        alpha = alpha * (state.largest / largest)
    return State(state.low * alpha[None, :], state.high * alpha[None, :], total, top, largest, 256.0 / largest)


@gluon.jit
def sum_of_threads(p, C: gl.constexpr):
    """[KEYS, ROWS] -> [4, 8, ROWS]: every thread's keys."""
    return gl.sum(gl.sum(p.reshape([C.keys // 64, 4, 2, 8, C.rows]), 2), 0)


@gluon.jit
def find_keys(number, span, LAYOUT: gl.constexpr, CHECKED: gl.constexpr, C: gl.constexpr):
    """(block, slot, whether it is there) of a tile's keys, [KEYS]. Unless CHECKED they are all there."""
    position = number * C.keys + gl.arange(0, C.keys, LAYOUT)
    if CHECKED:
        block = gl.load(span.table + position // C.block_size, mask=position < span.stop, other=-1)
        exists = (block >= 0) & (block < span.num_blocks)
        block = gl.where(exists, block, 0)
    else:
        block = gl.load(span.table + position // C.block_size)
        exists = block >= 0
    return block, position % C.block_size, exists


@gluon.jit
def find_tile(number, k, v, span, CHECKED: gl.constexpr, SCALED: gl.constexpr, C: gl.constexpr):
    """Where a tile's codes and scales lie, for :func:`copy_tile`. What it waits for is block ids: there should be time between the two."""
    block, slot, exists = find_keys(number, span, BY_ROW, CHECKED, C)
    if C.wide_planes:
        block = block.to(gl.int64)
        slot = slot.to(gl.int64)
    k_place = (block * (k.block_stride // 8) + slot * (k.slot_stride // 8)) * 8
    v_place = k_place
    if not C.same_strides:
        v_place = (block * (v.block_stride // 8) + slot * (v.slot_stride // 8)) * 8
    k_scale = k_place
    v_scale = v_place
    scaled = exists
    if SCALED:
        block, slot, scaled = find_keys(number, span, VECTOR, CHECKED, C)
        if C.wide_planes:
            block = block.to(gl.int64)
            slot = slot.to(gl.int64)
        k_scale = block * k.scale_block_stride + slot * k.scale_slot_stride
        v_scale = k_scale
        if not C.same_strides:
            v_scale = block * v.scale_block_stride + slot * v.scale_slot_stride
    return Places(k_place, v_place, exists, k_scale, v_scale, scaled)


@gluon.jit
def copy_tile(places, at, k, v, tiles, CHECKED: gl.constexpr, SCALED: gl.constexpr, C: gl.constexpr):
    """Begin to copy a tile's codes and scales to place ``at``: one group of copies, of nothing but zeros beyond the last tile."""
    lane = gl.arange(0, HALF, gl.SliceLayout(0, COPY))[None, :]
    copy(tiles.k.index(at), k.codes + (places.k[:, None] + lane), places.exists[:, None], CHECKED)
    copy(tiles.v.index(at), v.codes + (places.v[:, None] + lane), places.exists[:, None], CHECKED)
    if SCALED:
        copy(tiles.k_scales.index(at), k.scales + places.k_scale, places.scaled, CHECKED)
        copy(tiles.v_scales.index(at), v.scales + places.v_scale, places.scaled, CHECKED)
    async_copy.commit_group()


@gluon.jit
def copy(target, source, exists, CHECKED: gl.constexpr):
    """What does not exist becomes 0, since 0 * NaN is NaN."""
    if CHECKED:
        async_copy.async_copy_global_to_shared(target, source, mask=exists)
    else:
        async_copy.async_copy_global_to_shared(target, source)


@gluon.jit
def rows_of(work, kv_head, LAYOUT: gl.constexpr, C: gl.constexpr):
    """(index in the sequence's query, query head, whether there is such a row) of a tile's rows, [ROWS]."""
    r = gl.arange(0, C.rows, LAYOUT)
    valid = (r // C.group < work.num_rows) & (r < C.tokens * C.group)
    return work.row_start + r // C.group, kv_head * C.group + r % C.group, valid


@gluon.jit
def load_queries(
    queries, tiles, work, kv_head, score_unit, PEAK: gl.constexpr, UNIT: gl.constexpr, OFFSET: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """The query rows as two streams in shared memory, scaled as in kvq_core.kernels.queries.row_factors; their :class:`Rows`."""
    ROWS: gl.constexpr = C.rows
    KEPT: gl.constexpr = gl.SliceLayout(0, product(ROWS))
    index, head, valid = rows_of(work, kv_head, gl.SliceLayout(1, QUERY), C)
    channel = gl.arange(0, C.head_size, gl.SliceLayout(0, QUERY))
    at = (work.first_token + index).to(gl.int64) * queries.token_stride + head_offset(head, queries.head_stride, C)
    x = gl.load(queries.ptr + at[:, None] + channel[None, :], mask=valid[:, None], other=0.0).to(gl.float32)
    if queries.factor is not None:
        x = x * gl.load(queries.factor + kv_head * C.head_size + channel)[None, :]
    peak = gl.maximum(gl.max(gl.abs(x), 1), 2.0**-100)
    top = gl.minimum(gl.maximum(peak * gl.abs(score_unit), 2.0**-100), 2.0**120)
    power = (top.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
    half = (x * (score_unit * (PEAK / power))[:, None]).to(gl.float16)
    total = gl.sum(half.to(gl.float32), 1)
    low, high = gl.split(half.reshape([ROWS, HALF, STREAMS]))
    tiles.query.index(0).store(low)
    tiles.query.index(1).store(high)
    fence_async_shared()
    # Above 0, so that -inf stays what it is.
    left = gl.maximum(gl.convert_layout(power, KEPT) * (1.0 / (PEAK * UNIT)), 2.0**-126)
    index, _, _ = rows_of(work, kv_head, KEPT, C)
    return Rows(left, gl.convert_layout(total, KEPT) * (OFFSET * UNIT), work.context_len + index)


@gluon.jit
def write_share(state, rows, unit, work, kv_head, partials, C: gl.constexpr):
    """A piece's part of its rows' results, as kvq_core.kernels.splits leaves it."""
    ROWS: gl.constexpr = C.rows
    P: gl.constexpr = product(ROWS)
    KEPT: gl.constexpr = gl.SliceLayout(0, P)
    _, _, valid = rows_of(work, kv_head, KEPT, C)
    row = (work.item.to(gl.int64) * gl.num_programs(1) + kv_head) * ROWS + gl.arange(0, ROWS, KEPT)
    at = partials.acc + row[None, :] * partials.row_stride + gl.arange(0, HALF, gl.SliceLayout(1, P))[:, None]
    gl.store(at, state.low * unit, mask=valid[None, :])
    gl.store(at + HALF, state.high * unit, mask=valid[None, :])
    gl.store(partials.max + row, gl.fma(state.top, rows.left, gl.zeros_like(state.top)), mask=valid)
    gl.store(partials.sum + row, gl.convert_layout(gl.sum(gl.sum(state.total, 0), 0), KEPT), mask=valid)
