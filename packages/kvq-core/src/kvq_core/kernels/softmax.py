"""Online softmax over tiles of keys, in either orientation."""

import triton
import triton.language as tl

from kvq_core.kernels.args import LN2, LOG2E, SoftmaxState
from kvq_core.kernels.masks import by_row
from kvq_core.kernels.narrow_n import widen


@triton.jit
def softmax_start(C: tl.constexpr):
    """Nothing seen yet. The state of a loop: its sums may be in parts (:func:`sum_in_parts`) until :func:`softmax_end`."""
    ROWS: tl.constexpr = C.tile.score_rows
    PARTS: tl.constexpr = C.tile.sum_parts
    if PARTS > 1:
        total = tl.zeros([PARTS, ROWS] if C.tile.keys_first else [ROWS, PARTS], tl.float32)
    else:
        total = tl.zeros([ROWS], tl.float32)
    return SoftmaxState(tl.full([ROWS], float("-inf"), tl.float32), total)


@triton.jit
def softmax_step(s, unit, state, C: tl.constexpr, EXACT: tl.constexpr = True):
    """(probabilities relative to the new maximum, factor for what was summed before, new state).

    ``unit`` ([ROWS], above 0) turns scores into log2 units. EXACT: it is a power of two, so that products with it are exact, and one
    multiply-add subtracts the maximum. Otherwise the maximum is subtracted first: a multiply-add rounds one of its two products, and of
    huge scores that rounding error alone overflows exp2.
    """
    AXIS: tl.constexpr = 0 if C.tile.keys_first else 1
    top = tl.maximum(state.max, tl.max(s, AXIS))
    # A row that has seen nothing yet keeps -inf; subtracting 0 instead avoids inf - inf.
    safe = tl.where(top == float("-inf"), 0.0, top)
    if EXACT:
        p = tl.exp2(tl.fma(s, by_row(unit, C), by_row(safe * -unit, C)))
    else:
        p = tl.exp2((s - by_row(safe, C)) * by_row(unit, C))
    alpha = tl.exp2((state.max - safe) * unit)
    if C.tile.sum_parts > 1:
        total = state.sum * by_row(alpha, C) + sum_in_parts(p, C)
    else:
        total = state.sum * alpha + tl.sum(p, AXIS)
    return p, alpha, SoftmaxState(top, total)


@triton.jit
def sum_in_parts(p, C: tl.constexpr):
    """Sums over every eighth key, [8, ROWS] or [ROWS, 8]: a warp's thread has those keys to itself, as the tensor cores leave them."""
    PARTS: tl.constexpr = C.tile.sum_parts
    ROWS: tl.constexpr = C.tile.score_rows
    if C.tile.keys_first:
        sums = tl.sum(tl.reshape(p, [C.tile.lane_rows // PARTS, PARTS, ROWS]), 0)
    else:
        sums = tl.sum(tl.reshape(p, [ROWS, C.tile.lane_rows // PARTS, PARTS]), 1)
    return sums


@triton.jit
def softmax_end(state, unit, base, C: tl.constexpr):
    """The state of all rows in log2 units, its sums whole; ``base``: what the scores lack. (A plain product may be merged with a difference
    that follows, see :func:`softmax_step`.)"""
    total = state.sum
    if C.tile.sum_parts > 1:
        total = tl.sum(total, 0 if C.tile.keys_first else 1)
    return SoftmaxState(widen(tl.fma(state.max, unit, base), C), widen(total, C))


@triton.jit
def add_term(state, term):
    """(state with exp(term) in the sum, factor for what was summed before, weight of the term)."""
    # A multiply-add, so that it is not merged with the differences below.
    term = tl.fma(term, LOG2E, 0.0)
    top = tl.maximum(state.max, term)
    safe = tl.where(top == float("-inf"), 0.0, top)
    factor, weight = tl.exp2(state.max - safe), tl.exp2(term - safe)
    return SoftmaxState(top, state.sum * factor + weight), factor, weight


@triton.jit
def add_sink(state, heads, valid, scoring):
    """(state with exp(sink) in the sum, factor for the accumulator)."""
    if scoring.sinks is None:
        factor = state.sum * 0.0 + 1.0
        result = state
    else:
        sink = tl.load(scoring.sinks + heads, mask=valid, other=float("-inf")).to(tl.float32)
        result, factor, _ = add_term(state, sink)
    return result, factor


@triton.jit
def add_other(state, factor, token, head, valid, output, C: tl.constexpr):
    """(state with the other read's keys in the sum, ``factor`` for the accumulator with what that makes of it, factor for the other's
    result)."""
    if output.other is None:
        share = factor
        result = state
    else:
        at = token.to(tl.int64) * (tl.num_programs(1) * C.shape.group) + head
        result, kept, share = add_term(state, tl.load(output.other_lse + at, mask=valid, other=float("-inf")))
        factor = factor * kept
    return result, factor, share


@triton.jit
def store_lse(state, token, head, valid, output, C: tl.constexpr):
    """Store the rows' log-sum-exp, ``ln sum_j exp(score_j)``, sinks included; -inf where nothing was seen. ``state``: in log2 units."""
    if output.lse is not None:
        at = token.to(tl.int64) * (tl.num_programs(1) * C.shape.group) + head
        tl.store(output.lse + at, (state.max + tl.log2(state.sum)) * LN2, mask=valid)


@triton.jit
def reciprocal_sum(total):
    """1 / total, and 0 where nothing was seen."""
    return tl.where(total == 0.0, 0.0, 1.0 / total)
