"""Which program does what: from a program's number to sequences, their query rows and their keys.

The work of a launch is a row of *units*, numbered sequence by sequence, row block by row block, along the keys. A unit is a tile of keys
where keys are split equally, a longer chunk under the other splits, and a whole row block where nothing is split. A program takes a range
of consecutive units, one work tile after another: a work tile stays within one row block. Programs find their ranges by summing over
``seqused_k``, so the plan follows the lengths on the device: nothing is copied to the host, and a CUDA graph stays right when the lengths
change between replays.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from kvq_core.kernels.args import QueryRows, TileRange, WorkTile
from kvq_core.kernels.compiler_hints import opaque_zero
from kvq_core.kernels.queries import score_shift

SCAN = tl.constexpr(128)  # sequences looked at together


@triton.jit
def visible_start(context_len, window_left, KEYS: tl.constexpr):
    """First key, rounded down to a tile, that a row at position ``context_len`` or later can see."""
    if window_left is None:
        first = context_len * 0
    else:
        first = tl.maximum(context_len - window_left, 0) // KEYS * KEYS
    return first


@triton.jit
def sequence_facts(seqs, num_seqs, batch, scoring, C: tl.constexpr):
    """(row blocks, keys that may be seen) of sequences ``seqs`` (scalar or vector); 0 row blocks outside this launch's query lengths."""
    inside = seqs < num_seqs
    first = tl.load(batch.cu_seqlens_q + seqs, mask=inside, other=0)
    query_len = tl.load(batch.cu_seqlens_q + seqs + 1, mask=inside, other=0) - first
    seq_len = tl.load(batch.seqused_k + seqs, mask=inside, other=0)
    served = inside & (query_len >= C.tile.min_query_len) & (query_len <= C.tile.max_query_len)
    if batch.first_tiles is not None:
        # Another launch serves those whose keys are staged.
        served = served & (tl.load(batch.first_tiles + seqs, mask=inside, other=-1) < 0)
    row_blocks = tl.where(served, (query_len + C.tokens - 1) // C.tokens, 0)
    if scoring.ranges is None:
        first_key = visible_start(seq_len - query_len, scoring.window_left, C.tile.keys)
    else:
        first_key = query_len * 0
    return row_blocks, tl.maximum(before_stop(seq_len, seqs, inside, batch) - first_key, 0)


@triton.jit
def before_stop(end, seqs, inside, batch):
    """``end`` of the keys of sequences ``seqs``, or where the batch stops them."""
    if batch.key_stops is not None:
        end = tl.minimum(end, tl.load(batch.key_stops + seqs, mask=inside, other=0))
    return end


@triton.jit
def units_of(keys, table_width, splits, C: tl.constexpr):
    """(units of a row block, keys in a unit) for sequences with ``keys`` visible keys; at least one unit, so that zeros get written."""
    KEYS: tl.constexpr = C.tile.keys
    if C.tile.split == "equal":
        count = tl.maximum((keys + KEYS - 1) // KEYS, 1)
        length = keys * 0 + KEYS
    else:
        if C.tile.split == "chunks":
            # Programs are launched for the keys that a block table has room for, whatever lengths say.
            keys = tl.minimum(keys, table_width * C.shape.block_size)
            count = tl.maximum((keys + splits.chunk - 1) // splits.chunk, 1)
        elif C.tile.split == "segments":
            count = keys * 0 + splits.segments
        else:
            count = keys * 0 + 1
        # The same number of units, but of equal length: the last one is not a short rest.
        length = tl.maximum(((keys + count - 1) // count + KEYS - 1) // KEYS * KEYS, KEYS)
        count = tl.maximum((keys + length - 1) // length, 1)
    return count, length


@triton.jit
def assigned_range(num_seqs, table_width, batch, scoring, splits, C: tl.constexpr):
    """This program's :class:`TileRange`; empty if there is nothing left for it."""
    if C.tile.overlap == "start":
        gdc_launch_dependents()
    # A single sequence needs no scan: its programs are short, and wait for every load in a row.
    if C.tile.alone or num_seqs == 1:
        total = only_units(table_width, batch, scoring, splits, C)
        assigned = range_of(total, range_size(total, tl.num_programs(0), splits, C), 0)
    else:
        counts = tl.zeros([SCAN], tl.int32)
        blocks = tl.zeros([SCAN], tl.int32)
        longest = tl.zeros([SCAN], tl.int32)
        for base in range(0, num_seqs, SCAN):
            row_blocks, keys = sequence_facts(base + tl.arange(0, SCAN), num_seqs, batch, scoring, C)
            units, _ = units_of(keys, table_width, splits, C)
            counts += row_blocks * units
            blocks += row_blocks
            longest = tl.maximum(longest, tl.where(row_blocks > 0, units, 0))
        assigned = equal_range(tl.sum(counts), tl.sum(blocks), tl.max(longest, 0), splits, C)
    return assigned


@triton.jit
def only_units(table_width, batch, scoring, splits, C: tl.constexpr):
    """The units of a single sequence."""
    row_blocks, keys = sequence_facts(0, 1, batch, scoring, C)
    units, _ = units_of(keys, table_width, splits, C)
    return row_blocks * units


@triton.jit
def equal_range(total, blocks, longest, splits, C: tl.constexpr):
    """This program's range of ``total`` units in ``blocks`` row blocks, the longest of which has ``longest``."""
    size = range_size(total, tl.num_programs(0), splits, C)
    row_units = 0
    if C.tile.split == "equal":
        size, row_units = equal_splits(size, total, blocks, longest)
        total = tl.where(row_units > 0, blocks * row_units, total)
    return range_of(total, size, row_units)


@triton.jit
def range_of(total, size, row_units):
    first = tl.program_id(0) * size
    return TileRange(first, tl.minimum(first + size, total), size, row_units)


@triton.jit
def range_size(total, programs, splits, C: tl.constexpr):
    """Units of each program's range."""
    size = 1
    if C.tile.split == "equal":
        size = tl.maximum((total + programs - 1) // programs, splits.least)
    return size


@triton.jit
def equal_splits(size, total, blocks, longest):
    """(range size, row_units) for row blocks of about the same length: each is cut into as many splits as fit, and a program has one.

    A range that runs from one sequence into the next has a second work tile, with queries to load and a split more to combine. So there are
    as many splits as ranges begin in the longest, if there are programs for them, or one less, and ranges may be longer by a sixteenth if
    that spares a second work tile; if one is a whole row block, nothing is left to combine.
    """
    count = longest // size
    count += ((count * size < longest) & (blocks * (count + 1) <= tl.num_programs(0))).to(tl.int32)
    count = tl.maximum(count, 1)
    even = (longest + count - 1) // count
    row_units = count * even
    fits = (blocks * count <= tl.num_programs(0)) & (even * 16 <= size * 17) & (blocks * row_units * 16 <= total * 17)
    return tl.where(fits, even, size), tl.where(fits, row_units, 0)


@triton.jit
def units_in(assigned, keys, table_width, splits, C: tl.constexpr):
    """:func:`units_of`; where row blocks have equal splits, every one is numbered as if it had the same number of units."""
    units, length = units_of(keys, table_width, splits, C)
    return tl.where(assigned.row_units > 0, assigned.row_units, units), length


@triton.jit
def next_work_tile(assigned, num_seqs, table_width, batch, scoring, splits, C: tl.constexpr):
    """(the next work tile of a range that is not empty, the rest of the range)."""
    seq = 0
    before = 0
    blocks_before = 0
    running = 0
    if not C.tile.alone and num_seqs > 1:
        for base in range(0, num_seqs, SCAN):
            seqs = base + tl.arange(0, SCAN)
            row_blocks, keys = sequence_facts(seqs, num_seqs, batch, scoring, C)
            units, _ = units_in(assigned, keys, table_width, splits, C)
            ends = running + tl.cumsum(row_blocks * units, 0)
            passed = (ends <= assigned.next) & (seqs < num_seqs)
            seq += tl.sum(passed.to(tl.int32))
            before = tl.maximum(before, tl.max(tl.where(passed, ends, 0)))
            blocks_before += tl.sum(tl.where(passed, row_blocks, 0))
            running = tl.max(ends)
    return work_tile_at(seq, before, blocks_before, assigned, num_seqs, table_width, batch, scoring, splits, C)


@triton.jit
def work_tile_at(seq, before, blocks_before, assigned, num_seqs, table_width, batch, scoring, splits, C: tl.constexpr):
    """(the next work tile of a range, the rest of the range): of sequence ``seq``, before which are so many units and row blocks."""
    row_blocks, keys = sequence_facts(seq, num_seqs, batch, scoring, C)
    units, length = units_in(assigned, keys, table_width, splits, C)
    block = 0
    unit = assigned.next - before
    if C.tile.max_row_blocks != 1:
        block = unit // units
        unit = unit % units
    count = tl.minimum(assigned.stop - assigned.next, units - unit)
    # A row block's first split says how many there are. The others need to know that they are not the only one.
    num_splits = tl.where(unit == 0, (assigned.next + units - 1) // assigned.size - tl.program_id(0) + 1, 2)
    item = tl.program_id(0) + blocks_before + block

    first_token = tl.load(batch.cu_seqlens_q + seq)
    query_len = tl.load(batch.cu_seqlens_q + seq + 1) - first_token
    seq_len = tl.load(batch.seqused_k + seq)
    context_len = seq_len - query_len
    # Later rows see more keys: the longest first, so that the short ones fill the end of the launch.
    row_start = (row_blocks - 1 - block) * C.tokens
    num_rows = tl.minimum(query_len - row_start, C.tokens)
    low, high = visible_range(seq, context_len + row_start, context_len + row_start + num_rows, seq_len, scoring, C)
    if scoring.ranges is None:
        origin = visible_start(context_len, scoring.window_left, C.tile.keys)
    else:
        origin = context_len * 0
    high = before_stop(high, seq, seq >= 0, batch)
    start = tl.maximum(origin + unit * length, low)
    stop = tl.minimum(tl.minimum(origin + (unit + count) * length, high), table_width * C.shape.block_size)
    work = WorkTile(seq, row_start, num_rows, first_token, context_len, seq_len, start, stop, unit, num_splits, item)
    return work, TileRange(assigned.next + count, assigned.stop, assigned.size, assigned.row_units)


@triton.jit
def visible_range(seq, first_position, end_position, seq_len, scoring, C: tl.constexpr):
    """Keys [low, high) that rows at positions [first, end) may see; low is a multiple of the tile."""
    low = visible_start(first_position, scoring.window_left, C.tile.keys)
    high = tl.minimum(tl.maximum(end_position, 0), seq_len)
    if scoring.ranges is not None:
        for r in range(scoring.num_ranges):
            start = tl.load(scoring.ranges + (seq * scoring.num_ranges + r) * 2)
            end = tl.load(scoring.ranges + (seq * scoring.num_ranges + r) * 2 + 1)
            touched = (start < end) & (start < end_position) & (end >= first_position)
            low = tl.where(touched, tl.minimum(low, tl.maximum(start, 0) // C.tile.keys * C.tile.keys), low)
            high = tl.where(touched, tl.maximum(high, tl.minimum(end, seq_len - 1) + 1), high)
    return low, high


@triton.jit
def query_rows(work, queries, kv_head, scoring, C: tl.constexpr):
    """The tile's query rows."""
    r = (opaque_zero(work.num_rows, C) + tl.arange(0, C.tile.rows)) % (C.tile.rows // C.tile.fold)
    index = work.row_start + r // C.shape.group
    valid = (r // C.shape.group < work.num_rows) & (r < C.tokens * C.shape.group)
    token, head = work.first_token + index, kv_head * C.shape.group + r % C.shape.group
    return QueryRows(index, token, head, work.context_len + index, valid, score_shift(queries, token, head, valid, scoring, C))
