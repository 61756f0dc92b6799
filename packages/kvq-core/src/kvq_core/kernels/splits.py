"""Split keys: where a program leaves its share of a row, and the kernel that merges the shares.

kvq's own workspace has one row per (item, kv head, tile row), an engine's one per (token, query head, segment). The program that takes
a row block's first piece notes how many there are and where they start; the merge combines them in order, so that the result is the
same every time.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvq_core.kernels.args import LOG2E, RowBlock, SoftmaxState
from kvq_core.kernels.queries import store_rows
from kvq_core.kernels.softmax import add_sink, reciprocal_sum


@triton.jit
def finish(acc, state, output, output_scale, rows, work, kv_head, partials, splits, scoring, C: tl.constexpr):
    """End of a piece: the result itself if the whole row is here, else this piece's share of it."""
    if C.overlap:
        # The merge may be put in place; it waits for this launch's end before it reads.
        gdc_launch_dependents()
    if C.shifted and scoring.softcap is None:
        # Scores were all short of it, which the softmax does not see, but a sink does. A softcap has had it.
        state = SoftmaxState(state.max + rows.shift * LOG2E, state.sum)
    if C.split == "":
        write_result(acc, state, output, output_scale, rows, scoring, C)
    else:
        note_plan(work, kv_head, partials, C)
        if work.num_pieces == 1:
            write_result(acc, state, output, output_scale, rows, scoring, C)
        else:
            write_share(acc, state, rows, work, kv_head, partials, splits, C)


@triton.jit
def write_share(acc, state, rows, work, kv_head, partials, splits, C: tl.constexpr):
    row = partial_row(work, kv_head, tl.arange(0, C.rows), rows.token, rows.head, splits, C)
    lane = tl.arange(0, C.value_heads.width)
    mask = rows.valid[:, None] & (lane < C.value_heads.lanes)[None, :]
    at = partials.acc + row[:, None] * partials.row_stride + lane[None, :]
    for s in tl.static_range(tl.constexpr(C.format.streams)):
        tl.store(at + s * C.value_heads.lanes, acc[s], mask=mask)
    tl.store(partials.max + row, state.max, mask=rows.valid)
    tl.store(partials.sum + row, state.sum, mask=rows.valid)


