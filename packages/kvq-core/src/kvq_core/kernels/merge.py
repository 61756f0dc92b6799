"""The merge of split keys: a row's pieces, combined by the online softmax in their order, so that the result is the same every time.

Nearly all of its time is latency: of a launch, of loads that wait for each other, of barriers. So what is loaded is loaded at once, and
programs are small, so that many are resident.

Scalar conditions join masks by ``tl.where``: of ``mask & scalar`` the interpreter of Triton 3.9 makes integers, which are no masks.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from kvq_core.kernels.args import RowBlock, SoftmaxState
from kvq_core.kernels.queries import store_channels, store_rows
from kvq_core.kernels.rotation import unrotate_row
from kvq_core.kernels.shares import only_units, share_size
from kvq_core.kernels.softmax import add_sink, reciprocal_sum, store_lse


@triton.jit(do_not_specialize=["num_row_blocks", "num_programs"])
def merge_kernel(
    output, output_scale, batch, scoring, splits, partials, num_row_blocks, num_programs, TILE: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Combine the shares that ``num_programs`` programs a kv head have left of every row block. Grid (eight rows of each row block, then a
    slice of a row of every TILE.blocks row blocks; kv heads).

    Few pieces: eight rows at a time, which share an un-rotation. Many: a row at a time, TILE.pieces of them loaded together. Which of the
    two a row block needs is known on the device alone, and the programs of the other end at once: so one of the second kind looks at
    several row blocks. A row block on its own has programs of the second kind alone.
    """
    if C.alone:
        merge_alone(output, output_scale, batch, scoring, splits, partials, num_programs, TILE, C)
    else:
        merge_all(output, output_scale, batch, scoring, splits, partials, num_row_blocks, TILE, C)


