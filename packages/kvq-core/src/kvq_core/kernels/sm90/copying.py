"""The copying group, in the place of the unpacking one: tiles that are operands already, of unquantized pages or staged.

Copies arrive at a round's barrier themselves, so the group waits for none. What a round is: pingpong.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kvq_core.kernels.sm90.key_places import UNSEEN, key_positions, row_places
from kvq_core.kernels.sm90.layouts import HALF, VECTOR, row_layout
from kvq_core.kernels.sm90.queries import existing
from kvq_core.kernels.sm90.renamed import async_load
from kvq_core.kernels.sm90.rotary import PAIRS


@gluon.jit
def copy_tiles(keys, values, span, shared, C: gl.constexpr):
    """Rounds of unquantized rows: a tile's keys, and the values of the one before."""
    block, slot, seen = copy_keys(0, keys, span, shared, True, C)
    announce(0, shared, C)
    for n in range(1, span.whole):
        block, slot, seen = copy_round(n, keys, values, block, slot, seen, span, shared, False, C)
    for n in range(gl.maximum(span.whole, 1), span.last):
        block, slot, seen = copy_round(n, keys, values, block, slot, seen, span, shared, True, C)
    await_room(span.last, shared, C)
    mbarrier.arrive(shared.k_full.index(span.last % C.tile.stages), count=1)
    copy_rows(shared.v.index(span.last % C.tile.stages), values, block, slot, seen, C)
    announce(span.last, shared, C)
    async_copy.wait_group(0)


@gluon.jit
def copy_round(n, keys, values, block, slot, seen, span, shared, EDGE: gl.constexpr, C: gl.constexpr):
    """Round n, where tile n - 1's rows have these places; tile n's, of which at an EDGE some may be behind the last key."""
    await_room(n, shared, C)
    copy_rows(shared.v.index(n % C.tile.stages), values, block, slot, seen, C)
    block, slot, seen = copy_keys(n, keys, span, shared, EDGE, C)
    announce(n, shared, C)
    return block, slot, seen


@gluon.jit
def copy_keys(n, keys, span, shared, EDGE: gl.constexpr, C: gl.constexpr):
    """Begin to copy tile n's keys, whose places it returns."""
    block, slot, seen = row_places(n, span, EDGE, C)
    _, _, key_seen, key_position = key_positions(n, span, VECTOR, C)
    shared.positions.index(n % C.tile.stages).store(gl.where(key_seen, key_position, UNSEEN))
    mbarrier.arrive(shared.k_full.index(n % C.tile.stages), count=1)
    copy_rows(shared.k.index(n % C.tile.stages), keys, block, slot, seen, C)
    return block, slot, seen


