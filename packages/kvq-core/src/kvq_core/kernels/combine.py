"""The combine kernel: a row's splits joined by the online softmax, in their order, so that the result is the same every time.

Nearly all of its time is latency: of a launch, of loads that wait for each other, of barriers. So what is loaded is loaded at once, and
programs are small, so that many are resident.

Scalar conditions join masks by ``tl.where``: of ``mask & scalar`` the interpreter of Triton 3.9 makes integers, which are no masks.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from kvq_core.kernels.args import CombineRows, SoftmaxState
from kvq_core.kernels.hadamard import unrotate_row
from kvq_core.kernels.queries import store_channels, store_rows
from kvq_core.kernels.scheduler import only_units, range_size
from kvq_core.kernels.softmax import add_other, add_sink, reciprocal_sum, store_lse


@triton.jit(do_not_specialize=["num_row_blocks", "num_programs"])
def combine_kernel(
    output, output_scale, batch, scoring, splits, partials, num_row_blocks, num_programs, TILE: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Combine the partials that ``num_programs`` programs a kv head have left of every row block.

    Grid: (eight rows of each row block, then a slice of a row of every TILE.blocks row blocks; kv heads).

    Few splits: eight rows at a time, which share an un-rotation. Many: a row at a time, TILE.splits of them loaded together. Which of the
    two a row block needs is known on the device alone, and the programs of the other end at once: so one of the second kind looks at
    several row blocks. A row block on its own has programs of the second kind alone.
    """
    if C.tile.alone:
        combine_alone(output, output_scale, batch, scoring, splits, partials, num_programs, TILE, C)
    else:
        combine_all(output, output_scale, batch, scoring, splits, partials, num_row_blocks, TILE, C)


