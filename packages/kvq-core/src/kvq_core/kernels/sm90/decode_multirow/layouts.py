"""Who holds what, where: layouts of registers and shared memory, and the bundles that the functions are given."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

FARTHEST = gl.constexpr(3.4028234663852886e38)
"""The largest float32. A row that has seen nothing is relative to minus this, which is no more than any score, and whose products with 0
are 0."""
OFFSETS_TILE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
EVERY_WARP = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
"""A word of each warp's, all of them in every thread."""


@gluon.constexpr_function
def lane_tile(lanes):
    """Rows of ``lanes`` 16-bit lanes in shared memory such that ``ldmatrix`` meets every bank once, transposed or not."""
    return gl.SwizzledSharedLayout(8, max(1, 64 // lanes), min(8, lanes // 8), [1, 0])


@gluon.constexpr_function
def copying(lanes):
    """A tile of lanes on its way there, 16 bytes a thread."""
    threads = lanes // 8
    return gl.BlockedLayout([1, 8], [32 // threads, threads], [4, 1], [1, 0])


@gluon.constexpr_function
def along(rows):
    """Query rows [rows, 128]: a thread has 16 channels, eight of which lie between neighbours."""
    bits = [[1 << b, 0] for b in range(rows.bit_length() - 1)]
    registers = [[0, 8], [0, 16], [0, 32], [0, 64], *bits[4:]]
    return gl.DistributedLinearLayout(registers, [[0, 1], [0, 2], [0, 4], *bits[:2]], bits[2:4], [], [rows, 128])


@gluon.constexpr_function
def product(rows):
    """Results [64, rows] of ``wgmma``, or several such one above the other."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, rows, 16])


@gluon.constexpr_function
def left_operand(rows):
    """[64, k] of 16 bits, in registers."""
    return gl.DotOperandLayout(0, product(rows), 2)


@gluon.constexpr_function
def stacked(lanes, keys):
    """[64 / lanes, lanes, keys]: a left operand [64, keys] whose rows are ways of so many lanes, one above the other. Each of the four
    warps has 16 lanes, or those of one way."""
    columns = [[0, 0, 1 << b] for b in range(keys.bit_length() - 1)]
    registers = [columns[0], [0, 8, 0], *columns[3:]]
    warps = [[0, bit, 0] if bit < lanes else [bit // lanes, 0, 0] for bit in (16, 32)]
    threads = [columns[1], columns[2], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(registers, threads, warps, [], [64 // lanes, lanes, keys])


@gluon.constexpr_function
def offsets_of(ways):
    """[ways, keys], up to four ways: a warp has one."""
    return gl.BlockedLayout([1, 1], [1, 32], [ways, 4 // ways], [1, 0])


@gluon.constexpr_function
def right_operand(columns):
    """[k, columns] of 16 bits, or transposed, in shared memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, columns * 2), element_bitwidth=16, rank=2)


class SharedTiles(NamedTuple):
    """Shared memory: ``stages`` tiles of lanes [KEYS, LANES] and scale words [KEYS] of K and V, the weights [KEYS, ROWS] of this tile and
    the one before, and the two halves of the query's ways [ROWS, 64]; ``offsets``: where values have zero points, what takes them off
    in these two tiles; ``flags``: two words of each warp's."""

    k: Any
    v: Any
    k_scales: Any
    v_scales: Any
    weights: Any
    query: Any
    offsets: Any
    flags: Any


class KeyBlocks(NamedTuple):
    """Which keys: those before ``stop`` in the blocks of ``table``, and whether they are ``complete``, each in a block of the cache's."""

    table: Any
    num_blocks: Any
    stop: Any
    complete: Any


class KeySlots(NamedTuple):
    """Blocks and slots of a tile's keys, [KEYS], and whether they are there: as their codes are copied, and as scales are (VECTOR)."""

    block: Any
    slot: Any
    exists: Any
    scale_block: Any
    scale_slot: Any
    scale_exists: Any


class QueryFactors(NamedTuple):
    """Facts of the query rows, [ROWS]: what is left to multiply products by, and what of that once a rotary mean has joined them; what the
    codes' offset adds to them; positions."""

    row_scale: Any
    score_scale: Any
    seed: Any
    position: Any


class Scales(NamedTuple):
    """What a key's products are multiplied by, its zero point, and what its weights are multiplied by, [KEYS] float32; ``offsets``: what
    takes the values' zero points off."""

    k: Any
    k_zero: Any
    v: Any
    offsets: Any


class State(NamedTuple):
    """What was summed: values' ways, in two halves [64, ROWS], and weights [4, 8, ROWS], by every thread for its own keys.

    ``shift`` [ROWS]: minus the maximum that both are relative to, in log2 units; FARTHEST before there is one. ``largest``: the values'
    largest scale, likewise; ``grow``: 256 over it.
    """

    low: Any
    high: Any
    total: Any
    shift: Any
    largest: Any
    grow: Any
