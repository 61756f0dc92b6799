"""Who holds what, where: register and shared-memory layouts, and the bundles that the groups are given.

Bundles are flat, and hold no None: another pointer stands for one that is missing (Triton 3.6 cannot put a None into a tuple).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

HALF = gl.constexpr(64)
"""Query rows of a multiplying group."""
GROUPS = gl.constexpr(2)
"""Multiplying groups."""
WARPS = gl.constexpr(4)
"""Of every group."""
THREADS = gl.constexpr(128)
"""Likewise."""


@gluon.constexpr_function
def product_layout(columns):
    """Results of ``wgmma``: a row's columns lie in four threads of one warp, whatever their number."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def row_layout(channels):
    """Rows as they come from memory, 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [256 // channels, channels // 8], [4, 1], [1, 0])


@gluon.constexpr_function
def keys_of_run(block_size, keys):
    """How many keys of a tile lie in one block, wherever the tile begins: a power of two."""
    return min(block_size & -block_size, keys)


@gluon.constexpr_function
def run_layout(channels, keys, run):
    """``row_layout``, as [runs, keys of one, channels]."""

    def bits(first, last):
        return [1 << bit for bit in range(first.bit_length() - 1, last.bit_length() - 1)]

    rows = [[row // run, row % run, 0] for row in bits(1, keys)]
    together = (256 // channels).bit_length() - 1  # of a warp
    lanes = [*([0, 0, channel] for channel in bits(8, channels)), *rows[:together]]
    return gl.DistributedLinearLayout(
        [*([0, 0, channel] for channel in bits(1, 8)), *rows[together + 2 :]],
        lanes,
        rows[together : together + 2],
        [],
        [keys // run, run, channels],
    )


PRODUCT = gl.constexpr(product_layout(128))
"""Scores."""
ROWS = gl.constexpr(gl.SliceLayout(1, PRODUCT.value))
COLUMNS = gl.constexpr(gl.SliceLayout(0, PRODUCT.value))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, PRODUCT.value, 2))
"""The left operand in registers: what PRODUCT holds, rounded, in the same threads."""
QUERY = gl.constexpr(row_layout(128))
ROTARY_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0]))
"""Rows of 16 pairs: a thread has eight of one."""
VECTOR = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))

OPERAND = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
ROTARY = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2))
"""An operand of 32 columns."""
OPERAND_PAIRS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))
"""OPERAND's bytes, two values a word."""
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


class Codes(NamedTuple):
    """K or V of one kv head in the cache. Strides as in :class:`~kvq_core.kernels.args.PlaneArgs`."""

    codes: Any
    scales: Any
    block_stride: Any
    slot_stride: Any
    scale_block_stride: Any
    scale_slot_stride: Any


@gluon.jit
def codes_of_head(plane, kv_head, missing, SCALED: gl.constexpr):
    """``plane``'s rows of one kv head; ``missing``: the pointer that stands for scales where rows have none."""
    head = kv_head.to(gl.int64)
    scales = missing
    if SCALED:
        scales = plane.scales + head * plane.scale_head_stride
    # All strides of codes are multiples of 16 bytes; said in a way that the compiler sees.
    codes = plane.codes + head * (plane.head_stride // 8) * 8
    return Codes(codes, scales, plane.block_stride, plane.slot_stride, plane.scale_block_stride, plane.scale_slot_stride)


class KeyRange(NamedTuple):
    """Which keys: those before ``stop``, in ``last`` tiles, of which the first ``whole`` lie where all rows see them. ``first``: the number
    of the first tile, if tiles are staged."""

    table: Any
    first: Any
    num_blocks: Any
    whole: Any
    last: Any
    stop: Any


class Buffers(NamedTuple):
    """Shared memory for ``stages`` tiles: operands, what goes with each key, and barriers that say which are full and which free.

    ``k_scales``, ``v_scales`` [KEYS] float32: unpacked values' are relative to the largest so far, which is in all of ``v_largest`` [HALF];
    staged values' are as they are, with the tile's own largest in ``v_largest``.
    ``positions`` [KEYS] int32: each key's position, beyond all others if it is not to be seen. ``rotary``: cosines and sines of positions,
    where there is a rotary mean. Of copied tiles ``k_full`` and ``k_free`` are for rounds (pingpong.py), whose ``v_scales`` and
    ``v_largest`` are those of the tile before; each multiplying group waits for its ``turn_0`` or ``turn_1`` before it multiplies.
    """

    k: Any
    v: Any
    k_scales: Any
    v_scales: Any
    v_largest: Any
    positions: Any
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any
    rotary: Any
    turn_0: Any
    turn_1: Any


class OwnBuffers(NamedTuple):
    """Shared memory of the multiplying groups: their query rows ``tile`` [GROUPS, HALF, channels], and what these take of a rotary mean,
    ``rotary`` [GROUPS, HALF, 32]. Where rows stay rotated, the rotation's ``matrix``, and the barrier that says when it is ``ready``."""

    tile: Any
    matrix: Any
    ready: Any
    rotary: Any


class GroupRows(NamedTuple):
    """A group's query rows as products take them: their tile in shared memory, and what they take of a rotary mean; ``position`` [HALF].

    ``score_scale`` [HALF] turns scores into log2 units. ``row_scale`` [HALF]: what does so before a rotary mean joins, in log2 units.
    """

    tile: Any
    rotary_tile: Any
    position: Any
    row_scale: Any
    score_scale: Any


class Sums(NamedTuple):
    """What a group has summed: weighted values ``acc`` [HALF, D], in units of ``largest`` [HALF], and weights ``total`` [HALF, 4], by each
    of a row's threads; weights are relative to ``reference`` [HALF] (softmax.py)."""

    acc: Any
    reference: Any
    total: Any
    largest: Any


class RotaryArgs(NamedTuple):
    """A rotary mean: its table of one head, the position of the sequence's first key, what turns q.k into log2 units, and the query rows'
    part of its products, [GROUPS, HALF, 32] in shared memory."""

    table: Any
    first: Any
    unit: Any
    tile: Any


class QueryBlock(NamedTuple):
    """A program's query rows: ``num_rows`` tokens from the ``row_start``-th of their sequence on, whose first has number ``first_token`` in
    the batch and ``context_len`` keys before it."""

    row_start: Any
    num_rows: Any
    first_token: Any
    context_len: Any
    kv_head: Any


class QueryTile(NamedTuple):
    """Which query rows, where they are and go, and the tiles in shared memory that they take. ``matrix_ptr``: the rotation's matrix in
    memory, if staged rows stay rotated."""

    queries: Any
    token_stride: Any
    head_stride: Any
    mean: Any
    factor: Any
    output: Any
    out_token_stride: Any
    out_head_stride: Any
    lse: Any
    other: Any
    other_lse: Any
    sinks: Any
    score_unit: Any
    value_unit: Any
    row_start: Any
    num_rows: Any
    first_token: Any
    context_len: Any
    kv_head: Any
    tile: Any
    matrix: Any
    matrix_ptr: Any
    ready: Any
