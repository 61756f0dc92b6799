"""Split keys: where a program leaves its share of a row, and the kernel that merges the shares.

kvq's own workspace has one row per (item, kv head, tile row), an engine's one per (token, query head, segment); the merge finds a
row's chunks by the same sums the attention kernel used, and combines them in order, so that the result is the same every time.
"""

import triton
import triton.language as tl

from kvq_core.kernels.args import SoftmaxState
from kvq_core.kernels.queries import store_rows
from kvq_core.kernels.softmax import add_sink, reciprocal_sum
from kvq_core.kernels.tiles import SCAN, chunk_length, chunks_of, sequence_facts


@triton.jit
def finish(acc, state, output, output_scale, rows, work, item, kv_head, partials, splits, scoring, C: tl.constexpr):
    """End of an attention program: the result itself if the whole row is here, else this chunk's share of it."""
    if partials is None:
        write_result(acc, state, output, output_scale, rows, scoring, C)
    elif work.num_chunks == 1:
        write_result(acc, state, output, output_scale, rows, scoring, C)
    else:
        row = partial_row(item, kv_head, tl.arange(0, C.rows), rows.token, rows.head, work.chunk, splits, C)
        lane = tl.arange(0, C.value.width)
        mask = rows.valid[:, None] & (lane < C.value.lanes)[None, :]
        at = partials.acc + row[:, None] * partials.row_stride + lane[None, :]
        for s in tl.static_range(C.streams):
            tl.store(at + s * C.value.lanes, acc[s], mask=mask)
        tl.store(partials.max + row, state.max, mask=rows.valid)
        tl.store(partials.sum + row, state.sum, mask=rows.valid)


@triton.jit
def write_result(acc, state, output, output_scale, rows, scoring, C: tl.constexpr):
    state, factor = add_sink(state, rows.head, rows.valid, scoring)
    share = factor * reciprocal_sum(state.sum)
    result = ()
    for s in tl.static_range(C.streams):
        result = result + (acc[s] * share[:, None],)
    store_rows(result, output, output_scale, rows.token, rows.head, rows.valid, C.rows, C)


@triton.jit
def partial_row(item, kv_head, r, token, head, chunk, splits, C: tl.constexpr):
    """Index of a share in the workspace."""
    if splits.segments is None:
        row = ((item.to(tl.int64) * tl.num_programs(1) + kv_head) * C.rows) + r
    else:
        row = (token.to(tl.int64) * (tl.num_programs(1) * C.group) + head) * splits.segments + chunk
    return row


@triton.jit(do_not_specialize=["num_seqs", "num_kv_heads"])
def merge_kernel(output, output_scale, batch, scoring, splits, partials, num_seqs, num_kv_heads, QUERY_LENS: tl.constexpr, CHUNKS: tl.constexpr, C: tl.constexpr):
    """Combine one query row's shares. Grid (num_seqs * QUERY_LENS, num_query_heads)."""
    seq = tl.program_id(0) // QUERY_LENS
    index = tl.program_id(0) % QUERY_LENS
    head = tl.program_id(1)
    chunk = 0
    before = 0
    if splits.segments is None:
        chunk = chunk_length(num_seqs, batch, scoring, splits, C)
        items = tl.zeros([SCAN], tl.int32)
        for base in range(0, seq, SCAN):
            seqs = base + tl.arange(0, SCAN)
            row_blocks, keys = sequence_facts(seqs, seq, batch, scoring, C)
            count, _ = chunks_of(keys, chunk, splits, C)
            items += row_blocks * count
        before = tl.sum(items)
    row_blocks, keys = sequence_facts(seq, num_seqs, batch, scoring, C)
    count, _ = chunks_of(keys, chunk, splits, C)
    first_token = tl.load(batch.cu_seqlens_q + seq)
    query_len = tl.load(batch.cu_seqlens_q + seq + 1) - first_token
    if (row_blocks > 0) & (index < query_len) & (count > 1):
        token = first_token + index
        kv_head = head // C.group
        if splits.segments is None:
            # find_work numbers row blocks backwards.
            item = before + (row_blocks - 1 - index // C.tokens) * count
            row = ((item.to(tl.int64) * num_kv_heads + kv_head) * C.rows) + (index % C.tokens) * C.group + head % C.group
            step = num_kv_heads * C.rows
        else:
            row = (token.to(tl.int64) * (num_kv_heads * C.group) + head) * splits.segments
            step = 1
        merge_row(output, output_scale, scoring, partials, row, step, count, token, head, CHUNKS, C)


@triton.jit
def merge_row(output, output_scale, scoring, partials, row, step, count, token, head, CHUNKS: tl.constexpr, C: tl.constexpr):
    lane = tl.arange(0, C.value.width)
    top = tl.full([1], float("-inf"), tl.float32)
    for base in range(0, count, CHUNKS):
        chunks = base + tl.arange(0, CHUNKS)
        shares = tl.load(partials.max + row + chunks.to(tl.int64) * step, mask=chunks < count, other=float("-inf"))
        top = tl.maximum(top, tl.max(shares))
    safe = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([1], tl.float32)
    acc = ()
    for _ in tl.static_range(C.streams):
        acc = acc + (tl.zeros([1, C.value.width], tl.float32),)
    for base in range(0, count, CHUNKS):
        chunks = base + tl.arange(0, CHUNKS)
        inside = chunks < count
        at = row + chunks.to(tl.int64) * step
        weight = tl.exp2(tl.load(partials.max + at, mask=inside, other=float("-inf")) - safe)
        total += tl.sum(weight * tl.load(partials.sum + at, mask=inside, other=0.0))
        mask = inside[:, None] & (lane < C.value.lanes)[None, :]
        grown = ()
        for s in tl.static_range(C.streams):
            part = tl.load(partials.acc + at[:, None] * partials.row_stride + lane[None, :] + s * C.value.lanes, mask=mask, other=0.0)
            grown = grown + (acc[s] + tl.sum(part * weight[:, None], 0)[None, :],)
        acc = grown
    state, factor = add_sink(SoftmaxState(top, total), tl.full([1], 0, tl.int32) + head, top == top, scoring)
    share = factor * reciprocal_sum(state.sum)
    result = ()
    for s in tl.static_range(C.streams):
        result = result + (tl.broadcast_to(acc[s] * share[:, None], [8, C.value.width]),)
    r = tl.arange(0, 8)
    store_rows(result, output, output_scale, token + r * 0, head + r * 0, r == 0, 8, C)