@triton.jit
def note_plan(work, kv_head, partials, C: tl.constexpr):
    """Tell the merge how many pieces the row block has, and the item of the first."""
    first = (work.unit == 0) & (kv_head == 0)
    note = partials.plan + (work.seq * C.max_row_blocks + work.row_start // C.tokens) * 2
    tl.store(note, work.num_pieces, mask=first)
    tl.store(note + 1, work.item, mask=first)


@triton.jit
def write_result(acc, state, output, output_scale, rows, scoring, C: tl.constexpr):
    state, factor = add_sink(state, rows.head, rows.valid, scoring)
    share = factor * reciprocal_sum(state.sum)
    result = ()
    for s in tl.static_range(tl.constexpr(C.format.streams)):
        result = result + (acc[s] * share[:, None],)
    store_rows(result, output, output_scale, rows.token, rows.head, rows.valid, C.rows, C)


@triton.jit
def partial_row(work, kv_head, r, token, head, splits, C: tl.constexpr):
    """Index of a share in the workspace."""
    if C.split == "segments":
        row = (token.to(tl.int64) * (tl.num_programs(1) * C.group) + head) * splits.segments + work.unit
    else:
        row = ((work.item.to(tl.int64) * tl.num_programs(1) + kv_head) * C.rows) + r
    return row


@triton.jit
def merge_kernel(output, output_scale, batch, scoring, splits, partials, TILE: tl.constexpr, C: tl.constexpr):
    """Combine the shares of a row block. Grid (row blocks, kv heads, tiles of eight rows + rows).

    Few pieces: eight rows at a time, which share an un-rotation. Many: a program a row, TILE.pieces of them loaded together. Which of the
    two a row block needs is known on the device alone; the programs of the other end at once. Without TILE.spread the second kind is left
    out of the grid, and the first loops over its rows.
    """
    if C.overlap:
        gdc_wait()
    TILES: tl.constexpr = C.rows // 8
    number = tl.program_id(0)
    place = tl.program_id(2)
    seq = number // C.max_row_blocks
    row_start = number % C.max_row_blocks * C.tokens
    query_len = tl.load(batch.cu_seqlens_q + seq + 1) - tl.load(batch.cu_seqlens_q + seq)
    served = (query_len >= C.min_query_len) & (query_len <= C.max_query_len) & (row_start < query_len)
    num_pieces = tl.load(partials.plan + number * 2, mask=served, other=1)
    block = RowBlock(number, seq, row_start, query_len, num_pieces)
    if (num_pieces > 1) & (num_pieces <= TILE.few):
        if place < TILES:
            merge_rows(place * 8 + tl.arange(0, 8), block, output, output_scale, batch, scoring, splits, partials, 8, 2, C)
    elif num_pieces > TILE.few:
        first = place - TILES
        last = place - TILES + 1
        if not TILE.spread:
            first = place * 8
            last = tl.minimum(first + 8, C.tokens * C.group)
        for row in range(tl.maximum(first, 0), last):
            merge_rows(row + tl.arange(0, 1), block, output, output_scale, batch, scoring, splits, partials, 1, TILE.pieces, C)


@triton.jit
def merge_rows(r, block, output, output_scale, batch, scoring, splits, partials, ROWS: tl.constexpr, PIECES: tl.constexpr, C: tl.constexpr):
    """The online softmax over pieces instead of keys, PIECES at a time, for rows ``r`` of a block."""
    WIDTH: tl.constexpr = C.value_heads.width
    LANES: tl.constexpr = C.value_heads.lanes
    kv_head, num_kv_heads = tl.program_id(1), tl.num_programs(1)
    count = block.num_pieces
    index = block.row_start + r // C.group
    token = tl.load(batch.cu_seqlens_q + block.seq) + index
    head = kv_head * C.group + r % C.group
    valid = (index < block.query_len) & (r < C.tokens * C.group)
    if C.split == "segments":
        row = (token.to(tl.int64) * (num_kv_heads * C.group) + head) * splits.segments
        step = 1
    else:
        item = tl.load(partials.plan + block.block * 2 + 1).to(tl.int64)
        row = (item * num_kv_heads + kv_head) * C.rows + r
        step = num_kv_heads * C.rows
    lane = tl.arange(0, WIDTH)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = ()
    for _ in tl.static_range(tl.constexpr(C.format.streams)):
        acc = acc + (tl.zeros([ROWS, WIDTH], tl.float32),)
    for base in range(0, count, PIECES):
        pieces = base + tl.arange(0, PIECES)
        inside = (pieces < count)[:, None] & valid[None, :]
        at = row[None, :] + pieces.to(tl.int64)[:, None] * step
        share = tl.load(partials.max + at, mask=inside, other=float("-inf"))
        part_sum = tl.load(partials.sum + at, mask=inside, other=0.0)
        grown = tl.maximum(top, tl.max(share, 0))
        safe = tl.where(grown == float("-inf"), 0.0, grown)
        weight = tl.exp2(share - safe[None, :])
        alpha = tl.exp2(top - safe)
        top = grown
        total = total * alpha + tl.sum(weight * part_sum, 0)
        mask = inside[:, :, None] & (lane < LANES)[None, None, :]
        merged = ()
        for s in tl.static_range(tl.constexpr(C.format.streams)):
            part = tl.load(partials.acc + at[:, :, None] * partials.row_stride + lane[None, None, :] + s * LANES, mask=mask, other=0.0)
            merged = merged + (acc[s] * alpha[:, None] + tl.sum(part * weight[:, :, None], 0),)
        acc = merged
    state, factor = add_sink(SoftmaxState(top, total), head, valid, scoring)
    scale = factor * reciprocal_sum(state.sum)
    result = ()
    for s in tl.static_range(tl.constexpr(C.format.streams)):
        result = result + (acc[s] * scale[:, None],)
    store_rows(result, output, output_scale, token, head, valid, ROWS, C)
