"""The query rows' way into shared memory, and a piece's way out to the merge."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from kvq_core.kernels.queries import head_offset
from kvq_core.kernels.warpgroups.drafts.layouts import STREAMS, Rows, product
from kvq_core.kernels.warpgroups.layouts import HALF, QUERY


@gluon.jit
def rows_of(work, kv_head, LAYOUT: gl.constexpr, C: gl.constexpr):
    """(index in the sequence's query, query head, whether there is such a row) of a tile's rows, [ROWS]."""
    r = gl.arange(0, C.rows, LAYOUT)
    valid = (r // C.group < work.num_rows) & (r < C.tokens * C.group)
    return work.row_start + r // C.group, kv_head * C.group + r % C.group, valid


@gluon.jit
def load_queries(
    queries, tiles, work, kv_head, score_unit, PEAK: gl.constexpr, UNIT: gl.constexpr, OFFSET: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """The query rows as two streams in shared memory, scaled as in kvq_core.kernels.queries.row_factors; their :class:`Rows`."""
    ROWS: gl.constexpr = C.rows
    KEPT: gl.constexpr = gl.SliceLayout(0, product(ROWS))
    index, head, valid = rows_of(work, kv_head, gl.SliceLayout(1, QUERY), C)
    channel = gl.arange(0, C.head_size, gl.SliceLayout(0, QUERY))
    at = (work.first_token + index).to(gl.int64) * queries.token_stride + head_offset(head, queries.head_stride, C)
    x = gl.load(queries.ptr + at[:, None] + channel[None, :], mask=valid[:, None], other=0.0).to(gl.float32)
    if queries.factor is not None:
        x = x * gl.load(queries.factor + kv_head * C.head_size + channel)[None, :]
    peak = gl.maximum(gl.max(gl.abs(x), 1), 2.0**-100)
    top = gl.minimum(gl.maximum(peak * gl.abs(score_unit), 2.0**-100), 2.0**120)
    power = (top.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
    half = (x * (score_unit * (PEAK / power))[:, None]).to(gl.float16)
    total = gl.sum(half.to(gl.float32), 1)
    low, high = gl.split(half.reshape([ROWS, HALF, STREAMS]))
    tiles.query.index(0).store(low)
    tiles.query.index(1).store(high)
    fence_async_shared()
    # Above 0, so that -inf stays what it is.
    left = gl.maximum(gl.convert_layout(power, KEPT) * (1.0 / (PEAK * UNIT)), 2.0**-126)
    index, _, _ = rows_of(work, kv_head, KEPT, C)
    return Rows(left, gl.convert_layout(total, KEPT) * (OFFSET * UNIT), work.context_len + index)


@gluon.jit
def write_share(state, rows, unit, work, kv_head, partials, C: gl.constexpr):
    """A piece's part of its rows' results, as kvq_core.kernels.splits leaves it."""
    ROWS: gl.constexpr = C.rows
    P: gl.constexpr = product(ROWS)
    KEPT: gl.constexpr = gl.SliceLayout(0, P)
    _, _, valid = rows_of(work, kv_head, KEPT, C)
    row = (work.item.to(gl.int64) * gl.num_programs(1) + kv_head) * ROWS + gl.arange(0, ROWS, KEPT)
    at = partials.acc + row[None, :] * partials.row_stride + gl.arange(0, HALF, gl.SliceLayout(1, P))[:, None]
    gl.store(at, state.low * unit, mask=valid[None, :])
    gl.store(at + HALF, state.high * unit, mask=valid[None, :])
    gl.store(partials.max + row, gl.fma(state.top, rows.left, gl.zeros_like(state.top)), mask=valid)
    gl.store(partials.sum + row, gl.convert_layout(gl.sum(gl.sum(state.total, 0), 0), KEPT), mask=valid)
