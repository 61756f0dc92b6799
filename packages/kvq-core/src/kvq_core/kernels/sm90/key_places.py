"""Where the keys of a tile lie in the pages."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvq_core.kernels.sm90.layouts import keys_of_run, run_layout

UNSEEN = gl.constexpr(2**31 - 1)
"""A position beyond every row's."""


@gluon.jit
def key_positions(number, span, LAYOUT: gl.constexpr, C: gl.constexpr):
    """(block, slot, whether it is there to be seen, position) of a tile's keys, [KEYS]; unseen ones lie in some block that exists."""
    position = number * C.tile.keys + gl.arange(0, C.tile.keys, LAYOUT)
    block = gl.load(span.table + position // C.shape.block_size, mask=position < span.stop, other=-1)
    seen = exists(block, span)
    return gl.where(seen, block, 0), position % C.shape.block_size, seen, position


@gluon.jit
def row_places(n, span, EDGE: gl.constexpr, C: gl.constexpr):
    """(block, slot, whether it is there to be seen) of a tile's keys, [runs, keys of one]: of a run, which lies in one block, looked up
    once. Unseen keys lie in some block that exists."""
    RUN: gl.constexpr = keys_of_run(C.shape.block_size, C.tile.keys)
    BY_KEY: gl.constexpr = gl.SliceLayout(2, run_layout(C.channels, C.tile.keys, RUN))
    position = n * C.tile.keys + gl.arange(0, C.tile.keys // RUN, gl.SliceLayout(1, BY_KEY)) * RUN
    if EDGE:
        block = gl.load(span.table + position // C.shape.block_size, mask=position < span.stop, other=-1)
    else:
        block = gl.load(span.table + position // C.shape.block_size)
    there = exists(block, span)
    key = gl.arange(0, RUN, gl.SliceLayout(0, BY_KEY))[None, :]
    seen = there[:, None] & (key >= 0)  # of all its keys
    if EDGE:
        seen = seen & (position[:, None] + key < span.stop)
    return gl.where(there, block, 0)[:, None], (position % C.shape.block_size)[:, None] + key, seen


@gluon.jit
def exists(block, span):
    """Which ids are those of the cache's blocks: unsigned, so that a negative one is not."""
    return block.to(gl.uint32) < span.num_blocks.to(gl.uint32)


@gluon.jit
def row_starts(block, slot, plane, C: gl.constexpr):
    """Where rows of codes start, in units of 16 bytes, so that the compiler sees that they start at multiples of them."""
    if C.shape.wide_planes:
        block = block.to(gl.int64)
        slot = slot.to(gl.int64)
    return block * (plane.block_stride // 8) + slot * (plane.slot_stride // 8)
