"""The query prologue and the output epilogue: where rows enter and leave a program."""

import triton
import triton.language as tl

from kvq_core.kernels.compiler_hints import opaque_zero
from kvq_core.kernels.hadamard import rotate, rotate_to_pairs, unrotate, way
from kvq_core.kernels.pack_keys import of_own_lanes
from kvq_core.kernels.packing import deinterleave, interleave
from kvq_core.kernels.rounding import in_float16, to_fp8_bits


@triton.jit
def head_offset(head, head_stride, C: tl.constexpr):
    """Where a head's rows begin. Offsets are 32-bit unless some head of q or of the output lies further off."""
    if C.shape.wide_rows:
        head = head.to(tl.int64)
    return head * head_stride


@triton.jit
def load_queries(queries, rows, C: tl.constexpr):
    """The tile's query rows [ROWS, WAYS * WIDTH] in channel order, times the factors that smoothing has divided keys by.

    Apart from :func:`query_ways`, so that the other loads of a work tile can be on their way before the first of these is waited for.
    """
    HEADS: tl.constexpr = C.key_row.heads
    channel = tl.arange(0, HEADS.width * HEADS.ways)
    mask = rows.valid[:, None]
    if C.tile.fold > 1:
        mask = mask & of_own_lanes(channel, C)
        channel = channel % HEADS.size
    elif HEADS.width * HEADS.ways != HEADS.size:
        mask = mask & (channel < HEADS.size)[None, :]
    offset = rows.token.to(tl.int64) * queries.token_stride + head_offset(rows.head, queries.head_stride, C)
    inside = channel < HEADS.size
    if C.format.key.ordered:
        factor_at = queries.factor + tl.program_id(1) * (2 * HEADS.size) + channel
        channel = tl.load(factor_at + HEADS.size, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    elif queries.factor is not None:
        factor_at = queries.factor + tl.program_id(1) * HEADS.size + channel
    x = tl.load(queries.ptr + offset[:, None] + channel[None, :], mask=mask, other=0.0)
    if queries.factor is not None:
        factor = tl.load(factor_at, mask=inside, other=0.0)
        x = x.to(tl.float32) * factor[None, :]
    return x


@triton.jit
def query_ways(x, work, C: tl.constexpr):
    """:func:`load_queries`' rows as ways [ROWS, WIDTH], rotated if the keys are (then float32)."""
    HEADS: tl.constexpr = C.key_row.heads
    FORMAT: tl.constexpr = C.format.key
    WAYS: tl.constexpr = HEADS.ways
    SIGNS: tl.constexpr = FORMAT.signs
    if FORMAT.rotated and C.tile.alone and WAYS > 1:
        # The shorter code. It pays where a program has one work tile (docs/dev/experiments/2026-11.md).
        pairs = rotate_to_pairs(x, HEADS, SIGNS, C.features.use_asm, C.features.upcast_dots)
        ways = ()
        for s in tl.static_range(WAYS):
            ways = ways + (way(pairs, s),)
    else:
        ways = deinterleave(x, C.tile.rows, HEADS.width, WAYS)
        if FORMAT.rotated:
            ways = rotate(ways, HEADS, FORMAT, C.features.upcast_dots, opaque_zero(work.num_rows, C))
    return ways


@triton.jit
def scaled_queries(ways, queries, factor, C: tl.constexpr):
    """(query ways as K's operands need them, scale that turns products into scores [ROWS], seed [ROWS]).

    ``factor`` multiplies every score. Of packed keys ways are float16, scaled to a peak of 32 to 64 and divided by C.key_gains, and the
    scale that is left is a power of two; a zero point z starts a product at z times the seed. Otherwise ways have the queries' dtype, the
    scale is ``factor``, and the seed is not used.
    Padding lanes of keys decode to a level, not to 0: the queries' zeros there are what keeps them out.
    """
    K: tl.constexpr = C.format.key
    if K.packed:
        factors, score_scale = row_factors(largest_in_row(ways), factor * K.level)
        total = tl.zeros_like(score_scale)
        result = ()
        for s in tl.static_range(tl.constexpr(K.ways)):
            x = (ways[s].to(tl.float32) * (factors * (1.0 / C.key_gains[s]))[:, None]).to(tl.float16)
            if K.zero != 0.0 or K.split is not None:
                total += tl.sum(x.to(tl.float32), 1) * C.key_gains[s]
            result = result + (x,)
        score_scale, total = score_scale * C.key_product_scale, total * C.key_zero
    else:
        score_scale = tl.full([C.tile.rows], 1.0, tl.float32) * factor
        total = score_scale
        result = ()
        for s in tl.static_range(tl.constexpr(K.ways)):
            result = result + (ways[s].to(queries.ptr.dtype.element_ty),)
    return result, score_scale, total


@triton.jit
def score_shift(queries, token, head, valid, scoring, C: tl.constexpr):
    """softmax_scale * q.mean [ROWS] float32, if C.features.shifted; Triton 3.6 cannot put a None into a tuple, so that anything stands for
    it."""
    shift = valid
    if C.features.shifted:
        HEADS: tl.constexpr = C.key_heads
        channel = tl.arange(0, HEADS.width * HEADS.ways)
        inside = channel < HEADS.size
        offset = token.to(tl.int64) * queries.token_stride + head_offset(head, queries.head_stride, C)
        q = tl.load(queries.ptr + offset[:, None] + channel[None, :], mask=valid[:, None] & inside[None, :], other=0.0)
        mean = tl.load(queries.mean + tl.program_id(1) * HEADS.size + channel, mask=inside, other=0.0)
        shift = tl.sum(q.to(tl.float32) * mean[None, :], 1) * scoring.softmax_scale
    return shift


@triton.jit
def largest_in_row(ways):
    """max |x| of each row over all its ways, [ROWS] float32; at least 2^-100, so that a number divided by it is still one."""
    peak = tl.max(tl.abs(ways[0].to(tl.float32)), 1)
    for s in tl.static_range(1, len(ways)):
        peak = tl.maximum(peak, tl.max(tl.abs(ways[s].to(tl.float32)), 1))
    return tl.maximum(peak, 2.0**-100)


@triton.jit
def row_factors(peak, factor):
    """([ROWS] factors that bring rows with these peaks, times ``factor``, to a peak of 32 to 64; the powers of two that are then left).

    A power of two multiplies exactly, so that :func:`~kvq_core.kernels.softmax.softmax_step` can take a maximum off within a multiply-add.
    """
    top = tl.minimum(tl.maximum(peak * tl.abs(factor), 2.0**-100), 2.0**120)
    power = (top.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return factor * (32.0 / power), power * (1.0 / 32.0)


@triton.jit
def store_rows(
    ways, share, output, output_scale, token, head, valid, ROWS: tl.constexpr, C: tl.constexpr, MIXED: tl.constexpr = False, zero=0
):  # fmt: skip
    """Un-rotate finished float32 rows [ROWS, WIDTH] x WAYS, and store them in channel order as :func:`store_channels` does; ``share``
    [ROWS]. MIXED: see C.features.mixed. ``zero``: see :mod:`.compiler_hints`."""
    HEADS: tl.constexpr = C.value_heads
    FORMAT: tl.constexpr = C.format.value
    if FORMAT.rotated:
        ways = unrotate(ways, HEADS, FORMAT, C.features.upcast_dots, MIXED, zero)
    x = interleave(ways, ROWS, HEADS.width, HEADS.ways)
    channel = tl.arange(0, HEADS.width * HEADS.ways)[None, :]
    mask = valid[:, None]
    if HEADS.width * HEADS.ways != HEADS.size:
        mask = mask & (channel < HEADS.size)
    store_channels(x, share[:, None], channel, mask, output, output_scale, token[:, None], head[:, None], C)


@triton.jit
def store_channels(x, share, channel, mask, output, output_scale, token, head, C: tl.constexpr):
    """Give un-rotated float32 x its unit, add ``share`` of another read's result, convert, and store; all others have x's shape, or one
    that broadcasts."""
    if C.format.value.divided:
        x = x * (1.0 / C.value_heads.block)
    if output.other is not None:
        row = token.to(tl.int64) * (tl.num_programs(1) * C.shape.group) + head
        x += share * tl.load(output.other + row * C.value_heads.size + channel, mask=mask, other=0.0)
    if output_scale is not None:
        x = x / tl.load(output_scale)
    if C.features.output == "e4m3fn":
        y = to_fp8_bits(x, 3, 7, 448.0)
    elif C.features.output == "e5m2":
        y = to_fp8_bits(x, 2, 15, 57344.0)
    else:
        y = x.to(output.ptr.dtype.element_ty)
        if C.format.value.packed and output.ptr.dtype.element_ty == tl.float16:
            y = in_float16(y)
    offset = token.to(tl.int64) * output.token_stride + head_offset(head, output.head_stride, C)
    tl.store(output.ptr + offset + channel, y, mask=mask)
