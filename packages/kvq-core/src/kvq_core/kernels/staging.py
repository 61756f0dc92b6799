"""Packed pages as float16 tiles in a workspace, unpacked once for all row blocks of a prompt (:mod:`kvq_core.kernels.sm90.plain`).

A tile holds 128 keys of one kv head, or their values. Rotated rows stay so if float16 holds their numbers times their scales
(ReadConfig.stays_rotated): the reader rotates queries, and un-rotates its result. Ways then lie one behind the other, so that nothing is
interleaved. A number of four bits times a scale of seven is exact, over a power of two that the tile's rows share.

Other rows are in the basis and the order of the model's channels, so that attention knows nothing of the mode. A key keeps its row's scale,
and is exact: codes less their zero point, or the sums of these that a Hadamard transform takes, are numbers that float16 holds (of int2's
sums those up to 4096; larger ones are rounded). Values are over a power of two that the tile's rows share, so that each is rounded once,
relative to itself. Heads smaller than a tile's 64 or 128 channels are filled up with zeros.

A rotary mean (:mod:`.rotary`) is given back as further channels of the keys: R_j b in its pairs, which a reader multiplies by the
query's channels once more. Such a row is over its scale times a power of two that keeps the mean in float16's range.

Staged tiles are a cache of their own, with blocks of 128 tokens, a scale for each row, a block table for each kv head, and a stop for each
sequence. A tile has no entry in that table if a row before the sequence's end is missing, if keys are large, or if rows have no power of
two to share. Its readers go by the rows' own scales, and take scores as they come.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kvq_core.kernels.args import KeyTiles, WorkTile
from kvq_core.kernels.dots import dot_signs
from kvq_core.kernels.hadamard import apply_signs, apply_way_signs, butterfly, lane_matrix
from kvq_core.kernels.packing import interleave
from kvq_core.kernels.paged_kv import key_tile, load_chunks, page_offset, row_offset
from kvq_core.kernels.rotary import cosine_sine
from kvq_core.kernels.rounding import LAST_SCALE_BIT
from kvq_core.kernels.scheduler import SCAN, sequence_facts
from kvq_core.kernels.side_bytes import side_selectors

TOP, BINADES = tl.constexpr(7), tl.constexpr(8)
"""A tile's largest scale is below 2^TOP of the unit that its rows share, and not below 2^(TOP - BINADES): 448, e4m3's largest number, times
2^TOP fits float16. Units are so far apart that few tiles change them, since sums over values then are rescaled."""
GRID_TOP, GRID_BINADES = tl.constexpr(12), tl.constexpr(16)
"""The same for numbers below 16."""
WHOLE = tl.constexpr(1.5 * 2.0**23)
"""Adding and subtracting it rounds a small number to an integer."""
LEAST_SHARED = tl.constexpr(2.0**-18)
"""The least scale, over its unit, whose seven bits float16 holds."""
FARTHEST = tl.constexpr(2.0**30)
"""A tile shares its power of two only up to it and down to its inverse: a sum times the quotient of any two of these is in float32's
range."""
MEAN_SHARE = tl.constexpr(2.0**2)
"""The queries' channels of a rotary mean are multiplied by it, the staged mean's divided. Queries' are at most 2^8 in log2 units; a mean
may be far below the scale that its tile's rows share. Both should be in float16's range, above its subnormal numbers."""
LARGEST_MEAN = tl.constexpr(2.0**14)
"""A rotary mean over its row's scale is below twice this."""
LARGEST_KEY = tl.constexpr(2.0**10)
"""Of a key's channels, so that readers know a bound of its scores; of rotated ones' over QUERY_SHARE."""
QUERY_SHARE = tl.constexpr(0.25)
"""Rotated queries are multiplied by it, and their keys' scales divided: a rotation is not normalized, and makes a row of 128 eleven times
as long, which would take more queries out of the range in which scores are bounded."""
LARGEST = tl.constexpr(2.0**120)
"""No power of two that rows are over is larger: it and its inverse are normal numbers."""


class Staged(NamedTuple):
    """Where staged tiles go. ``k_tiles``, ``v_tiles`` [capacity, kv heads, 128, C.channels] float16, keys with two more for each pair of
    a rotary mean, and behind them, where rows stay rotated, the rotation's matrix; ``k_scales``, ``v_scales`` [capacity, heads, 128]
    float32: negative for a key that is missing; ``table`` [kv heads, capacity] int32: a tile's own number, or -1 if its readers must go by
    its rows' scales; ``firsts`` [num_seqs] int32: a sequence's first tile, -1 if it has none; ``stops`` [num_seqs] int32: its keys' end.
    """

    k_tiles: Any
    v_tiles: Any
    k_scales: Any
    v_scales: Any
    table: Any
    firsts: Any
    stops: Any


