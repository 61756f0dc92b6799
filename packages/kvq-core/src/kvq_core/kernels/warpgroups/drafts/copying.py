"""Tiles on their way into shared memory, some ahead of the one in work."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from kvq_core.kernels.warpgroups.drafts.layouts import BY_ROW, COPY, Places
from kvq_core.kernels.warpgroups.layouts import HALF, VECTOR


@gluon.jit
def find_tile(number, k, v, span, CHECKED: gl.constexpr, SCALED: gl.constexpr, C: gl.constexpr):
    """Where a tile's codes and scales lie, for :func:`copy_tile`. What it waits for is block ids: there should be time between the two."""
    block, slot, exists = find_keys(number, span, BY_ROW, CHECKED, C)
    if C.wide_planes:
        block = block.to(gl.int64)
        slot = slot.to(gl.int64)
    k_place = (block * (k.block_stride // 8) + slot * (k.slot_stride // 8)) * 8
    v_place = k_place
    if not C.same_strides:
        v_place = (block * (v.block_stride // 8) + slot * (v.slot_stride // 8)) * 8
    k_scale = k_place
    v_scale = v_place
    scaled = exists
    if SCALED:
        block, slot, scaled = find_keys(number, span, VECTOR, CHECKED, C)
        if C.wide_planes:
            block = block.to(gl.int64)
            slot = slot.to(gl.int64)
        k_scale = block * k.scale_block_stride + slot * k.scale_slot_stride
        v_scale = k_scale
        if not C.same_strides:
            v_scale = block * v.scale_block_stride + slot * v.scale_slot_stride
    return Places(k_place, v_place, exists, k_scale, v_scale, scaled)


@gluon.jit
def find_keys(number, span, LAYOUT: gl.constexpr, CHECKED: gl.constexpr, C: gl.constexpr):
    """(block, slot, whether it is there) of a tile's keys, [KEYS]. Unless CHECKED they are all there."""
    position = number * C.keys + gl.arange(0, C.keys, LAYOUT)
    if CHECKED:
        block = gl.load(span.table + position // C.block_size, mask=position < span.stop, other=-1)
        exists = (block >= 0) & (block < span.num_blocks)
        block = gl.where(exists, block, 0)
    else:
        block = gl.load(span.table + position // C.block_size)
        exists = block >= 0
    return block, position % C.block_size, exists


@gluon.jit
def copy_tile(places, at, k, v, tiles, CHECKED: gl.constexpr, SCALED: gl.constexpr, C: gl.constexpr):
    """Begin to copy a tile's codes and scales to place ``at``: one group of copies, of nothing but zeros beyond the last tile."""
    lane = gl.arange(0, HALF, gl.SliceLayout(0, COPY))[None, :]
    copy(tiles.k.index(at), k.codes + (places.k[:, None] + lane), places.exists[:, None], CHECKED)
    copy(tiles.v.index(at), v.codes + (places.v[:, None] + lane), places.exists[:, None], CHECKED)
    if SCALED:
        copy(tiles.k_scales.index(at), k.scales + places.k_scale, places.scaled, CHECKED)
        copy(tiles.v_scales.index(at), v.scales + places.v_scale, places.scaled, CHECKED)
    async_copy.commit_group()


@gluon.jit
def copy(target, source, exists, CHECKED: gl.constexpr):
    """What does not exist becomes 0, since 0 * NaN is NaN."""
    if CHECKED:
        async_copy.async_copy_global_to_shared(target, source, mask=exists)
    else:
        async_copy.async_copy_global_to_shared(target, source)
