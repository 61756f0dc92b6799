"""Tiles on their way into shared memory, some ahead of the one in work."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from kvq_core.kernels.paged_kv import entries_of
from kvq_core.kernels.sm90.decode_multirow.layouts import KeySlots, copying
from kvq_core.kernels.sm90.layouts import VECTOR
from kvq_core.kernels.sm90.renamed import async_load


@gluon.jit
def find_tile(number, span, CHECKED: gl.constexpr, SCALED: gl.constexpr, C: gl.constexpr):
    """In which blocks a tile's keys lie, for :func:`copy_tile`: loads, and nothing that waits for them."""
    BY_ROW: gl.constexpr = gl.SliceLayout(1, copying(C.shape.head_size // C.format.key.ways))
    block, slot, exists = find_keys(number, span, BY_ROW, CHECKED, C)
    scale_block, scale_slot, scale_exists = block, slot, exists
    if SCALED:
        scale_block, scale_slot, scale_exists = find_keys(number, span, VECTOR, CHECKED, C)
    return KeySlots(block, slot, exists, scale_block, scale_slot, scale_exists)


@gluon.jit
def find_keys(number, span, LAYOUT: gl.constexpr, CHECKED: gl.constexpr, C: gl.constexpr):
    """(block, slot, whether it is there) of a tile's keys, [KEYS]. Unless CHECKED they are all there."""
    KEYS: gl.constexpr = C.tile.keys
    entry, slot = entries_of(number, gl.arange(0, KEYS, LAYOUT), KEYS, C.shape.block_size)
    if CHECKED:
        inside = number * KEYS + gl.arange(0, KEYS, LAYOUT) < span.stop
        block = gl.load(span.table + entry, mask=inside, other=-1)
        exists = (block >= 0) & (block < span.num_blocks)
        block = gl.where(exists, block, 0)
    else:
        block = gl.load(span.table + entry)
        exists = block >= 0
    return block, slot, exists


@gluon.jit
def exist(number, span, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Whether a tile's keys are there, [KEYS]. Of complete ones no block is looked up: it would be waited for."""
    KEYS: gl.constexpr = C.tile.keys
    entry, _ = entries_of(number, gl.arange(0, KEYS, LAYOUT), KEYS, C.shape.block_size)
    inside = number * KEYS + gl.arange(0, KEYS, LAYOUT) < span.stop
    block = gl.load(span.table + entry, mask=inside & (not span.complete), other=0)
    return inside & (block >= 0) & (block < span.num_blocks)


@gluon.jit
def copy_tile(location, at, k, v, tiles, CHECKED: gl.constexpr, SCALED: gl.constexpr, C: gl.constexpr):
    """Begin to copy a tile's codes and scales to place ``at``: one group of copies, of nothing but zeros beyond the last tile."""
    block, slot = location.block, location.slot
    if C.shape.wide_planes:
        block = block.to(gl.int64)
        slot = slot.to(gl.int64)
    k_offset = (block * (k.block_stride // 8) + slot * (k.slot_stride // 8)) * 8
    v_offset = k_offset
    if not C.shape.same_strides:
        v_offset = (block * (v.block_stride // 8) + slot * (v.slot_stride // 8)) * 8
    LANES: gl.constexpr = C.shape.head_size // C.format.key.ways
    lane = gl.arange(0, LANES, gl.SliceLayout(0, copying(LANES)))[None, :]
    copy(tiles.k.index(at), k.codes + (k_offset[:, None] + lane), location.exists[:, None], CHECKED)
    copy(tiles.v.index(at), v.codes + (v_offset[:, None] + lane), location.exists[:, None], CHECKED)
    if SCALED:
        block, slot = location.scale_block, location.scale_slot
        if C.shape.wide_planes:
            block = block.to(gl.int64)
            slot = slot.to(gl.int64)
        k_offset = block * k.scale_block_stride + slot * k.scale_slot_stride
        v_offset = k_offset
        if not C.shape.same_strides:
            v_offset = block * v.scale_block_stride + slot * v.scale_slot_stride
        copy(tiles.k_scales.index(at), k.scales + k_offset, location.scale_exists, CHECKED)
        copy(tiles.v_scales.index(at), v.scales + v_offset, location.scale_exists, CHECKED)
    async_copy.commit_group()


@gluon.jit
def copy(target, source, exists, CHECKED: gl.constexpr):
    """What does not exist becomes 0, since 0 * NaN is NaN."""
    if CHECKED:
        async_load(target, source, mask=exists)
    else:
        async_load(target, source)