@triton.jit(do_not_specialize=["num_seqs", "table_stride", "table_width", "num_blocks", "capacity"])
def stage_kernel(
    keys, values, staged, factor, rotary, batch, scoring, num_seqs, table_stride, table_width, num_blocks, capacity, C: tl.constexpr
):  # fmt: skip
    """Stage tiles of one kv head, as far apart as there are programs for it; the first of these also notes where each sequence's tiles
    are. ``factor``, ``rotary``: the queries' (:class:`~kvq_core.kernels.args.RowsArgs`)."""
    number, kv_head = tl.program_id(0), tl.program_id(1)
    if C.stays_rotated:
        store_matrix(staged, kv_head, capacity, C)
    found, seq, first, stop = staged_sequence(number, kv_head, staged, batch, scoring, num_seqs, table_width, capacity, C)
    while found:
        t = number - first
        work = WorkTile(seq, 0, 0, 0, 0, 0, 0, stop, 0, 0, 0)
        tile = key_tile(t, KeyTiles(t, t, t + 1, 0), work, batch, table_stride, num_blocks, scoring, tl.constexpr(C.tile.loops - 1), C)
        row = (number.to(tl.int64) * tl.num_programs(1) + kv_head) * C.tile.keys
        mean = None
        if C.features.rotary_pairs > 0:
            start = tl.load(batch.first_positions + seq) if batch.first_positions is not None else 0
            mean = pair_means(factor, rotary + kv_head * (5 * C.features.rotary_pairs), kv_head, start + tile.position, C)
        bounded = stage_keys(keys, tile, kv_head, num_blocks, mean, staged.k_tiles, staged.k_scales, row, C)
        alike = stage_values(values, tile, kv_head, num_blocks, staged.v_tiles, staged.v_scales, row, C)
        # Readers leave out the keys behind the end by their positions.
        complete = tl.min((tile.valid | (tile.position >= stop)).to(tl.int32), 0) > 0
        tl.store(staged.table + kv_head * capacity + number, tl.where(complete & bounded & alike, number, -1))
        number += tl.num_programs(0)
        found, seq, first, stop = staged_sequence(number, kv_head, staged, batch, scoring, num_seqs, table_width, capacity, C)


@triton.jit
def store_matrix(staged, kv_head, capacity, C: tl.constexpr):
    """Store the rotation's matrix behind the keys, [channel, index in a staged row], +-1 in bfloat16. Readers rotate queries by it, and
    un-rotate their results. All programs of kv head 0 take part."""
    HEADS: tl.constexpr = C.key_heads
    SIGNS: tl.constexpr = C.format.key.signs
    if kv_head == 0:
        index = tl.arange(0, HEADS.size)
        channel = index % HEADS.lanes * HEADS.ways + index // HEADS.lanes
        end = (capacity * tl.num_programs(1)).to(tl.int64) * (C.tile.keys * C.staged_key_size)
        matrix = (staged.k_tiles + end).to(tl.pointer_type(tl.bfloat16), bitcast=True)
        for row in range(tl.program_id(0), HEADS.size, tl.num_programs(0)):
            odd = row & channel
            odd = odd ^ (odd >> 4)
            odd = odd ^ (odd >> 2)
            odd = odd ^ (odd >> 1)
            x = tl.where((odd & 1) == 1, -1.0, 1.0)
            if SIGNS is not None:
                x = apply_signs(x, row + tl.zeros_like(index), SIGNS, HEADS.block)
            tl.store(matrix + row * HEADS.size + index, x.to(tl.bfloat16))


