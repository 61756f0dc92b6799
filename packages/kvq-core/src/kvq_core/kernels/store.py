"""New K/V rows on their way into slots. A program of a write kernel takes ``rows`` consecutive (token, head) pairs."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kvq_core.kernels.rotary import rotary_mean
from kvq_core.kernels.rounding import to_nearest


class WriteRows(NamedTuple):
    """[ROWS] vectors. ``exists``: a row there is. ``valid``: and its slot lies in the cache."""

    token: Any
    head: Any
    block: Any
    slot: Any
    exists: Any
    valid: Any


@triton.jit
def write_kernel(key, value, keys, values, slot_mapping, num_tokens, num_slots, C: tl.constexpr):
    """Quantize and store this program's rows of K or of V: all that a write kernel does."""
    K: tl.constexpr = C.format.key
    V: tl.constexpr = C.format.value
    K_HEADS: tl.constexpr = C.key_heads
    V_HEADS: tl.constexpr = C.value_heads
    rows = new_rows(slot_mapping, num_tokens, num_slots, C)
    if tl.program_id(1) == 0:
        K.write_plane(key, keys, rows, False, K_HEADS, C)
    else:
        V.write_plane(value, values, rows, True, V_HEADS, C)


@triton.jit
def copy_plane(source, plane, rows, IS_VALUE: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr):
    """Rows as they are: the ``write_plane`` of unquantized pages."""
    store_lanes(plane, rows, load_rows(source, rows, HEADS, C), HEADS, C)


@triton.jit
def new_rows(slot_mapping, num_tokens, num_slots, C: tl.constexpr):
    """The program's rows and where they go."""
    return rows_at(tl.arange(0, C.rows), slot_mapping, num_tokens, num_slots, C)


