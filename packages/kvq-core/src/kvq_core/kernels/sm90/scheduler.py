"""From a program's number to a sequence, its query rows and its keys: a whole row block of many rows, a range of the keys of a few.

Ranges are those of the Triton kernels (:mod:`kvq_core.kernels.scheduler`), but for the scan over sequences, which makes tensors.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvq_core.kernels.scheduler import before_stop, equal_range, sequence_facts, units_in, units_of, work_tile_at
from kvq_core.kernels.sm90.layouts import VECTOR

SCAN = gl.constexpr(128)  # sequences looked at together
BLOCKS = gl.constexpr(1024)  # block ids looked at together


@gluon.jit
def find_work(program, num_seqs, table_width, batch, STAGED: gl.constexpr, C: gl.constexpr):
    """(whether there is any, sequence, first row, rows, first token, tokens before the query, keys that its last row sees).

    Where some sequences' keys are staged, of these alone if STAGED, else of the others."""
    seq = 0
    before = 0
    running = 0
    if num_seqs == 1:
        query_len = gl.load(batch.cu_seqlens_q + 1) - gl.load(batch.cu_seqlens_q)
        running = row_blocks_of(query_len, 0, 0 == 0, batch, STAGED, C)
    else:
        for base in range(0, num_seqs, SCAN):
            seqs = base + gl.arange(0, SCAN, VECTOR)
            inside = seqs < num_seqs
            first = gl.load(batch.cu_seqlens_q + seqs, mask=inside, other=0)
            query_len = gl.load(batch.cu_seqlens_q + seqs + 1, mask=inside, other=0) - first
            ends = running + gl.associative_scan(gl.where(inside, row_blocks_of(query_len, seqs, inside, batch, STAGED, C), 0), 0, plus)
            passed = (ends <= program) & inside
            seq += gl.sum(passed.to(gl.int32), 0)
            before = gl.maximum(before, gl.max(gl.where(passed, ends, 0), 0))
            running = gl.max(ends, 0)
    found = program < running
    seq = gl.minimum(seq, num_seqs - 1)
    first_token = gl.load(batch.cu_seqlens_q + seq)
    query_len = gl.load(batch.cu_seqlens_q + seq + 1) - first_token
    seq_len = gl.load(batch.seqused_k + seq)
    # Later rows see more keys: the longest first, so that the short ones fill the end of the launch.
    row_start = ((query_len + C.tokens - 1) // C.tokens - 1 - (program - before)) * C.tokens
    num_rows = gl.minimum(query_len - row_start, C.tokens)
    context_len = seq_len - query_len
    stop = before_stop(gl.minimum(context_len + row_start + num_rows, seq_len), seq, seq >= 0, batch)
    stop = gl.minimum(stop, table_width * C.shape.block_size)
    return found, seq, row_start, num_rows, first_token, context_len, gl.maximum(stop, 0)


@gluon.jit
def row_blocks_of(query_len, seqs, inside, batch, STAGED: gl.constexpr, C: gl.constexpr):
    """Row blocks of sequences; none of those that another launch serves."""
    served = (query_len >= C.tile.min_query_len) & (query_len <= C.tile.max_query_len)
    if batch.first_tiles is not None:
        served = served & ((gl.load(batch.first_tiles + seqs, mask=inside, other=-1) >= 0) == STAGED)
    return gl.where(served, (query_len + C.tokens - 1) // C.tokens, 0)


@gluon.jit
def assigned_range(num_seqs, table_width, batch, scoring, splits, C: gl.constexpr):
    """This program's :class:`TileRange` over all sequences' tiles."""
    counts = gl.zeros([SCAN], gl.int32, VECTOR)
    blocks = gl.zeros([SCAN], gl.int32, VECTOR)
    longest = gl.zeros([SCAN], gl.int32, VECTOR)
    for base in range(0, num_seqs, SCAN):
        row_blocks, keys = sequence_facts(base + gl.arange(0, SCAN, VECTOR), num_seqs, batch, scoring, C)
        units, _ = units_of(keys, table_width, splits, C)
        counts += row_blocks * units
        blocks += row_blocks
        longest = gl.maximum(longest, gl.where(row_blocks > 0, units, 0))
    return equal_range(gl.sum(counts, 0), gl.sum(blocks, 0), gl.max(longest, 0), splits, C)


@gluon.jit
def next_work_tile(assigned, num_seqs, table_width, batch, scoring, splits, C: gl.constexpr):
    """(the next work tile of a range that is not empty, the rest of the range)."""
    seq = 0
    before = 0
    blocks_before = 0
    running = 0
    for base in range(0, num_seqs, SCAN):
        seqs = base + gl.arange(0, SCAN, VECTOR)
        row_blocks, keys = sequence_facts(seqs, num_seqs, batch, scoring, C)
        units, _ = units_in(assigned, keys, table_width, splits, C)
        ends = running + gl.associative_scan(row_blocks * units, 0, plus)
        passed = (ends <= assigned.next) & (seqs < num_seqs)
        seq += gl.sum(passed.to(gl.int32), 0)
        before = gl.maximum(before, gl.max(gl.where(passed, ends, 0), 0))
        blocks_before += gl.sum(gl.where(passed, row_blocks, 0), 0)
        running = gl.max(ends, 0)
    return work_tile_at(seq, before, blocks_before, assigned, num_seqs, table_width, batch, scoring, splits, C)


@gluon.jit
def plus(a, b):
    return a + b


@gluon.jit
def all_exist(start, stop, span, C: gl.constexpr):
    """Whether every block of the keys from ``start`` to ``stop`` is one of the cache's."""
    last = gl.cdiv(stop, C.shape.block_size)
    missing = gl.zeros([BLOCKS], gl.int32, VECTOR)
    for base in range(start // C.shape.block_size, last, BLOCKS):
        entries = base + gl.arange(0, BLOCKS, VECTOR)
        block = gl.load(span.table + entries, mask=entries < last, other=0)
        missing |= ((block < 0) | (block >= span.num_blocks)).to(gl.int32)
    return gl.max(missing, 0) == 0