@triton.jit
def staged_sequence(number, kv_head, staged, batch, scoring, num_seqs, table_width, capacity, C: tl.constexpr):
    """(whether tile ``number`` is one, its sequence, that one's first tile, the end of its keys)."""
    seq = 0
    first = 0
    running = 0
    for base in range(0, num_seqs, SCAN):
        seqs = base + tl.arange(0, SCAN)
        row_blocks, stops = sequence_facts(seqs, num_seqs, batch, scoring, C)
        stops = tl.minimum(stops, table_width * C.shape.block_size)
        # At least one, so that zeros get written.
        count = tl.where(row_blocks > 0, tl.maximum(tl.cdiv(stops, C.tile.keys), 1), 0)
        ends = running + tl.cumsum(count, 0)
        inside = seqs < num_seqs
        if (number == 0) & (kv_head == 0):
            tl.store(staged.firsts + seqs, tl.where((count > 0) & (ends <= capacity), ends - count, -1), mask=inside)
            tl.store(staged.stops + seqs, stops, mask=inside)
        passed = (ends <= number) & inside
        seq += tl.sum(passed.to(tl.int32))
        first = tl.maximum(first, tl.max(tl.where(passed, ends, 0)))
        running = tl.max(ends)
    found = number < running
    seq = tl.minimum(seq, num_seqs - 1)
    _, stop = sequence_facts(seq, num_seqs, batch, scoring, C)
    stop = tl.minimum(stop, table_width * C.shape.block_size)
    return found & (first + tl.maximum(tl.cdiv(stop, C.tile.keys), 1) <= capacity), seq, first, stop


@triton.jit
def stage_keys(plane, tile, kv_head, num_blocks, mean, out, out_scales, row, C: tl.constexpr):
    """Stage a tile's keys, to row ``row`` and after it: numbers, beside a rotary ``mean`` times a power of two. Whether none, nor its mean,
    is beyond LARGEST_KEY, and they share a scale if readers want them to."""
    ways, scale, zero = loaded_operands(plane, tile, kv_head, num_blocks, False, C)
    if C.stays_rotated:
        factor, scale, shared = grid_unit(scale)
        scale = scale * (C.key_number_scale / QUERY_SHARE)
        most = 16.0 * factor
    else:
        x = in_channels(ways, zero, False, C)
        scale = scale * C.key_number_scale
        factor = tl.full(scale.shape, 1.0, tl.float32)
        most = tl.max(tl.abs(x), 1)
    bounded = tl.max(tl.where(tile.valid, most * scale, 0.0)) <= LARGEST_KEY
    if C.stays_rotated:
        bounded = bounded & shared
    if mean is not None:
        x_mean, y_mean, largest = mean
        bounded = bounded & (largest <= LARGEST_KEY)
        smaller, scale = mean_unit(scale, largest)
        factor = factor * smaller
        unit = (1.0 / (scale * MEAN_SHARE))[:, None]
        PAIRS: tl.constexpr = C.features.rotary_pairs
        store_rows(x_mean * unit, PAIRS, out + C.channels, row, tile, C.staged_key_size, C)
        store_rows(y_mean * unit, PAIRS, out + (C.channels + PAIRS), row, tile, C.staged_key_size, C)
    if C.stays_rotated:
        store_on_grid(ways, zero, factor, False, out, row, tile, C.staged_key_size, C)
    else:
        store_rows(x * factor[:, None], C.shape.head_size, out, row, tile, C.staged_key_size, C)
    # A missing key's scale is negative, and as large as the one that others share.
    scale = tl.where(tile.valid, scale, -tl.maximum(scale, 2.0**-126))
    tl.store(out_scales + row + tl.arange(0, C.tile.keys), scale)
    return bounded


@triton.jit
def pair_means(factor, table, kv_head, position, C: tl.constexpr):
    """(first, second channels of the pairs of R_j b at ``position`` [KEYS], float32 [KEYS, PAIRS], at most what they can be), as smoothed
    keys have their channels; ``table``: a RotaryMean's pair_table, of one head."""
    PAIRS: tl.constexpr = C.features.rotary_pairs
    p = table + tl.arange(0, PAIRS)
    b_x, b_y = tl.load(p + 2 * PAIRS), tl.load(p + 3 * PAIRS)
    cosine, sine = cosine_sine(tl.load(p + 4 * PAIRS).to(tl.int32, bitcast=True)[None, :] * position[:, None], C.features.use_asm)
    x = b_x[None, :] * cosine - b_y[None, :] * sine
    y = b_y[None, :] * cosine + b_x[None, :] * sine
    largest = tl.abs(b_x) + tl.abs(b_y)
    if factor is not None:
        # Queries' channels are multiplied by it.
        own = factor + kv_head * C.shape.head_size
        by_x = 1.0 / tl.load(own + tl.load(p).to(tl.int32, bitcast=True))
        by_y = 1.0 / tl.load(own + tl.load(p + PAIRS).to(tl.int32, bitcast=True))
        x, y = x * by_x[None, :], y * by_y[None, :]
        largest = largest * tl.maximum(by_x, by_y)
    return x, y, tl.max(largest, 0)


