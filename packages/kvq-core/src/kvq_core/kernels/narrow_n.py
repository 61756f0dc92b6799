"""A few query rows: two columns of a product for each.

A product has eight columns of query rows, and a group of four heads or fewer leaves half of them empty. A thread holds two columns that are
neighbours. So each row has such a pair, its second column empty, and the thread one score where it would have two: half as much to do in
all that is done to scores. It pays where that is much (a softcap); for the softmax alone it was measured and did not
(docs/dev/experiments/2026-11.md).
"""

import triton
import triton.language as tl

from kvq_core.kernels.args import QueryRows


@triton.jit
def narrow(x, C: tl.constexpr):
    """A [ROWS] vector of the rows that have scores: the first ones."""
    y = x
    if C.tile.narrow_n:
        y, _ = tl.split(tl.trans(tl.reshape(x, [2, C.tile.score_rows])))
    return y


@triton.jit
def narrow_rows(rows, C: tl.constexpr):
    """Facts of the rows that have scores."""
    return QueryRows(
        narrow(rows.index, C), narrow(rows.token, C), narrow(rows.head, C), narrow(rows.position, C), narrow(rows.valid, C),
        narrow(rows.shift, C),
    )  # fmt: skip


@triton.jit
def widen(x, C: tl.constexpr):
    """A [SCORE_ROWS] vector -> [ROWS], again for the rows beyond."""
    y = x
    if C.tile.narrow_n:
        y = tl.reshape(tl.trans(tl.join(x, x)), [C.tile.rows])
    return y


@triton.jit
def spread(x, beside, C: tl.constexpr):
    """A vector or tile whose last dimension is [SCORE_ROWS] -> [ROWS], each beside its own of ``beside``: a product's columns."""
    y = x
    if C.tile.narrow_n:
        SHAPE: tl.constexpr = [C.tile.rows] if len(x.shape) == 1 else [C.tile.keys, C.tile.rows]
        y = tl.reshape(tl.join(x, beside), SHAPE)
    return y


@triton.jit
def scattered(x, C: tl.constexpr):
    """Rows [ROWS, WIDTH], those that have scores first -> each beside one that has none, in the order of a product's columns."""
    return across(x, 2, C.tile.score_rows, C)


@triton.jit
def gathered(x, C: tl.constexpr):
    """The other way: rows in the order of a product's columns -> those that have scores first."""
    return across(x, C.tile.score_rows, 2, C)


@triton.jit
def across(x, OUTER: tl.constexpr, INNER: tl.constexpr, C: tl.constexpr):
    """Rows [OUTER x INNER, WIDTH] -> [INNER x OUTER, WIDTH]."""
    y = x
    if C.tile.narrow_n:
        WIDTH: tl.constexpr = x.shape[1]
        y = tl.reshape(tl.permute(tl.reshape(x, [OUTER, INNER, WIDTH]), (1, 0, 2)), [C.tile.rows, WIDTH])
    return y


@triton.jit
def first_columns(s, C: tl.constexpr):
    """A tile of products [KEYS, ROWS] -> the scores among them, [KEYS, SCORE_ROWS]."""
    y = s
    if C.tile.narrow_n:
        y, _ = tl.split(tl.reshape(s, [C.tile.keys, C.tile.score_rows, 2]))
    return y