@triton.jit
def rows_at(row, slot_mapping, num_tokens, num_slots, C: tl.constexpr):
    """:func:`new_rows` at ``row``, 0 to ROWS - 1."""
    # Unsigned where it is divided: what may be negative takes five instructions for a shift.
    index = tl.program_id(0).to(tl.uint32).to(tl.int64) * C.rows + row
    token = index // C.num_kv_heads
    exists = token < num_tokens
    # Negative slots, and those of rows there are not, are as large as can be.
    slot = tl.load(slot_mapping + token, mask=exists, other=-1).to(tl.uint64)
    valid = slot < num_slots.to(tl.uint64)
    # A block's number fits: block tables are int32.
    block, slot = (slot // C.block_size).to(tl.uint32).to(tl.int64), (slot % C.block_size).to(tl.int64)
    return WriteRows(token, index % C.num_kv_heads, block, slot, exists, valid)


@triton.jit
def load_rows(source, rows, HEADS: tl.constexpr, C: tl.constexpr):
    """[ROWS, WAYS * WIDTH] in channel order, or in an order's places, 0 in padding. Rows that are not written are read all the same: the
    load need not wait for their slots."""
    return load_rows_at(tl.arange(0, HEADS.width * HEADS.ways), source, rows, HEADS, C)


@triton.jit
def load_rows_at(place, source, rows, HEADS: tl.constexpr, C: tl.constexpr):
    """:func:`load_rows` at ``place``, 0 to WAYS * WIDTH - 1."""
    place = place[None, :]
    mask = rows.exists[:, None]
    if HEADS.width * HEADS.ways != HEADS.size:
        mask = mask & (place < HEADS.size)
    offset = strides(rows.token, source.token_stride) + strides(rows.head, source.head_stride)
    channel = place
    if HEADS.parts > 1:
        order = source.factor + rows.head[:, None] * (2 * HEADS.size) + HEADS.size
        channel = tl.load(order + place, mask=mask, other=0.0).to(tl.int32, bitcast=True)
    x = tl.load(source.ptr + offset[:, None] + channel, mask=mask, other=0.0)
    if source.mean is not None:
        x = smooth(x, source, rows, place, channel, mask, HEADS, C)
    return x


@triton.jit
def smooth(x, source, rows, place, channel, mask, HEADS: tl.constexpr, C: tl.constexpr):
    """(x - mean) * factor, rounded to the rows' own dtype; ``place`` [1, n]: in a stored row, ``channel`` [1 or ROWS, n]: what is there."""
    at = rows.head[:, None] * HEADS.size + channel
    y = x.to(tl.float32) - tl.load(source.mean + at, mask=mask, other=0.0)
    if source.rotary is not None:
        position = tl.load(source.positions + rows.token, mask=rows.exists, other=0)
        y = y - rotary_mean(source.rotary, rows.head, position, channel, mask, HEADS, C.use_asm)
    if source.factor is not None:
        if HEADS.parts > 1:
            at = rows.head[:, None] * (2 * HEADS.size) + place
        y = y * tl.load(source.factor + at, mask=mask, other=0.0)
    return to_nearest(y, x.dtype, C.upcast_dots)


@triton.jit
def store_lanes(plane, rows, lanes, HEADS: tl.constexpr, C: tl.constexpr, TOGETHER: tl.constexpr = 8):
    """Scatter packed rows [ROWS, WIDTH] into their slots, each thread TOGETHER lanes of a row: what it has of them needs no exchange."""
    store_lanes_at(tl.max_contiguous(tl.arange(0, HEADS.width), TOGETHER), plane, rows, lanes, HEADS)


@triton.jit
def store_lanes_at(lane, plane, rows, lanes, HEADS: tl.constexpr):
    """:func:`store_lanes` at ``lane``, 0 to WIDTH - 1."""
    mask = rows.valid[:, None]
    if HEADS.padded:
        mask = mask & (lane < HEADS.lanes)[None, :]
    offset = offsets(rows, plane.block_stride, plane.slot_stride, plane.head_stride)
    tl.store(plane.codes + offset[:, None] + lane[None, :], lanes, mask=mask)


@triton.jit
def store_side_bytes(plane, rows, side, HEADS: tl.constexpr, C: tl.constexpr):
    """Scatter the bytes beside the lanes of packed rows, [ROWS, WIDTH], behind them: a word for each two lanes half a row apart."""
    lane = tl.arange(0, HEADS.width)
    HALF: tl.constexpr = HEADS.lanes // 2
    mask = rows.valid[:, None]
    if HEADS.padded:
        mask = mask & (lane < HEADS.lanes)[None, :]
    offset = offsets(rows, plane.block_stride, plane.slot_stride, plane.head_stride) + HEADS.lanes
    at = plane.codes.to(tl.pointer_type(tl.uint8), bitcast=True) + offset[:, None] * 2 + (lane % HALF * 2 + lane // HALF)[None, :]
    tl.store(at, side.to(tl.uint8), mask=mask)


@triton.jit
def store_scales(plane, rows, scales):
    """Scatter [ROWS] scales into their slots."""
    offset = offsets(rows, plane.scale_block_stride, plane.scale_slot_stride, plane.scale_head_stride)
    tl.store(plane.scales + offset, scales, mask=rows.valid)


@triton.jit
def offsets(rows, block_stride, slot_stride, head_stride):
    """[ROWS] int64, where rows go."""
    return strides(rows.block, block_stride) + strides(rows.slot, slot_stride) + strides(rows.head, head_stride)


@triton.jit
def strides(count, stride):
    """So many strides. None of a tensor is negative, and where the compiler knows, the product is one instruction, not two or three."""
    tl.assume(stride >= 0)
    return count * stride


@triton.jit
def in_head(x, fill: tl.constexpr, HEADS: tl.constexpr):
    """x [ROWS, WIDTH] with ``fill`` in the padding lanes."""
    if HEADS.padded:
        y = tl.where((tl.arange(0, HEADS.width) < HEADS.lanes)[None, :], x, fill)
    else:
        y = x
    return y


@triton.jit
def has_nan(x):
    """[ROWS] bool: whether a row of x holds NaN (the hardware's min and max skip it)."""
    return tl.max((x != x).to(tl.int32), 1) > 0


@triton.jit
def any_row(x, ASM: tl.constexpr):
    """Whether any of [ROWS] bool is set, for a branch. By a vote of each warp: else the compiler takes the branch for divergent, and adds
    code for that at each shuffle in it."""
    found = x.to(tl.int32)
    if ASM:
        found = tl.inline_asm_elementwise(
            "{ .reg .pred here, any; setp.ne.s32 here, $1, 0; vote.sync.any.pred any, here, 0xffffffff; selp.b32 $0, 1, 0, any; }",
            "=r,r",
            [found],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return tl.max(found, 0) != 0