@triton.jit
def mean_unit(scale, largest):
    """(a power of two for numbers of rows of ``scale`` [KEYS], the rows' new scale), for a mean of at most ``largest``."""
    most = power_of_two(tl.maximum(largest, 2.0**-100)) / LARGEST_MEAN
    times = tl.minimum(tl.maximum(most * inverse_power(power_of_two(scale)), 1.0), 2.0**100)
    # Of rows so much smaller nothing would be left, and zeros have no scale.
    small = (scale == 0.0) | (times > 2.0**60)
    return tl.where(small, 0.0, inverse_power(times)), tl.where(small, most, scale * times)


@triton.jit
def stage_values(plane, tile, kv_head, num_blocks, out, out_scales, row, C: tl.constexpr):
    """Stage a tile's values; whether they are over one power of two."""
    ways, scale, zero = loaded_operands(plane, tile, kv_head, num_blocks, True, C)
    if C.stays_rotated:
        factor, unit, shared = grid_unit(scale)
        store_on_grid(ways, zero, factor, True, out, row, tile, C.channels, C)
    else:
        x = in_channels(ways, zero, True, C)
        unit, shared = shared_unit(scale, TOP, BINADES)
        unit = tl.where(shared, unit, power_of_two(scale * 2.0 ** (1 - TOP)))
        # The product is exact.
        factor = (scale * inverse_power(unit)) * C.value_number_scale
        store_rows(x * factor[:, None], C.shape.head_size_v, out, row, tile, C.channels, C)
    tl.store(out_scales + row + tl.arange(0, C.tile.keys), tl.where(tile.valid, unit, 0.0))
    return shared


@triton.jit
def loaded_operands(plane, tile, kv_head, num_blocks, IS_VALUE: tl.constexpr, C: tl.constexpr):
    """(a tuple of ways of operands [KEYS, WIDTH] float16, the rows' scales and zero points [KEYS])."""
    P: tl.constexpr = C.format.value if IS_VALUE else C.format.key
    HEADS: tl.constexpr = C.value_heads if IS_VALUE else C.key_heads
    ROW: tl.constexpr = C.value_row if IS_VALUE else C.key_row
    CLEAR: tl.constexpr = C.clear_values if IS_VALUE else C.clear_keys
    selectors = None
    if P.side_bytes:
        selectors = side_selectors(plane, num_blocks, HEADS, ROW)
    offset = row_offset(tile, plane, ROW.vector, C)
    lanes = load_chunks(plane, tile, offset, kv_head, HEADS, ROW, P.side_bytes, C, TRANSPOSED=False, CLEAR=CLEAR, selectors=selectors)
    scale, zero = row_scales(plane, tile, kv_head, P, C)
    return P.unpack(lanes[0], C), scale, zero


@triton.jit
def in_channels(ways, zero, IS_VALUE: tl.constexpr, C: tl.constexpr):
    """Operands -> their numbers less zero points, [KEYS, size] float32 in the model's channels, un-rotated, exact."""
    P: tl.constexpr = C.format.value if IS_VALUE else C.format.key
    HEADS: tl.constexpr = C.value_heads if IS_VALUE else C.key_heads
    UNITS: tl.constexpr = C.value_number_units if IS_VALUE else C.key_number_units
    numbers = ()
    for s in tl.static_range(tl.constexpr(P.ways)):
        numbers = numbers + (ways[s].to(tl.float32) * UNITS[s] - zero[:, None],)
    if P.rotated:
        numbers = unrotated(numbers, HEADS, P, C)
    return interleave(numbers, tl.constexpr(C.tile.keys), HEADS.width, HEADS.ways)


@triton.jit
def grid_unit(scale):
    """(factors [KEYS] of rows of numbers on the grid, the rows' scales from then on [KEYS], whether all rows have the same)."""
    unit, shared = shared_unit(scale, GRID_TOP, GRID_BINADES)
    small = (scale != 0.0) & (scale < unit * LEAST_SHARED)
    # NaN is none that others share.
    long = (scale != scale) | ((scale.to(tl.int32, bitcast=True) & (LAST_SCALE_BIT - 1)) != 0)
    shared = shared & (tl.max((small | long).to(tl.int32), 0) == 0)
    return tl.where(shared, scale * inverse_power(unit), 1.0), tl.where(shared, unit, scale), shared


