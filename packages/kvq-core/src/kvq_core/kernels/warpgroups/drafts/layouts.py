"""Who holds what, where: layouts of registers and shared memory, and the bundles that the functions are given."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

STREAMS = gl.constexpr(2)
LANES_TILE = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
"""Rows of 64 lanes such that ``ldmatrix`` meets every bank once, turned or not."""
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
"""A tile of lanes on its way into shared memory, 16 bytes a thread."""
EVERY_WARP = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
"""A word of each warp's, all of them in every thread."""
BY_ROW = gl.constexpr(gl.SliceLayout(1, COPY.value))


@gluon.constexpr_function
def product(rows):
    """Results [64, rows] of ``wgmma``, or several such one above the other."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, rows, 16])


@gluon.constexpr_function
def left_operand(rows):
    """[64, k] of 16 bits, in registers."""
    return gl.DotOperandLayout(0, product(rows), 2)


@gluon.constexpr_function
def right_operand(columns):
    """[k, columns] of 16 bits, or turned, in shared memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, columns * 2), element_bitwidth=16, rank=2)


class Tiles(NamedTuple):
    """Shared memory: ``stages`` tiles of lanes [KEYS, 64] and scales [KEYS] of K and V, the weights [KEYS, ROWS] of this tile and the one
    before, and the query's streams [ROWS, 64]; ``flags``: two words of each warp's."""

    k: Any
    v: Any
    k_scales: Any
    v_scales: Any
    weights: Any
    query: Any
    flags: Any


class Span(NamedTuple):
    """Which keys: those before ``stop`` in the blocks of ``table``, and whether they are ``complete``, each in a block of the cache's."""

    table: Any
    num_blocks: Any
    stop: Any
    complete: Any


class Places(NamedTuple):
    """Blocks and slots of a tile's keys, [KEYS], and whether they are there: by rows of COPY; and of VECTOR, as their scales are copied."""

    block: Any
    slot: Any
    exists: Any
    scale_block: Any
    scale_slot: Any
    scale_exists: Any


class Rows(NamedTuple):
    """Facts of the query rows, [ROWS]: what is left to multiply scores by, what the codes' offset adds to them, and positions."""

    left: Any
    seed: Any
    position: Any


class Scales(NamedTuple):
    """What a key's products are multiplied by, and its weights, [KEYS]."""

    k: Any
    v: Any


class State(NamedTuple):
    """What was summed: values' two streams [64, ROWS], and weights [4, 8, ROWS], by every thread for its own keys.

    ``top`` [ROWS]: the maximum that both are relative to. ``largest``: the values' largest scale, likewise; ``grow``: 256 over it.
    """

    low: Any
    high: Any
    total: Any
    top: Any
    largest: Any
    grow: Any
