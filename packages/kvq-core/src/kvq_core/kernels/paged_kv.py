"""The key tiles of a work tile: which need masks, where their keys lie in the pages, and their bytes."""

import triton
import triton.language as tl

from kvq_core.kernels.args import KeyTile, KeyTiles
from kvq_core.kernels.side_bytes import load_side_bytes

BLOCKS = tl.constexpr(128)  # block ids looked at together


@triton.jit
def seen_tiles(work, scoring, C: tl.constexpr):
    """(first, end) of a work tile's key tiles that all rows see whole."""
    KEYS: tl.constexpr = C.tile.keys
    first = work.start // KEYS
    end = tl.cdiv(work.stop, KEYS)
    if C.tile.loops > 1:
        last = end
        position = work.context_len + work.row_start
        if scoring.window_left is not None:
            seen_by_all = tl.maximum(position + work.num_rows - 1 - scoring.window_left, 0)
            first = tl.minimum(tl.maximum(tl.cdiv(seen_by_all, KEYS), first), last)
        end = tl.minimum(position + 1, work.stop) // KEYS
        end = tl.maximum(tl.minimum(end, last), first)
    return first, end


@triton.jit
def first_blocks(seen, work, batch, table_stride, C: tl.constexpr):
    """The first BLOCKS of the block ids of these tiles, loaded while queries are on their way, for :func:`unmasked_tiles`.

    In decode alone: kernels for many rows have no registers left to hold them.
    """
    ids = 0
    if C.tile.loops > 1 and C.tile.decode:
        KEYS: tl.constexpr = C.tile.keys
        first, end = seen
        ids = load_entries(first * KEYS // C.shape.block_size, tl.cdiv(end * KEYS, C.shape.block_size), work, batch, table_stride)
    return ids


@triton.jit
def unmasked_tiles(seen, ids, work, batch, table_stride, num_blocks, C: tl.constexpr):
    """(first, end) of those tiles if their blocks all exist. Found once a work tile, and only where there are unmasked iterations."""
    first, end = seen
    if C.tile.loops > 1:
        end = tl.where(blocks_exist(first * C.tile.keys, end * C.tile.keys, ids, work, batch, table_stride, num_blocks, C), end, first)
    return first, end


@triton.jit
def tiles_of(work, unmasked, LOOP: tl.constexpr, C: tl.constexpr):
    """The key tiles of one of the loops, numbered as tiles of C, or of C.masked.

    Loop 0 of two: the unmasked iterations, :func:`unmasked_tiles`. Loop 1: the masked ones. A single loop has all tiles, masked.
    """
    begin, end = unmasked
    if LOOP == 0:
        tiles = KeyTiles(begin, end, end, 0)
    else:
        KEYS: tl.constexpr = C.masked.tile.keys
        SMALLER: tl.constexpr = C.tile.keys // KEYS
        gap = (end - begin) * SMALLER
        tiles = KeyTiles(work.start // KEYS, tl.cdiv(work.stop, KEYS) - gap, begin * SMALLER, gap)
    return tiles


@triton.jit
def blocks_exist(start, stop, ids, work, batch, table_stride, num_blocks, C: tl.constexpr):
    """Whether every block of the keys ``start`` to ``stop`` is one of the cache's. ``ids``: see :func:`first_blocks`."""
    last = tl.cdiv(stop, C.shape.block_size)
    base = start // C.shape.block_size
    missing = tl.zeros([BLOCKS], tl.int32)
    if C.tile.decode:
        missing = (~block_exists(ids, num_blocks)).to(tl.int32)
        base += BLOCKS
    for entry in range(base, last, BLOCKS):
        missing |= (~block_exists(load_entries(entry, last, work, batch, table_stride), num_blocks)).to(tl.int32)
    return tl.max(missing) == 0


@triton.jit
def load_entries(first, last, work, batch, table_stride):
    """BLOCKS block ids of a sequence's, from entry ``first`` on; 0 from entry ``last`` on."""
    table = batch.block_table + work.seq.to(tl.int64) * table_stride
    entries = first + tl.arange(0, BLOCKS)
    return tl.load(table + entries, mask=entries < last, other=0)


@triton.jit
def block_exists(block, num_blocks):
    # The unsigned view catches negative ids too.
    return block.to(tl.uint32, bitcast=True) < num_blocks.to(tl.uint32, bitcast=True)


@triton.jit
def key_tile(number, tiles, work, batch, table_stride, num_blocks, scoring, LOOP: tl.constexpr, C: tl.constexpr):
    """Where the keys of a tile lie in the pages."""
    KEYS: tl.constexpr = C.tile.keys
    if LOOP > 0:
        number = tl.where(number < tiles.gap_at, number, number + tiles.gap)
    position = number * KEYS + tl.arange(0, KEYS)
    CHECKED: tl.constexpr = LOOP == C.tile.loops - 1
    # Ids are copied to shared memory, a word for each thread: of one word to many addresses, with bank conflicts (docs/performance.md).
    TOGETHER: tl.constexpr = 1 if CHECKED else C.keys_an_id
    COUNT: tl.constexpr = KEYS // TOGETHER
    if CHECKED:
        valid = position < work.stop
        there = valid
    else:
        valid = tl.full([KEYS], True, tl.int1)
        there = tl.full([COUNT], True, tl.int1)
    table = batch.block_table + work.seq.to(tl.int64) * table_stride
    if C.tile.decode:
        entry, slot = entries_of(number, tl.arange(0, COUNT) * TOGETHER, KEYS, C.shape.block_size)
    else:
        # Of many rows, whose tiles have more to do, this is the shorter code (compiled for sm_100).
        entry, slot = position // C.shape.block_size, position % C.shape.block_size
    block = load_blocks(table + entry, there, C.tile.small_vectors)
    if CHECKED:
        valid = valid & block_exists(block, num_blocks)
        if scoring.window_left is not None:
            # Keys that not even the first row sees: their blocks may be an engine's null block by now, with anything in it.
            first = work.context_len + work.row_start
            near = first - position <= scoring.window_left
            if scoring.ranges is not None:
                near = near | in_ranges(position, first, work, scoring)
            valid = valid & near
        block = tl.where(valid, block, 0)
    row_block, row_slot = block, slot
    if C.tile.fold > 1:
        row_block, row_slot = lane_row_places(number, work, batch, table_stride, num_blocks, CHECKED, C)
    elif TOGETHER > 1:
        row_block = tl.reshape(tl.broadcast_to(block[:, None], [COUNT, TOGETHER]), [KEYS])
        _, row_slot = entries_of(number, tl.arange(0, KEYS), KEYS, C.shape.block_size)
    return KeyTile(position, block, slot, valid, row_block, row_slot, number * KEYS)


@triton.jit
def entries_of(number, i, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """(entry in the block table, offset in the block) of the keys ``i`` of a tile of COUNT, of which a block has SIZE.

    What is divided has no tile's number in it, where possible: a division of what might be negative is five instructions, each time.
    """
    if COUNT % SIZE == 0:
        entry, offset = number * (COUNT // SIZE) + i // SIZE, i % SIZE
    elif SIZE % COUNT == 0:
        TILES: tl.constexpr = SIZE // COUNT
        entry, offset = number // TILES + i * 0, number % TILES * COUNT + i
    else:
        entry, offset = (number * COUNT + i) // SIZE, (number * COUNT + i) % SIZE
    return entry, offset


@triton.jit
def load_blocks(entry, valid, FEW: tl.constexpr):
    """Block ids from a table, -1 for invalid keys. FEW: see C.tile.small_vectors."""
    if FEW:
        twice = (tl.arange(0, 2) * 0)[None, :]
        block, _ = tl.split(tl.load(entry[:, None] + twice, mask=valid[:, None] & (twice == 0), other=-1))
    else:
        block = tl.load(entry, mask=valid, other=-1)
    return block


@triton.jit
def lane_row_places(number, work, batch, table_stride, num_blocks, CHECKED: tl.constexpr, C: tl.constexpr):
    """(block, which row of it) of each row of lanes of a tile, whose keys lie in one block. Bytes of some block where there is none."""
    LANE_ROWS: tl.constexpr = C.tile.lane_rows
    ROWS_A_BLOCK: tl.constexpr = C.shape.block_size // C.tile.fold
    if CHECKED:
        valid = (number * LANE_ROWS + tl.arange(0, LANE_ROWS)) * C.tile.fold < work.stop
    else:
        valid = tl.full([LANE_ROWS], True, tl.int1)
    table = batch.block_table + work.seq.to(tl.int64) * table_stride
    entry, offset = entries_of(number, tl.arange(0, LANE_ROWS), LANE_ROWS, ROWS_A_BLOCK)
    block = load_blocks(table + entry, valid, tl.constexpr(LANE_ROWS < C.tile.warps * 32))
    if CHECKED:
        block = tl.where(block_exists(block, num_blocks), block, 0)
    return block, offset


@triton.jit
def in_ranges(position, first, work, scoring):
    """Which keys lie in a range that one of the work tile's rows, at ``first`` and after it, lies in."""
    inside = position < 0
    for r in range(scoring.num_ranges):
        start = tl.load(scoring.ranges + (work.seq * scoring.num_ranges + r) * 2)
        end = tl.load(scoring.ranges + (work.seq * scoring.num_ranges + r) * 2 + 1)
        touched = (start < end) & (start < first + work.num_rows) & (end >= first)
        # Not "inside | ...": the interpreter of Triton 3.9 takes a scalar mask, spread over keys, for a vector of int32.
        inside = tl.where(touched & (position >= start) & (position <= end), True, inside)
    return inside


@triton.jit
def page_offset(block, slot, block_stride, slot_stride, C: tl.constexpr):
    """Where keys lie in a plane: 32-bit where the planes allow it, since a 64-bit product costs five instructions instead of one."""
    if C.shape.wide_planes:
        block = block.to(tl.int64)
    if C.shape.wide_pages:
        slot = slot.to(tl.int64)
    return block * block_stride + slot * slot_stride


@triton.jit
def tile_offsets(keys, values, tile, C: tl.constexpr):
    """Offsets of a tile's codes in both planes; computed once where the planes have the same strides."""
    K_VECTOR: tl.constexpr = C.key_row.vector
    V_VECTOR: tl.constexpr = C.value_row.vector
    if C.shape.same_strides:
        # Strides are multiples of either: rows of values may only begin elsewhere.
        k = row_offset(tile, keys, K_VECTOR if K_VECTOR > V_VECTOR else V_VECTOR, C)
        v = k
    else:
        k = row_offset(tile, keys, K_VECTOR, C)
        v = row_offset(tile, values, V_VECTOR, C)
    return k, v


@triton.jit
def row_offset(tile, plane, VECTOR: tl.constexpr, C: tl.constexpr):
    """Where a tile's rows of codes start, VECTOR bytes or a multiple of them apart."""
    LANES: tl.constexpr = VECTOR // (plane.codes.dtype.element_ty.primitive_bitwidth // 8)
    # Of a stride Triton sees only whether 16 divides it: rows of 48 bytes, say, would be loaded lane by lane. Hints get lost on the way.
    return page_offset(tile.row_block, tile.row_slot, plane.block_stride // LANES, plane.slot_stride * C.tile.fold // LANES, C) * LANES


@triton.jit
def load_lanes(
    plane, tile, offset, kv_head, HEADS: tl.constexpr, ALIGNMENT: tl.constexpr, C: tl.constexpr, TRANSPOSED: tl.constexpr,
    CLEAR: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """COUNT lanes of a tile's rows, from lane FIRST on, [KEYS // FOLD, COUNT], or transposed if TRANSPOSED.

    Invalid keys read some existing block's bytes, or 0 with CLEAR: modes whose codes can be NaN need that, since 0 * NaN is NaN.
    """
    LANES: tl.constexpr = C.tile.fold * HEADS.lanes
    lane = FIRST + tl.arange(0, COUNT)
    base = tl.multiple_of(plane.codes + kv_head.to(tl.int64) * plane.head_stride, ALIGNMENT)
    inside = lane < LANES
    place = lane
    if C.tile.fold > 1 and C.format.key.side_bytes:
        # The first key's side bytes lie between.
        place = lane + lane // HEADS.lanes * (HEADS.lanes // 2)
    if TRANSPOSED:
        at = base + offset[None, :] + place[:, None]
        inside = inside[:, None]
    else:
        at = base + offset[:, None] + place[None, :]
        inside = inside[None, :]
    if CLEAR:
        lanes = tl.load(at, mask=valid_lanes(tile, lane, TRANSPOSED, HEADS, C) & inside, other=0)
    elif FIRST + COUNT > LANES:
        lanes = tl.load(at, mask=inside, other=0)
    else:
        lanes = tl.load(at)
    return lanes


@triton.jit
def valid_lanes(tile, lane, TRANSPOSED: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr):
    """Mask of the lanes of valid keys, for rows of lanes or, TRANSPOSED, columns."""
    if C.tile.fold > 1:
        first, second = tl.split(tl.reshape(tile.valid, [C.tile.lane_rows, 2]))
        if TRANSPOSED:
            valid = tl.where(lane[:, None] < HEADS.lanes, first[None, :], second[None, :])
        else:
            valid = tl.where(lane[None, :] < HEADS.lanes, first[:, None], second[:, None])
    elif TRANSPOSED:
        valid = tile.valid[None, :]
    else:
        valid = tile.valid[:, None]
    return valid


@triton.jit
def load_chunks(
    plane, tile, offset, kv_head, HEADS: tl.constexpr, ROW: tl.constexpr, SIDE: tl.constexpr, C: tl.constexpr, TRANSPOSED: tl.constexpr,
    CLEAR: tl.constexpr, selectors=None,
):  # fmt: skip
    """The codes of a tile in the chunks that its rows are multiplied in, a tuple of what :func:`load_lanes` gives.

    SIDE: of pairs, with :func:`load_side_bytes`; ``selectors``: :func:`.side_bytes.side_selectors`."""
    result = ()
    for i in tl.static_range(len(ROW.chunks)):
        chunk = load_lanes(plane, tile, offset, kv_head, HEADS, ROW.alignment, C, TRANSPOSED, CLEAR, ROW.chunk_starts[i], ROW.chunks[i])
        if SIDE:
            FIRST: tl.constexpr = ROW.chunk_starts[i]
            COUNT: tl.constexpr = ROW.chunks[i]
            side = load_side_bytes(plane, offset, kv_head, selectors[i], HEADS, ROW.side_alignment, C, TRANSPOSED, FIRST, COUNT)
            chunk = (chunk, side)
        result = result + (chunk,)
    return result


@triton.jit
def load_scales(keys, values, tile, kv_head, C: tl.constexpr):
    """The scales of a tile's keys and values, [KEYS] float32 each; for invalid keys -1 and 0.

    No scale is negative, so that the sign says which scores to hide: masks in the layout of the scores would load the block table again.
    """
    k_offset = page_offset(tile.block, tile.slot, keys.scale_block_stride, keys.scale_slot_stride, C)
    if C.shape.same_strides:
        v_offset = k_offset
    else:
        v_offset = page_offset(tile.block, tile.slot, values.scale_block_stride, values.scale_slot_stride, C)
    head = kv_head.to(tl.int64)
    k_at = head * keys.scale_head_stride + k_offset
    v_at = head * values.scale_head_stride + v_offset
    if tile.block.shape[0] != C.tile.keys:
        neighbour = tl.arange(0, C.keys_an_id)[None, :]
        if C.shape.wide_pages:
            neighbour = neighbour.to(tl.int64)
        k = tl.reshape(tl.load(keys.scales + (k_at[:, None] + neighbour * keys.scale_slot_stride)), [C.tile.keys])
        v = tl.reshape(tl.load(values.scales + (v_at[:, None] + neighbour * values.scale_slot_stride)), [C.tile.keys])
    elif C.tile.small_vectors:
        # Both from one base: Triton's AMD backend (3.7) cannot select pointers.
        is_key = (tl.arange(0, 2) == 0)[None, :]
        between = (values.scales.to(tl.int64) - keys.scales.to(tl.int64)) // 4
        at = tl.where(is_key, k_at[:, None], v_at[:, None] + between)
        k, v = tl.split(tl.load(keys.scales + at, mask=tile.valid[:, None], other=tl.where(is_key, -1.0, 0.0)))
    else:
        k = tl.load(keys.scales + k_at, mask=tile.valid, other=-1.0)
        v = tl.load(values.scales + v_at, mask=tile.valid, other=0.0)
    return k, v