@triton.jit
def merge_alone(output, output_scale, batch, scoring, splits, partials, num_programs, TILE: tl.constexpr, C: tl.constexpr):
    """The merge of a row block on its own. How many pieces it has follows from its length, so that nothing need be loaded for it."""
    place = tl.program_id(0)
    total = only_units(batch, scoring, splits, C)
    num_pieces = tl.cdiv(total, share_size(total, num_programs, splits, C))
    first_token = tl.load(batch.cu_seqlens_q)
    query_len = tl.load(batch.cu_seqlens_q + 1) - first_token
    if C.overlap != "":
        # What comes next is the work of the launch before.
        gdc_wait()
    if num_pieces > 1:
        zero = place * 0  # as the kernels' values are: a plain 0 has no width to be widened from
        block = RowBlock(first_token, zero, query_len, num_pieces, zero)
        merge_row(place // TILE.slices, place % TILE.slices, block, output, output_scale, scoring, splits, partials, TILE, C)


@triton.jit
def merge_all(output, output_scale, batch, scoring, splits, partials, num_row_blocks, TILE: tl.constexpr, C: tl.constexpr):
    """The merge of any number of row blocks."""
    TILES: tl.constexpr = C.rows // 8
    ROWS: tl.constexpr = C.tokens * C.group
    place = tl.program_id(0)
    if place < num_row_blocks * TILES:
        block = row_block(place // TILES, num_row_blocks, batch, partials, C)
        if (block.num_pieces >= C.least_pieces) & (block.num_pieces <= TILE.few):
            merge_rows(place % TILES * 8 + tl.arange(0, 8), block, output, output_scale, scoring, splits, partials, C)
    else:
        place -= num_row_blocks * TILES
        part = place % TILE.slices
        place = place // TILE.slices
        numbers = place // ROWS * TILE.blocks + tl.arange(0, TILE.blocks)
        many = row_block(numbers, num_row_blocks, batch, partials, C).num_pieces > TILE.few
        # From the first of them to the last: mostly there is one, or none.
        for number in range(tl.min(tl.where(many, numbers, num_row_blocks), 0), tl.max(tl.where(many, numbers + 1, 0), 0)):
            block = row_block(number, num_row_blocks, batch, partials, C)
            if block.num_pieces > TILE.few:
                merge_row(place % ROWS, part, block, output, output_scale, scoring, splits, partials, TILE, C)


@triton.jit
def row_block(number, num_row_blocks, batch, partials, C: tl.constexpr):
    """Facts of row blocks (scalar or vector); no piece where there is nothing to merge."""
    exists = number < num_row_blocks
    seq = number // C.max_row_blocks
    row_start = number % C.max_row_blocks * C.tokens
    first_token = tl.load(batch.cu_seqlens_q + seq, mask=exists, other=0)
    query_len = tl.load(batch.cu_seqlens_q + seq + 1, mask=exists, other=0) - first_token
    served = exists & (query_len >= C.min_query_len) & (query_len <= C.max_query_len) & (row_start < query_len)
    if C.overlap != "":
        # What comes next is the work of the launch before.
        gdc_wait()
    num_pieces = tl.load(partials.plan + number * 2, mask=served, other=0)
    item = tl.load(partials.plan + number * 2 + 1, mask=served, other=0)
    return RowBlock(first_token, row_start, query_len, num_pieces, item)


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
def merge_rows(r, block, output, output_scale, scoring, splits, partials, C: tl.constexpr):
    """Write the results of rows ``r`` [ROWS] of a block, two pieces at a time, each a tile of its own: nothing crosses threads."""
    ROWS: tl.constexpr = r.shape[0]
    WIDTH: tl.constexpr = C.value_heads.width
    token, head, valid, row, step = first_share(r, block, splits, C)
    state = SoftmaxState(tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32))
    acc = ()
    for _ in tl.static_range(tl.constexpr(C.format.value.streams)):
        acc = acc + (tl.zeros([ROWS, WIDTH], tl.float32),)
    for piece in range(0, block.num_pieces, 2):
        one, one_acc = load_shares(row + piece * step, valid, partials, C)
        two, two_acc = load_shares(row + (piece + 1) * step, tl.where(piece + 1 < block.num_pieces, valid, False), partials, C)
        top = tl.maximum(state.max, tl.maximum(one.max, two.max))
        safe = tl.where(top == float("-inf"), 0.0, top)
        alpha, one_weight, two_weight = tl.exp2(state.max - safe), tl.exp2(one.max - safe), tl.exp2(two.max - safe)
        joined = ()
        for s in tl.static_range(tl.constexpr(C.format.value.streams)):
            joined = joined + (acc[s] * alpha[:, None] + one_acc[s] * one_weight[:, None] + two_acc[s] * two_weight[:, None],)
        acc = joined
        state = SoftmaxState(top, state.sum * alpha + one.sum * one_weight + two.sum * two_weight)
    state, factor = add_sink(state, head, valid, scoring)
    store_lse(state, token, head, valid, output, C)
    scale = factor * reciprocal_sum(state.sum)
    result = ()
    for s in tl.static_range(tl.constexpr(C.format.value.streams)):
        result = result + (acc[s] * scale[:, None],)
    store_rows(result, output, output_scale, token, head, valid, ROWS, C, MIXED=C.mixed)


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
    for s in tl.static_range(tl.constexpr(C.format.value.streams)):
        place = at[:, None] * partials.row_stride + lane[None, :] + s * C.value_heads.lanes
        acc = acc + (tl.load(partials.acc + place, mask=mask, other=0.0),)
    return state, acc


@triton.jit
def merge_row(r, part, block, output, output_scale, scoring, splits, partials, TILE: tl.constexpr, C: tl.constexpr):
    """Write a slice of the result of row ``r`` (scalar) of a block, whose pieces its threads share, TILE.pieces at once.

    Slice ``part`` of TILE.slices has some of a row's streams, which nothing mixes any more, or of its lanes, where nothing ever does.
    Every TILE.pieces-th piece is summed on its own, and these sums in the end: nothing crosses threads within the loop.
    """
    HEADS: tl.constexpr = C.value_heads
    SIGNS: tl.constexpr = C.format.value.signs
    STREAMS: tl.constexpr = HEADS.streams // (TILE.slices if C.format.value.rotated else 1)
    WIDTH: tl.constexpr = HEADS.width // (1 if C.format.value.rotated else TILE.slices)
    PIECES: tl.constexpr = TILE.pieces
    token, head, valid, row, step = first_share(r, block, splits, C)
    lane = tl.arange(0, WIDTH)[None, :]
    stream = tl.arange(0, STREAMS)[:, None]
    if C.format.value.rotated:
        stream += part * STREAMS
    else:
        lane += part * WIDTH
    channel = lane * HEADS.streams + stream
    inside = lane < HEADS.lanes
    place = stream * HEADS.lanes + lane
    top = tl.full([PIECES], float("-inf"), tl.float32)
    total = tl.zeros([PIECES], tl.float32)
    acc = tl.zeros([PIECES, STREAMS, WIDTH], tl.float32)
    for base in range(0, tl.where(valid, block.num_pieces, 0), PIECES):
        pieces = base + tl.arange(0, PIECES)
        exists = pieces < block.num_pieces
        at = row + pieces.to(tl.int64) * step
        part_max = tl.load(partials.max + at, mask=exists, other=float("-inf"))
        part_sum = tl.load(partials.sum + at, mask=exists, other=0.0)
        mask = exists[:, None, None] & inside[None, :, :]
        parts = tl.load(partials.acc + (at * partials.row_stride)[:, None, None] + place[None, :, :], mask=mask, other=0.0)
        grown = tl.maximum(top, part_max)
        safe = tl.where(grown == float("-inf"), 0.0, grown)
        alpha, weight = tl.exp2(top - safe), tl.exp2(part_max - safe)
        top = grown
        total = total * alpha + part_sum * weight
        acc = acc * alpha[:, None, None] + parts * weight[:, None, None]
    largest = tl.max(top, 0)
    weight = tl.exp2(top - tl.where(largest == float("-inf"), 0.0, largest))
    state, factor = add_sink(SoftmaxState(largest, tl.sum(total * weight, 0)), head, valid, scoring)
    store_lse(state, token, head, tl.where(part == 0, valid, False), output, C)
    x = tl.sum(acc * weight[:, None, None], 0) * (factor * reciprocal_sum(state.sum))
    if C.format.value.rotated:
        x = unrotate_row(x, channel, HEADS, SIGNS, C.mixed)
    store_channels(x, channel, tl.where(valid, inside, False), output, output_scale, token, head, C)
