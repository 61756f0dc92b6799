"""Shares of a row: where programs leave them, and how several become one by the online softmax, in their order, the same every time.

kvq's own workspace has one row per (item, kv head, tile row), an engine's one per (token, query head, segment).
"""

import triton
import triton.language as tl

from kvq_core.kernels.args import SoftmaxState


@triton.jit
def share_row(work, kv_head, token, head, splits, C: tl.constexpr):
    """Where a program's own share lies, [ROWS]."""
    if C.split == "segments":
        row = (token.to(tl.int64) * (tl.num_programs(1) * C.group) + head) * splits.segments + work.unit
    else:
        row = ((work.item.to(tl.int64) * tl.num_programs(1) + kv_head) * C.rows) + tl.arange(0, C.rows)
    return row


@triton.jit
def first_share(r, block, splits, C: tl.constexpr):
    """(token, query head, whether there is such a row, index of its first share, from one share to the next) of rows ``r`` of a block."""
    kv_head, num_kv_heads = tl.program_id(1), tl.num_programs(1)
    index = block.row_start + r // C.group
    token = block.first_token + index
    head = kv_head * C.group + r % C.group
    valid = (index < block.query_len) & (r < C.tokens * C.group)
    if C.split == "segments":
        row = (token.to(tl.int64) * (num_kv_heads * C.group) + head) * splits.segments
        step = 1
    else:
        row = (block.item.to(tl.int64) * num_kv_heads + kv_head) * C.rows + r
        step = num_kv_heads * C.rows
    return token, head, valid, row, step


@triton.jit
def load_shares(at, valid, partials, C: tl.constexpr):
    """The shares ``at`` [ROWS]: their (max, sum) and their accumulators as streams [ROWS, WIDTH]."""
    lane = tl.arange(0, C.value_heads.width)
    state = SoftmaxState(
        tl.load(partials.max + at, mask=valid, other=float("-inf")),
        tl.load(partials.sum + at, mask=valid, other=0.0),
    )
    mask = valid[:, None] & (lane < C.value_heads.lanes)[None, :]
    acc = ()
    for s in tl.static_range(tl.constexpr(C.format.streams)):
        place = at[:, None] * partials.row_stride + lane[None, :] + s * C.value_heads.lanes
        acc = acc + (tl.load(partials.acc + place, mask=mask, other=0.0),)
    return state, acc


@triton.jit
def store_shares(state, acc, at, valid, partials, C: tl.constexpr):
    """What :func:`load_shares` loads."""
    lane = tl.arange(0, C.value_heads.width)
    mask = valid[:, None] & (lane < C.value_heads.lanes)[None, :]
    place = partials.acc + at[:, None] * partials.row_stride + lane[None, :]
    for s in tl.static_range(tl.constexpr(C.format.streams)):
        tl.store(place + s * C.value_heads.lanes, acc[s], mask=mask)
    tl.store(partials.max + at, state.max, mask=valid)
    tl.store(partials.sum + at, state.sum, mask=valid)


@triton.jit
def join_shares(row, step, count, valid, partials, BESIDE: tl.constexpr, C: tl.constexpr):
    """(state, streams) of ``count`` shares of rows [ROWS], from ``row`` on and ``step`` apart.

    Two tiles at a time, each by itself: nothing crosses threads. ``BESIDE`` > 1: the tile holds so many times the same rows, one share
    beside the other, and ends with their sum in each.
    """
    ROWS: tl.constexpr = row.shape[0]
    WIDTH: tl.constexpr = C.value_heads.width
    state = SoftmaxState(tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32))
    acc = ()
    for _ in tl.static_range(tl.constexpr(C.format.streams)):
        acc = acc + (tl.zeros([ROWS, WIDTH], tl.float32),)
    beside = tl.arange(0, ROWS) // (ROWS // BESIDE)
    for base in range(0, count, 2 * BESIDE):
        first = base + beside
        second = first + BESIDE
        one, one_acc = load_shares(row + first * step, valid & (first < count), partials, C)
        two, two_acc = load_shares(row + second * step, valid & (second < count), partials, C)
        top = tl.maximum(state.max, tl.maximum(one.max, two.max))
        safe = tl.where(top == float("-inf"), 0.0, top)
        alpha, one_weight, two_weight = tl.exp2(state.max - safe), tl.exp2(one.max - safe), tl.exp2(two.max - safe)
        joined = ()
        for s in tl.static_range(tl.constexpr(C.format.streams)):
            joined = joined + (acc[s] * alpha[:, None] + one_acc[s] * one_weight[:, None] + two_acc[s] * two_weight[:, None],)
        acc = joined
        state = SoftmaxState(top, state.sum * alpha + one.sum * one_weight + two.sum * two_weight)
    if BESIDE > 1:
        state, acc = fold_shares(state, acc, BESIDE, C)
    return state, acc


@triton.jit
def fold_shares(state, acc, BESIDE: tl.constexpr, C: tl.constexpr):
    """Add up what lies side by side; the sum takes the place of each."""
    ROWS: tl.constexpr = state.max.shape[0]
    WIDTH: tl.constexpr = C.value_heads.width
    top = tl.reshape(state.max, [BESIDE, ROWS // BESIDE])
    largest = tl.max(top, 0)
    weight = tl.exp2(top - tl.where(largest == float("-inf"), 0.0, largest)[None, :])
    total = tl.sum(tl.reshape(state.sum, [BESIDE, ROWS // BESIDE]) * weight, 0)
    folded = ()
    for s in tl.static_range(tl.constexpr(C.format.streams)):
        x = tl.sum(tl.reshape(acc[s], [BESIDE, ROWS // BESIDE, WIDTH]) * weight[:, :, None], 0)
        folded = folded + (tl.reshape(tl.broadcast_to(x[None, :, :], [BESIDE, ROWS // BESIDE, WIDTH]), [ROWS, WIDTH]),)
    shape: tl.constexpr = [BESIDE, ROWS // BESIDE]
    state = SoftmaxState(
        tl.reshape(tl.broadcast_to(largest[None, :], shape), [ROWS]), tl.reshape(tl.broadcast_to(total[None, :], shape), [ROWS])
    )
    return state, folded
