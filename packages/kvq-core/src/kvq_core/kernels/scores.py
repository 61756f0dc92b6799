"""What happens to a score besides q.k: softcap, visibility, ALiBi, query-query bias. They end up in log2 units."""

import triton
import triton.language as tl

from kvq_core.kernels.args import LOG2E
from kvq_core.kernels.masks import by_key, by_row, hide_invalid, hide_unseen
from kvq_core.kernels.rotary import add_rotary_scores
from kvq_core.kernels.rounding import reciprocal


@triton.jit
def score_unit(scoring):
    """The factor that turns q.k into a score in log2 units, or, before a softcap, into the exponent that its tanh is made of."""
    if scoring.softcap is None:
        unit = scoring.softmax_scale * LOG2E
    else:
        unit = scoring.softmax_scale * tanh_unit(scoring)
    return unit


@triton.jit
def tanh_unit(scoring):
    """tanh(x) is made of exp(2x), here a power of two."""
    return 2.0 * LOG2E / scoring.softcap


@triton.jit
def score_base(scoring):
    """What all scores lack that :func:`finish_scores` gives, in log2 units: a softmax does not see it, a sink does."""
    if scoring.softcap is None:
        base = 0.0
    else:
        base = scoring.softcap * LOG2E
    return base


@triton.jit
def finish_scores(s, unit, k_scale, rotary, rows, tile, work, scoring, LOOP: tl.constexpr, C: tl.constexpr):
    """Key scales ([KEYS], or None), a rotary mean (or None), softcap, mask and biases, in the order of the specification. Unseen scores
    become -inf.

    ``unit`` ([ROWS], from :func:`score_unit`) is left to :func:`softmax_unit` where nothing but masks comes after it. ``s`` is finite where
    keys are invalid (codes are finite, CLEAR zeroes those that may not be), so that adding -inf hides it: one multiply-add with the scale.
    """
    CHECKED: tl.constexpr = LOOP == C.tile.loops - 1
    if in_log2_units(scoring, C):
        s = s * by_row(unit, C)
    if k_scale is not None:
        if CHECKED:
            s = s * by_key(k_scale, C)
        else:
            # A plain product may be merged with softmax_step's difference, and is then rounded otherwise than for the maximum: of huge
            # scores the largest would not be 0 away from it. (With a mask to add it is merged with that.)
            s = tl.fma(s, by_key(k_scale, C), 0.0)
    if C.features.rotary_pairs > 0:
        s = add_rotary_scores(s, rotary, tile, C)
    if scoring.softcap is not None:
        if C.features.shifted:
            s = s + by_row(rows.shift * tanh_unit(scoring), C)
        # tanh(x) = 1 - 2 / (exp(2x) + 1) saturates to +-1 instead of overflowing. The 1 is left to score_base.
        part = -0.5 / score_base(scoring)
        s = reciprocal(tl.fma(tl.exp2(s), part, part), C.features.use_asm)
    if CHECKED:
        s = s + by_key(hide_invalid(k_scale, tile), C)
    s = hide_unseen(s, rows, tile, work.seq, scoring, LOOP, C)
    if scoring.alibi_slopes is not None:
        slope = tl.load(scoring.alibi_slopes + rows.head, mask=rows.valid, other=0.0).to(tl.float32) * LOG2E
        distance = (by_row(rows.position, C) - by_key(tile.position, C)).to(tl.float32)
        if C.features.alibi_sqrt:
            distance = tl.sqrt(tl.maximum(distance, 0.0))
        s -= by_row(slope, C) * distance
    if scoring.qq_bias is not None:
        s += query_query_bias(rows, tile, work, scoring, C) * LOG2E
    return s


@triton.jit
def in_log2_units(scoring, C: tl.constexpr):
    """Whether something joins scores that is in these units, so that they must be, too."""
    return scoring.softcap is not None or scoring.alibi_slopes is not None or scoring.qq_bias is not None or C.features.rotary_pairs > 0


@triton.jit
def softmax_unit(unit, scoring, C: tl.constexpr):
    """What is left to multiply scores by, [ROWS]: log2 units for each of theirs. Above 0, so that -inf stays what it is."""
    if in_log2_units(scoring, C):
        score_scale = tl.full(unit.shape, 1.0, tl.float32)
    else:
        score_scale = tl.maximum(unit, 2.0**-126)
    return score_scale


@triton.jit
def query_query_bias(rows, tile, work, scoring, C: tl.constexpr):
    i = by_row(rows.index, C)
    column = by_key(tile.position - work.context_len, C)
    inside = (column >= 0) & (column < scoring.qq_bias_size) & (i < scoring.qq_bias_size)
    return tl.load(scoring.qq_bias + i * scoring.qq_bias_stride + column, mask=inside, other=0.0).to(tl.float32)
