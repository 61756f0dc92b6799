"""Two keys in one row of lanes.

A product takes 16 lanes and 8 rows at least, and a group of 4 query heads fills half of those rows. So two keys that are
neighbours in memory can share a row of lanes. Each has query rows of its own, with zeros where the other's lanes are:

    lanes     | key 2i     | key 2i + 1 |        scores [KEYS / 2, ROWS]
    row r     | q          | 0          |        of even keys
    row r + R | 0          | q          |        of odd keys             R = ROWS / FOLD

That halves the scores, and heads of 8 lanes are not padded. Of the weighted values each row sums up both keys' lanes, and what it takes
of the other's means nothing; :func:`unfold` leaves that out when it joins the rows, as splits are combined.
"""

import triton
import triton.language as tl

from kvq_core.kernels.args import SoftmaxState


@triton.jit
def by_folded_key(x, C: tl.constexpr):
    """A [KEYS] vector for scores [KEYS // FOLD, ROWS]: each row's own keys."""
    LANE_ROWS: tl.constexpr = C.tile.lane_rows
    FOLD: tl.constexpr = C.tile.fold
    ROWS: tl.constexpr = C.tile.rows
    y = tl.reshape(x, [LANE_ROWS, FOLD, 1])
    return tl.reshape(tl.broadcast_to(y, [LANE_ROWS, FOLD, ROWS // FOLD]), [LANE_ROWS, ROWS])


@triton.jit
def of_own_lanes(channel, C: tl.constexpr):
    """Which channels of rows [ROWS, WAYS * lanes] are those of the rows' own keys."""
    row = tl.arange(0, C.tile.rows)
    return (channel // C.shape.head_size)[None, :] == (row // (C.tile.rows // C.tile.fold))[:, None]


@triton.jit
def unfold(acc, state, C: tl.constexpr):
    """Rows [ROWS, lanes of a row] x WAYS and their state -> [ROWS, WIDTH], with all keys in the first ROWS // FOLD rows."""
    FOLD: tl.constexpr = C.tile.fold
    ROWS: tl.constexpr = C.tile.rows // C.tile.fold
    tops = tl.reshape(state.max, [FOLD, ROWS])
    top = tl.max(tops, 0)
    # A row that has seen nothing keeps -inf; subtracting 0 instead avoids inf - inf.
    weight = tl.exp2(tops - tl.where(top == float("-inf"), 0.0, top)[None, :])
    total = tl.sum(tl.reshape(state.sum, [FOLD, ROWS]) * weight, 0)
    rows = ()
    for s in tl.static_range(tl.constexpr(C.format.value.ways)):
        x = acc[s] * tl.reshape(weight, [FOLD * ROWS])[:, None]
        rows = rows + (spread(tl.sum(own_lanes(x, C), 0), C),)
    return rows, SoftmaxState(spread(top, C), spread(total, C))


@triton.jit
def own_lanes(x, C: tl.constexpr):
    """[ROWS, lanes of a row] -> [FOLD, ROWS // FOLD, WIDTH]: of each row its own key's lanes, then zeros."""
    FOLD: tl.constexpr = C.tile.fold
    ROWS: tl.constexpr = C.tile.rows // C.tile.fold
    WIDTH: tl.constexpr = C.value_heads.width
    LANES: tl.constexpr = C.value_heads.lanes
    if LANES == WIDTH:
        # Sums with zeros, which stay within a thread, move nothing.
        own = tl.arange(0, FOLD)[:, None] == tl.arange(0, FOLD)[None, :]
        result = tl.sum(tl.where(own[:, None, :, None], tl.reshape(x, [FOLD, ROWS, FOLD, LANES]), 0.0), 2)
    else:
        lane = tl.arange(0, WIDTH)[None, :]
        source = lane % LANES + tl.arange(0, FOLD * ROWS)[:, None] // ROWS * LANES
        result = tl.reshape(tl.where(lane < LANES, tl.gather(x, source, 1), 0.0), [FOLD, ROWS, WIDTH])
    return result


@triton.jit
def spread(x, C: tl.constexpr):
    """[ROWS // FOLD, ...] -> [ROWS, ...]: each row FOLD times."""
    FOLD: tl.constexpr = C.tile.fold
    ROWS: tl.constexpr = C.tile.rows
    if len(x.shape) == 1:
        result = tl.reshape(tl.broadcast_to(x[None, :], [FOLD, ROWS // FOLD]), [ROWS])
    else:
        WIDTH: tl.constexpr = C.value_heads.width
        result = tl.reshape(tl.broadcast_to(x[None, :, :], [FOLD, ROWS // FOLD, WIDTH]), [ROWS, WIDTH])
    return result