@gluon.jit
def await_room(n, shared, C: gl.constexpr):
    """Wait until the buffers of round n are free."""
    mbarrier.wait(shared.k_free.index(n % C.tile.stages), (n // C.tile.stages) & 1 ^ 1)


@gluon.jit
def announce(n, shared, C: gl.constexpr):
    """Round n is full when what was begun to be copied for it has arrived."""
    async_copy.mbarrier_arrive(shared.k_full.index(n % C.tile.stages), increment_count=False)


@gluon.jit
def copy_rows(target, plane, block, slot, seen, C: gl.constexpr):
    """Begin to copy a tile's rows; those of unseen keys become 0, since 0 * NaN is NaN, as do channels that a head has not."""
    BY_ROW: gl.constexpr = gl.SliceLayout(1, row_layout(C.channels))
    if C.shape.wide_planes:
        block = block.to(gl.int64)
        slot = slot.to(gl.int64)
    row = (block * plane.block_stride + slot * plane.slot_stride).reshape([C.tile.keys])
    # Rows start at multiples of 16 bytes.
    row = gl.multiple_of(gl.convert_layout(row, BY_ROW, assert_trivial=True), 8)
    seen = gl.convert_layout(seen.reshape([C.tile.keys]), BY_ROW, assert_trivial=True)
    channel = gl.arange(0, C.channels, gl.SliceLayout(0, row_layout(C.channels)))
    at = plane.codes + row[:, None] + channel[None, :]
    async_load(target, at, mask=existing(seen, channel, C))
    async_copy.commit_group()


@gluon.jit
def copy_staged(keys, values, span, shared, C: gl.constexpr):
    """Rounds of staged rows (:mod:`kvq_core.kernels.staging`), and their scales; the next ones' are on their way meanwhile."""
    k_scale, v_scale = load_staged_scales(0, keys, values, span, C)
    copy_staged_keys(0, keys, k_scale, span, shared, C)
    announce(0, shared, C)
    for n in range(1, span.last):
        k_scale, next_v_scale = load_staged_scales(n, keys, values, span, C)
        await_room(n, shared, C)
        copy_staged_values(n, values, v_scale, span, shared, C)
        copy_staged_keys(n, keys, k_scale, span, shared, C)
        announce(n, shared, C)
        v_scale = next_v_scale
    await_room(span.last, shared, C)
    copy_staged_values(span.last, values, v_scale, span, shared, C)
    mbarrier.arrive(shared.k_full.index(span.last % C.tile.stages), count=1)
    announce(span.last, shared, C)
    async_copy.wait_group(0)


@gluon.jit
def copy_staged_values(n, values, scale, span, shared, C: gl.constexpr):
    """Begin to copy the values of round n, which are tile n - 1's."""
    at = n % C.tile.stages
    copy_block(shared.v.index(at), values, span.first + n - 1, 0, C.channels, C.channels, C)
    shared.v_scales.index(at).store(scale)
    # The scale that rows share is a power of two. Where each row has its own, the largest's power of two serves.
    largest = (gl.max(scale, 0).to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
    shared.v_largest.index(at).store(gl.zeros([HALF], gl.float32, VECTOR) + largest)


@gluon.jit
def copy_staged_keys(n, keys, scale, span, shared, C: gl.constexpr):
    """Begin to copy tile n's keys; what was stored for the round is there at once."""
    at = n % C.tile.stages
    position = n * C.tile.keys + gl.arange(0, C.tile.keys, VECTOR)
    # The scale of a key that is missing is negative. That of one with a NaN is a NaN, and shows.
    shared.positions.index(at).store(gl.where(scale < 0.0, UNSEEN, position))
    shared.k_scales.index(at).store(scale)
    mbarrier.arrive(shared.k_full.index(at), count=1)
    copy_block(shared.k.index(at), keys, span.first + n, 0, C.channels, C.staged_key_size, C)
    if C.features.rotary_pairs > 0:
        copy_block(shared.rotary.index(at), keys, span.first + n, C.channels, 2 * PAIRS, C.staged_key_size, C)


@gluon.jit
def load_staged_scales(n, keys, values, span, C: gl.constexpr):
    """Of a tile's keys and values, [KEYS] float32 each."""
    at = (span.first + n).to(gl.int64) * keys.scale_block_stride + gl.arange(0, C.tile.keys, VECTOR)
    return gl.load(keys.scales + at), gl.load(values.scales + at)


@gluon.jit
def copy_block(target, plane, block, FIRST: gl.constexpr, COUNT: gl.constexpr, SIZE: gl.constexpr, C: gl.constexpr):
    """Begin to copy COUNT channels, from FIRST on, of a staged tile's rows of SIZE, which lie side by side."""
    LAYOUT: gl.constexpr = row_layout(COUNT)
    row = gl.arange(0, C.tile.keys, gl.SliceLayout(1, LAYOUT))
    channel = FIRST + gl.arange(0, COUNT, gl.SliceLayout(0, LAYOUT))
    start = plane.codes + block.to(gl.int64) * plane.block_stride
    async_load(target, start + (row[:, None] * SIZE + channel[None, :]))
    async_copy.commit_group()
