"""Split keys: where a program leaves its share of a row, and the kernel that merges the shares.

kvq's own workspace has one row per (item, kv head, tile row), an engine's one per (token, query head, segment). The program that takes
a row block's first piece notes how many there are and where they start; the merge combines them in order, so that the result is the
same every time.
"""

import triton
import triton.language as tl

from kvq_core.kernels.args import SoftmaxState
from kvq_core.kernels.queries import store_rows
from kvq_core.kernels.softmax import add_sink, reciprocal_sum


@triton.jit
def finish(acc, state, output, output_scale, rows, work, kv_head, partials, splits, scoring, C: tl.constexpr):
    """End of a piece: the result itself if the whole row is here, else this piece's share of it."""
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
    for s in tl.static_range(tl.constexpr(C.streams)):
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
    for s in tl.static_range(tl.constexpr(C.streams)):
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


@triton.jit(do_not_specialize=["num_kv_heads"])
def merge_kernel(
    output, output_scale, batch, scoring, splits, partials, num_kv_heads, ROWS: tl.constexpr, PIECES: tl.constexpr, C: tl.constexpr
):
    """Combine the shares of ROWS rows of a tile, PIECES at a time. Grid (num_seqs * row blocks * tiles of ROWS, num_kv_heads)."""
    TILES: tl.constexpr = C.rows // ROWS
    block = tl.program_id(0) // TILES
    kv_head = tl.program_id(1)
    seq = block // C.max_row_blocks
    row_start = block % C.max_row_blocks * C.tokens
    r = tl.program_id(0) % TILES * ROWS + tl.arange(0, ROWS)
    first_token = tl.load(batch.cu_seqlens_q + seq)
    query_len = tl.load(batch.cu_seqlens_q + seq + 1) - first_token
    served = (query_len >= C.min_query_len) & (query_len <= C.max_query_len) & (row_start < query_len)
    count = tl.load(partials.plan + block * 2, mask=served, other=1)
    if count > 1:
        token = first_token + row_start + r // C.group
        head = kv_head * C.group + r % C.group
        valid = (row_start + r // C.group < query_len) & (r < C.tokens * C.group)
        if C.split == "segments":
            row = (token.to(tl.int64) * (num_kv_heads * C.group) + head) * splits.segments
            step = 1
        else:
            item = tl.load(partials.plan + block * 2 + 1).to(tl.int64)
            row = (item * num_kv_heads + kv_head) * C.rows + r
            step = num_kv_heads * C.rows
        merge_rows(output, output_scale, scoring, partials, row, step, count, token, head, valid, ROWS, PIECES, C)


@triton.jit
def merge_rows(
    output, output_scale, scoring, partials, row, step, count, token, head, valid, ROWS: tl.constexpr, PIECES: tl.constexpr, C: tl.constexpr
):
    WIDTH: tl.constexpr = C.value_heads.width
    LANES: tl.constexpr = C.value_heads.lanes
    lane = tl.arange(0, WIDTH)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = ()
    for _ in tl.static_range(tl.constexpr(C.streams)):
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
        for s in tl.static_range(tl.constexpr(C.streams)):
            part = tl.load(partials.acc + at[:, :, None] * partials.row_stride + lane[None, None, :] + s * LANES, mask=mask, other=0.0)
            merged = merged + (acc[s] * alpha[:, None] + tl.sum(part * weight[:, :, None], 0),)
        acc = merged
    state, factor = add_sink(SoftmaxState(top, total), head, valid, scoring)
    scale = factor * reciprocal_sum(state.sum)
    result = ()
    for s in tl.static_range(tl.constexpr(C.streams)):
        result = result + (acc[s] * scale[:, None],)
    if ROWS < 8:
        # The un-rotation is a matrix product, whose tiles have at least 8 rows.
        eight = ()
        for s in tl.static_range(tl.constexpr(C.streams)):
            eight = eight + (tl.reshape(tl.broadcast_to(result[s][None, :, :], [8 // ROWS, ROWS, WIDTH]), [8, WIDTH]),)
        r = tl.arange(0, 8)
        token, head, valid = repeat_rows(token, ROWS), repeat_rows(head, ROWS), repeat_rows(valid, ROWS) & (r < ROWS)
        store_rows(eight, output, output_scale, token, head, valid, 8, C)
    else:
        store_rows(result, output, output_scale, token, head, valid, ROWS, C)


@triton.jit
def repeat_rows(x, ROWS: tl.constexpr):
    """A [ROWS] vector over and over, [8]."""
    return tl.reshape(tl.broadcast_to(x[None, :], [8 // ROWS, ROWS]), [8])
