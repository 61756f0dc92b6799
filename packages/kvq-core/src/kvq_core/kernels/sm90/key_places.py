"""Where the keys of a tile lie in the pages."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

UNSEEN = gl.constexpr(2**31 - 1)
"""A position beyond every row's."""


@gluon.jit
def key_positions(number, span, LAYOUT: gl.constexpr, C: gl.constexpr):
    """(block, slot, whether it is there to be seen, position) of a tile's keys, [KEYS]; unseen ones lie in some block that exists."""
    position = number * C.tile.keys + gl.arange(0, C.tile.keys, LAYOUT)
    block = gl.load(span.table + position // C.shape.block_size, mask=position < span.stop, other=-1)
    # Unsigned, so that a negative id is none of them.
    seen = block.to(gl.uint32) < span.num_blocks.to(gl.uint32)
    return gl.where(seen, block, 0), position % C.shape.block_size, seen, position


@gluon.jit
def lane_row_places(block, slot, plane, C: gl.constexpr):
    """Where rows of codes start, in units of 16 bytes, so that the compiler sees that they start at multiples of them."""
    if C.shape.wide_planes:
        block = block.to(gl.int64)
        slot = slot.to(gl.int64)
    return block * (plane.block_stride // 8) + slot * (plane.slot_stride // 8)