@triton.jit
def store_on_grid(ways, zero, factor, IS_VALUE: tl.constexpr, out, row, tile, STRIDE: tl.constexpr, C: tl.constexpr):
    """Store the numbers of a tile's rows on their grid, times ``factor`` [KEYS]: [KEYS, WIDTH] of each way, one behind the other."""
    P: tl.constexpr = C.format.value if IS_VALUE else C.format.key
    HEADS: tl.constexpr = C.value_heads if IS_VALUE else C.key_heads
    UNITS: tl.constexpr = C.value_number_units if IS_VALUE else C.key_number_units
    # Any codes are finite, those of rows that are missing, too.
    factor = tl.where(tile.valid, factor, 0.0)
    zeros = (zero * P.grid * factor)[:, None]
    for s in tl.static_range(tl.constexpr(P.ways)):
        x = ways[s].to(tl.float32)
        if P.grid % 1 == 0:
            # Exact, product and difference.
            x = x * (factor * UNITS[s])[:, None] - zeros
        else:
            x = (x * UNITS[s] + WHOLE - WHOLE) * factor[:, None] - zeros
        channel = s * HEADS.width + tl.arange(0, HEADS.width)
        at = out + ((row + tl.arange(0, C.tile.keys))[:, None] * STRIDE + channel[None, :])
        tl.store(at, x.to(tl.float16))


@triton.jit
def store_rows(x, SIZE: tl.constexpr, out, row, tile, STRIDE: tl.constexpr, C: tl.constexpr):
    """Store a tile's rows [KEYS, channels], STRIDE apart: zeros for those that are missing, and for channels that are not among SIZE."""
    channel = tl.arange(0, x.shape[1])
    exists = tile.valid[:, None]
    if x.shape[1] != SIZE:
        exists = exists & (channel < SIZE)[None, :]
    x = tl.where(exists, x, 0.0).to(tl.float16)
    at = out + ((row + tl.arange(0, C.tile.keys))[:, None] * STRIDE + channel[None, :])
    if x.shape[1] > C.channels:
        tl.store(at, x, mask=(channel < C.channels)[None, :])
    else:
        tl.store(at, x)


@triton.jit
def unrotated(numbers, HEADS: tl.constexpr, P: tl.constexpr, C: tl.constexpr):
    """D H y of rows of numbers, which float16 holds exactly, and so do the products."""
    matrix = lane_matrix(HEADS.width, HEADS.block_lanes)
    mixed = ()
    for s in tl.static_range(tl.constexpr(P.ways)):
        mixed = mixed + (dot_signs(numbers[s].to(tl.float16), matrix, C.features.upcast_dots),)
    mixed = butterfly(mixed, tl.constexpr(P.ways))
    result = ()
    for s in tl.static_range(tl.constexpr(P.ways)):
        result = result + (apply_way_signs(mixed[s], s, HEADS, P),)
    return result


@triton.jit
def row_scales(plane, tile, kv_head, P: tl.constexpr, C: tl.constexpr):
    """(scales, zero points) of a tile's rows, [KEYS] float32; 0 for missing ones, unless the plane has one scale."""
    word = tl.zeros(tile.position.shape, tl.float32)
    if P.scales == "row":
        at = kv_head.to(tl.int64) * plane.scale_head_stride
        at += page_offset(tile.block, tile.slot, plane.scale_block_stride, plane.scale_slot_stride, C)
        word = tl.load(plane.scales + at, mask=tile.valid, other=0.0)
    elif P.scales == "plane":
        word += tl.load(plane.scales)
    else:
        word = tl.where(tile.valid, 1.0, 0.0)
    scale, zero = word, tl.full(word.shape, P.zero, tl.float32)
    if P.split is not None:
        scale, zero = P.split(word)
    return scale, zero


@triton.jit
def shared_unit(scale, HIGHEST: tl.constexpr, APART: tl.constexpr):
    """(a power of two [KEYS], the same for all rows: of those 2^APART apart the least that times 2^HIGHEST is above the largest scale;
    whether rows may share it)."""
    largest = power_of_two(tl.max(scale, 0)).to(tl.int32, bitcast=True) >> 23
    exponent = tl.maximum((largest + (APART - HIGHEST)) // APART * APART, 1)
    unit = (exponent << 23).to(tl.float32, bitcast=True)
    near = (unit <= FARTHEST) & (unit * FARTHEST >= 1.0)
    return unit + tl.zeros_like(scale), near


@triton.jit
def power_of_two(x):
    """The power of two in ``x``, in what float32's normal numbers hold and :data:`LARGEST`."""
    x = tl.minimum(tl.maximum(x, 2.0**-126), LARGEST)
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def inverse_power(x):
    """1 / x of a power of two, exactly."""
    return ((254 << 23) - x.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
