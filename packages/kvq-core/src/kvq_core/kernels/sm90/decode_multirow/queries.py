"""Query rows into shared memory, partial results out to the combine kernel."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from kvq_core.kernels.queries import head_offset
from kvq_core.kernels.sm90.decode_multirow.layouts import FARTHEST, QueryFactors, along, product
from kvq_core.kernels.sm90.layouts import HALF, QUERY
from kvq_core.kernels.sm90.queries import sign_word


@gluon.jit
def rows_of(work, kv_head, LAYOUT: gl.constexpr, C: gl.constexpr):
    """(index in the sequence's query, query head, whether there is such a row) of a tile's rows, [ROWS]."""
    r = gl.arange(0, C.tile.rows, LAYOUT)
    valid = (r // C.shape.group < work.num_rows) & (r < C.tokens * C.shape.group)
    return work.row_start + r // C.shape.group, kv_head * C.shape.group + r % C.shape.group, valid


@gluon.jit
def load_queries(queries, tiles, work, kv_head, score_unit, N: gl.constexpr, C: gl.constexpr):
    """The query rows in shared memory, rotated if the keys are, scaled as in kvq_core.kernels.queries.row_factors; their :class:`Rows`.

    Way stands by way, in the order of :func:`~kvq_core.kernels.sm90.decode_multirow.operands.key_operands`."""
    ROWS: gl.constexpr = C.tile.rows
    KEPT: gl.constexpr = gl.SliceLayout(0, product(ROWS))
    channel = gl.arange(0, C.shape.head_size, gl.SliceLayout(0, QUERY))
    place = channel
    if C.format.key.ordered:
        order = queries.factor + kv_head * (2 * C.shape.head_size) + C.shape.head_size
        channel = gl.load(order + place).to(gl.int32, bitcast=True)
    x = load_rows(queries, channel, work, kv_head, C)
    if queries.factor is not None:
        STRIDE: gl.constexpr = C.shape.head_size * 2 if C.format.key.ordered else C.shape.head_size
        x = x * gl.load(queries.factor + kv_head * STRIDE + place)[None, :]
    if C.format.key.rotated:
        x = rotated(x, C)
    peak = gl.maximum(gl.max(gl.abs(x), 1), 2.0**-100)
    top = gl.minimum(gl.maximum(peak * gl.abs(score_unit), 2.0**-100), 2.0**120)
    power = (top.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
    x = x * (score_unit * (N.peak / power))[:, None]
    if N.odd == 1.0:
        half = x.to(gl.float16)
        total = gl.sum(half.to(gl.float32), 1)
    else:
        fold = gl.where(place % 2 == 1, 1.0 / N.odd, 1.0)[None, :]
        half = (x * fold).to(gl.float16)
        total = gl.sum(half.to(gl.float32) / fold, 1)
    ways = half.reshape([ROWS, C.shape.head_size // C.format.key.ways, C.format.key.ways]).permute((0, 2, 1))
    low, high = gl.split(ways.reshape([ROWS, 2, HALF]).permute((0, 2, 1)))
    tiles.query.index(0).store(low)
    tiles.query.index(1).store(high)
    fence_async_shared()
    # Above 0, so that -inf stays what it is.
    score_scale = gl.maximum(gl.convert_layout(power, KEPT) * (1.0 / (N.peak * N.unit)), 2.0**-126)
    row_scale = score_scale
    if C.features.rotary_pairs > 0:
        # In log2 units, as what joins the scores is.
        score_scale = gl.full_like(row_scale, 1.0)
    index, _, _ = rows_of(work, kv_head, KEPT, C)
    return QueryFactors(row_scale, score_scale, gl.convert_layout(total, KEPT) * (N.offset * N.unit), work.context_len + index)


@gluon.jit
def load_rows(queries, channel, work, kv_head, C: gl.constexpr):
    """The tile's query rows [ROWS, 128] float32 in QUERY, ``channel`` [128] of them."""
    index, head, valid = rows_of(work, kv_head, gl.SliceLayout(1, QUERY), C)
    at = (work.first_token + index).to(gl.int64) * queries.token_stride + head_offset(head, queries.head_stride, C)
    return gl.load(queries.ptr + at[:, None] + channel[None, :], mask=valid[:, None], other=0.0).to(gl.float32)


@gluon.jit
def score_shift(queries, work, kv_head, unit, C: gl.constexpr):
    """What the smoothed keys' mean adds to all scores of a row, ``unit`` times q.mean, [ROWS]."""
    channel = gl.arange(0, C.shape.head_size, gl.SliceLayout(0, QUERY))
    x = load_rows(queries, channel, work, kv_head, C)
    mean = gl.load(queries.mean + kv_head * C.shape.head_size + channel)
    return gl.convert_layout(gl.sum(x * mean[None, :], 1) * unit, gl.SliceLayout(0, product(C.tile.rows)))


@gluon.jit
def rotated(x, C: gl.constexpr):
    """H D x of float32 rows [ROWS, 128] in QUERY, the codec's rotation (kvq_core.hadamard), without its division.

    By additions, not as a product with a matrix: that would stay in registers through the whole kernel, and there are none."""
    SIGNS: gl.constexpr = C.format.key.signs
    if SIGNS is not None:
        channel = gl.arange(0, C.shape.head_size, gl.SliceLayout(0, QUERY))
        kept = gl.zeros_like(channel)
        for word in gl.static_range(C.shape.head_size // 32):
            kept = gl.where(channel // 32 == word, sign_word(SIGNS, word, channel) >> (channel % 32), kept)
        x = gl.where((kept & 1)[None, :] == 1, x, -x)
    # What is added lies in one thread, in one layout or in the other.
    x = gl.convert_layout(x, along(C.tile.rows))
    BITS: gl.constexpr = (C.key_heads.block - 1).bit_length()
    for bit in gl.static_range(3, BITS):
        x = butterfly(x, 1 << bit, C)
    x = gl.convert_layout(x, QUERY)
    for bit in gl.static_range(3):
        x = gl.convert_layout(butterfly(x, 1 << bit, C), QUERY)
    return x


@gluon.jit
def butterfly(x, STEP: gl.constexpr, C: gl.constexpr):
    """Sums and differences of channels that are STEP apart."""
    pairs = x.reshape([C.tile.rows, C.shape.head_size // (2 * STEP), 2, STEP]).permute((0, 1, 3, 2))
    a, b = gl.split(pairs)
    return gl.join(a + b, a - b).permute((0, 1, 3, 2)).reshape([C.tile.rows, C.shape.head_size])


@gluon.jit
def write_partial(state, shift, unit, work, kv_head, partials, C: gl.constexpr):
    """Store a work tile's partial results, as kvq_core.kernels.epilogue does. ``shift``: of :func:`score_shift`, if C.features.shifted."""
    ROWS: gl.constexpr = C.tile.rows
    P: gl.constexpr = product(ROWS)
    KEPT: gl.constexpr = gl.SliceLayout(0, P)
    _, _, valid = rows_of(work, kv_head, KEPT, C)
    row = (work.item.to(gl.int64) * gl.num_programs(1) + kv_head) * ROWS + gl.arange(0, ROWS, KEPT)
    at = partials.acc + row[None, :] * partials.row_stride + gl.arange(0, HALF, gl.SliceLayout(1, P))[:, None]
    gl.store(at, state.low * unit, mask=valid[None, :])
    gl.store(at + HALF, state.high * unit, mask=valid[None, :])
    top = gl.where(state.shift == FARTHEST, float("-inf"), -state.shift)
    if C.features.shifted:
        top += shift
    gl.store(partials.max + row, top, mask=valid)
    gl.store(partials.sum + row, gl.convert_layout(gl.sum(gl.sum(state.total, 0), 0), KEPT), mask=valid)