@triton.jit
def combine_alone(output, output_scale, batch, scoring, splits, partials, num_programs, TILE: tl.constexpr, C: tl.constexpr):
    """Combine a row block on its own. How many splits it has follows from its length: nothing is loaded to know it."""
    program = tl.program_id(0)
    # Only a split into chunks asks for the table's width, and a row block on its own is split equally.
    total = only_units(0, batch, scoring, splits, C)
    num_splits = tl.cdiv(total, range_size(total, num_programs, splits, C))
    first_token = tl.load(batch.cu_seqlens_q)
    query_len = tl.load(batch.cu_seqlens_q + 1) - first_token
    if C.tile.overlap != "":
        # What comes next is the work of the launch before.
        gdc_wait()
    if num_splits >= C.tile.least_splits:
        zero = program * 0  # as the kernels' values are: a plain 0 has no width to be widened from
        block = CombineRows(first_token, zero, query_len, num_splits, zero)
        combine_row(program // TILE.slices, program % TILE.slices, block, output, output_scale, scoring, splits, partials, TILE, C)


@triton.jit
def combine_all(output, output_scale, batch, scoring, splits, partials, num_row_blocks, TILE: tl.constexpr, C: tl.constexpr):
    """The combine kernel of any number of row blocks."""
    TILES: tl.constexpr = C.tile.rows // 8
    ROWS: tl.constexpr = C.tokens * C.shape.group
    program = tl.program_id(0)
    if program < num_row_blocks * TILES:
        block = row_block(program // TILES, num_row_blocks, batch, partials, C)
        if (block.num_splits >= C.tile.least_splits) & (block.num_splits <= TILE.few):
            combine_rows(program % TILES * 8 + tl.arange(0, 8), block, output, output_scale, scoring, splits, partials, C)
    else:
        program -= num_row_blocks * TILES
        part = program % TILE.slices
        program = program // TILE.slices
        numbers = program // ROWS * TILE.blocks + tl.arange(0, TILE.blocks)
        many = row_block(numbers, num_row_blocks, batch, partials, C).num_splits > TILE.few
        # From the first of them to the last: mostly there is one, or none.
        for number in range(tl.min(tl.where(many, numbers, num_row_blocks), 0), tl.max(tl.where(many, numbers + 1, 0), 0)):
            block = row_block(number, num_row_blocks, batch, partials, C)
            if block.num_splits > TILE.few:
                combine_row(program % ROWS, part, block, output, output_scale, scoring, splits, partials, TILE, C)


@triton.jit
def row_block(number, num_row_blocks, batch, partials, C: tl.constexpr):
    """Facts of row blocks (scalar or vector); no split where there is nothing to combine."""
    exists = number < num_row_blocks
    seq = number // C.tile.max_row_blocks
    row_start = number % C.tile.max_row_blocks * C.tokens
    first_token = tl.load(batch.cu_seqlens_q + seq, mask=exists, other=0)
    query_len = tl.load(batch.cu_seqlens_q + seq + 1, mask=exists, other=0) - first_token
    served = exists & (query_len >= C.tile.min_query_len) & (query_len <= C.tile.max_query_len) & (row_start < query_len)
    if C.tile.overlap != "":
        # What comes next is the work of the launch before.
        gdc_wait()
    num_splits = tl.load(partials.plan + number * 2, mask=served, other=0)
    item = tl.load(partials.plan + number * 2 + 1, mask=served, other=0)
    return CombineRows(first_token, row_start, query_len, num_splits, item)


@triton.jit
def first_partial(r, block, splits, C: tl.constexpr):
    """(token, query head, whether there is such a row, index of its first partial, distance to the next) of rows ``r`` of a block."""
    kv_head, num_kv_heads = tl.program_id(1), tl.num_programs(1)
    index = block.row_start + r // C.shape.group
    token = block.first_token + index
    head = kv_head * C.shape.group + r % C.shape.group
    valid = (index < block.query_len) & (r < C.tokens * C.shape.group)
    if C.tile.split == "segments":
        row = (token.to(tl.int64) * (num_kv_heads * C.shape.group) + head) * splits.segments
        step = 1
    else:
        row = (block.item.to(tl.int64) * num_kv_heads + kv_head) * C.tile.rows + r
        step = num_kv_heads * C.tile.rows
    return token, head, valid, row, step


@triton.jit
def combine_rows(r, block, output, output_scale, scoring, splits, partials, C: tl.constexpr):
    """Write the results of rows ``r`` [ROWS] of a block, two splits at a time, each a tile of its own: nothing crosses threads."""
    ROWS: tl.constexpr = r.shape[0]
    WIDTH: tl.constexpr = C.value_heads.width
    token, head, valid, row, step = first_partial(r, block, splits, C)
    state = SoftmaxState(tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32))
    acc = ()
    for _ in tl.static_range(tl.constexpr(C.format.value.ways)):
        acc = acc + (tl.zeros([ROWS, WIDTH], tl.float32),)
    for split in range(0, block.num_splits, 2):
        one, one_acc = load_partials(row + split * step, valid, partials, C)
        two, two_acc = load_partials(row + (split + 1) * step, tl.where(split + 1 < block.num_splits, valid, False), partials, C)
        top = tl.maximum(state.max, tl.maximum(one.max, two.max))
        safe = tl.where(top == float("-inf"), 0.0, top)
        alpha, one_weight, two_weight = tl.exp2(state.max - safe), tl.exp2(one.max - safe), tl.exp2(two.max - safe)
        joined = ()
        for s in tl.static_range(tl.constexpr(C.format.value.ways)):
            joined = joined + (acc[s] * alpha[:, None] + one_acc[s] * one_weight[:, None] + two_acc[s] * two_weight[:, None],)
        acc = joined
        state = SoftmaxState(top, state.sum * alpha + one.sum * one_weight + two.sum * two_weight)
    state, factor = add_sink(state, head, valid, scoring)
    state, factor, share = add_other(state, factor, token, head, valid, output, C)
    store_lse(state, token, head, valid, output, C)
    inverse = reciprocal_sum(state.sum)
    scale = factor * inverse
    result = ()
    for s in tl.static_range(tl.constexpr(C.format.value.ways)):
        result = result + (acc[s] * scale[:, None],)
    store_rows(result, share * inverse, output, output_scale, token, head, valid, ROWS, C, MIXED=C.features.mixed)


@triton.jit
def load_partials(at, valid, partials, C: tl.constexpr):
    """The partials ``at`` [ROWS]: their (max, sum) and their accumulators as ways [ROWS, WIDTH]."""
    lane = tl.arange(0, C.value_heads.width)
    state = SoftmaxState(
        tl.load(partials.max + at, mask=valid, other=float("-inf")),
        tl.load(partials.sum + at, mask=valid, other=0.0),
    )
    mask = valid[:, None] & (lane < C.value_heads.lanes)[None, :]
    acc = ()
    for s in tl.static_range(tl.constexpr(C.format.value.ways)):
        offset = at[:, None] * partials.row_stride + lane[None, :] + s * C.value_heads.lanes
        acc = acc + (tl.load(partials.acc + offset, mask=mask, other=0.0),)
    return state, acc


@triton.jit
def combine_row(r, part, block, output, output_scale, scoring, splits, partials, TILE: tl.constexpr, C: tl.constexpr):
    """Write a slice of the result of row ``r`` (scalar) of a block, TILE.splits of whose splits are loaded together.

    Slice ``part`` of TILE.slices has some of a row's ways, which nothing mixes any more, or of its lanes, where nothing ever does.
    Every TILE.splits-th split is summed on its own, and these sums in the end: nothing crosses threads within the loop.
    """
    HEADS: tl.constexpr = C.value_heads
    SIGNS: tl.constexpr = C.format.value.signs
    WAYS: tl.constexpr = HEADS.ways // (TILE.slices if C.format.value.rotated else 1)
    WIDTH: tl.constexpr = HEADS.width // (1 if C.format.value.rotated else TILE.slices)
    SPLITS: tl.constexpr = TILE.splits
    token, head, valid, row, step = first_partial(r, block, splits, C)
    lane = tl.arange(0, WIDTH)[None, :]
    way = tl.arange(0, WAYS)[:, None]
    if C.format.value.rotated:
        way += part * WAYS
    else:
        lane += part * WIDTH
    channel = lane * HEADS.ways + way
    inside = lane < HEADS.lanes
    offset = way * HEADS.lanes + lane
    top = tl.full([SPLITS], float("-inf"), tl.float32)
    total = tl.zeros([SPLITS], tl.float32)
    acc = tl.zeros([SPLITS, WAYS, WIDTH], tl.float32)
    for base in range(0, tl.where(valid, block.num_splits, 0), SPLITS):
        numbers = base + tl.arange(0, SPLITS)
        exists = numbers < block.num_splits
        at = row + numbers.to(tl.int64) * step
        split_max = tl.load(partials.max + at, mask=exists, other=float("-inf"))
        split_sum = tl.load(partials.sum + at, mask=exists, other=0.0)
        mask = exists[:, None, None] & inside[None, :, :]
        values = tl.load(partials.acc + (at * partials.row_stride)[:, None, None] + offset[None, :, :], mask=mask, other=0.0)
        grown = tl.maximum(top, split_max)
        safe = tl.where(grown == float("-inf"), 0.0, grown)
        alpha, weight = tl.exp2(top - safe), tl.exp2(split_max - safe)
        top = grown
        total = total * alpha + split_sum * weight
        acc = acc * alpha[:, None, None] + values * weight[:, None, None]
    largest = tl.max(top, 0)
    weight = tl.exp2(top - tl.where(largest == float("-inf"), 0.0, largest))
    state, factor = add_sink(SoftmaxState(largest, tl.sum(total * weight, 0)), head, valid, scoring)
    state, factor, share = add_other(state, factor, token, head, valid, output, C)
    store_lse(state, token, head, tl.where(part == 0, valid, False), output, C)
    inverse = reciprocal_sum(state.sum)
    x = tl.sum(acc * weight[:, None, None], 0) * (factor * inverse)
    if C.format.value.rotated:
        x = unrotate_row(x, channel, HEADS, SIGNS, C.features.mixed)
    store_channels(x, share * inverse, channel, tl.where(valid, inside, False), output, output_scale, token, head, C)
