"""Split keys: where a program leaves its share of a row, and the kernel that merges the shares.

kvq's own workspace has one row per (item, kv head, tile row), an engine's one per (token, query head, segment). The program that takes
a row block's first chunk notes how many there are and where they start; the merge combines them in order, so that the result is the
same every time.
"""

import triton
import triton.language as tl

from kvq_core.kernels.args import SoftmaxState
from kvq_core.kernels.queries import store_rows
from kvq_core.kernels.softmax import add_sink, reciprocal_sum


@triton.jit
def finish(acc, state, output, output_scale, rows, work, item, kv_head, partials, splits, scoring, C: tl.constexpr):
    """End of an attention program: the result itself if the whole row is here, else this chunk's share of it."""
    if C.split == "":
        write_result(acc, state, output, output_scale, rows, scoring, C)
    elif work.num_chunks == 1:
        note_plan(work, item, kv_head, partials, C)
        write_result(acc, state, output, output_scale, rows, scoring, C)
    else:
        note_plan(work, item, kv_head, partials, C)
        row = partial_row(item, kv_head, tl.arange(0, C.rows), rows.token, rows.head, work.chunk, splits, C)
        lane = tl.arange(0, C.value_heads.width)
        mask = rows.valid[:, None] & (lane < C.value_heads.lanes)[None, :]
        at = partials.acc + row[:, None] * partials.row_stride + lane[None, :]
        for s in tl.static_range(tl.constexpr(C.streams)):
            tl.store(at + s * C.value_heads.lanes, acc[s], mask=mask)
        tl.store(partials.max + row, state.max, mask=rows.valid)
        tl.store(partials.sum + row, state.sum, mask=rows.valid)


@triton.jit
def note_plan(work, item, kv_head, partials, C: tl.constexpr):
    """Tell the merge how many chunks the row block has, and the item of the first."""
    first = (work.chunk == 0) & (kv_head == 0)
    note = partials.plan + (work.seq * C.max_row_blocks + work.row_start // C.tokens) * 2
    tl.store(note, work.num_chunks, mask=first)
    tl.store(note + 1, item, mask=first)


@triton.jit
def write_result(acc, state, output, output_scale, rows, scoring, C: tl.constexpr):
    state, factor = add_sink(state, rows.head, rows.valid, scoring)
    share = factor * reciprocal_sum(state.sum)
    result = ()
    for s in tl.static_range(tl.constexpr(C.streams)):
        result = result + (acc[s] * share[:, None],)
    store_rows(result, output, output_scale, rows.token, rows.head, rows.valid, C.rows, C)


@triton.jit
def partial_row(item, kv_head, r, token, head, chunk, splits, C: tl.constexpr):
    """Index of a share in the workspace."""
    if C.split == "chunks":
        row = ((item.to(tl.int64) * tl.num_programs(1) + kv_head) * C.rows) + r
    else:
        row = (token.to(tl.int64) * (tl.num_programs(1) * C.group) + head) * splits.segments + chunk
    return row


@triton.jit(do_not_specialize=["num_kv_heads"])
def merge_kernel(output, output_scale, batch, scoring, splits, partials, num_kv_heads, CHUNKS: tl.constexpr, C: tl.constexpr):
    """Combine one query row's shares. Grid (num_seqs * row blocks * tokens of a tile, num_query_heads)."""
    block = tl.program_id(0) // C.tokens
    head = tl.program_id(1)
    seq = block // C.max_row_blocks
    index = tl.program_id(0) % C.tokens + block % C.max_row_blocks * C.tokens
    first_token = tl.load(batch.cu_seqlens_q + seq)
    query_len = tl.load(batch.cu_seqlens_q + seq + 1) - first_token
    served = (query_len >= C.min_query_len) & (query_len <= C.max_query_len) & (index < query_len)
    count = tl.load(partials.plan + block * 2, mask=served, other=1)
    if count > 1:
        token = first_token + index
        if C.split == "chunks":
            item = tl.load(partials.plan + block * 2 + 1).to(tl.int64)
            row = (item * num_kv_heads + head // C.group) * C.rows + (index % C.tokens) * C.group + head % C.group
            step = num_kv_heads * C.rows
        else:
            row = (token.to(tl.int64) * (num_kv_heads * C.group) + head) * splits.segments
            step = 1
        merge_row(output, output_scale, scoring, partials, row, step, count, token, head, CHUNKS, C)


@triton.jit
def merge_row(output, output_scale, scoring, partials, row, step, count, token, head, CHUNKS: tl.constexpr, C: tl.constexpr):
    WIDTH: tl.constexpr = C.value_heads.width
    LANES: tl.constexpr = C.value_heads.lanes
    lane = tl.arange(0, WIDTH)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = ()
    for _ in tl.static_range(tl.constexpr(C.streams)):
        acc = acc + (tl.zeros([1, WIDTH], tl.float32),)
    for base in range(0, count, CHUNKS):
        chunks = base + tl.arange(0, CHUNKS)
        inside = chunks < count
        at = row + chunks.to(tl.int64) * step
        share = tl.load(partials.max + at, mask=inside, other=float("-inf"))
        part_sum = tl.load(partials.sum + at, mask=inside, other=0.0)
        grown = tl.maximum(top, tl.max(share, 0))
        safe = tl.where(grown == float("-inf"), 0.0, grown)
        weight = tl.exp2(share - safe)
        alpha = tl.exp2(top - safe)
        top = grown
        total = total * alpha + tl.sum(weight * part_sum, 0)
        mask = inside[:, None] & (lane < LANES)[None, :]
        merged = ()
        for s in tl.static_range(tl.constexpr(C.streams)):
            part = tl.load(partials.acc + at[:, None] * partials.row_stride + lane[None, :] + s * LANES, mask=mask, other=0.0)
            merged = merged + (acc[s] * alpha[:, None] + tl.sum(part * weight[:, None], 0)[None, :],)
        acc = merged
    state, factor = add_sink(SoftmaxState(top, total), tl.full([1], 0, tl.int32) + head, top == top, scoring)
    scale = factor * reciprocal_sum(state.sum)
    result = ()
    for s in tl.static_range(tl.constexpr(C.streams)):
        # The un-rotation is a matrix product, whose tiles have at least 8 rows.
        result = result + (tl.broadcast_to(acc[s] * scale[:, None], [8, WIDTH]),)
    r = tl.arange(0, 8)
    store_rows(result, output, output_scale, token + r * 0, head + r * 0, r == 0, 8, C)
