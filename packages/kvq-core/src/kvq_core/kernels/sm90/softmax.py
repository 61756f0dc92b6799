"""Prefill's online softmax, with a reference near a row's maximum in place of the maximum.

Weights are 2^(score - reference), with scores in log2 units. A row's reference is an integer below its maximum. It is raised only when a
score is far above it, so that most tiles leave the accumulator alone; what it is then multiplied by is a power of two, which is exact.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kvq_core.kernels.sm90.layouts import HALF, PRODUCT, ROWS

LOW = gl.constexpr(7.0)
"""How far a maximum is above the reference raised for it, but for its fraction: float16 then holds small weights, too. With 8, the rounding
of a huge reference could leave 2^16."""
HIGH = gl.constexpr(14.0)
"""How far scores may be above a reference. Weights times scales of at most 2 stay below 2^16, which float16 does not hold."""
EXACT = gl.constexpr(2.0**24)
"""Scores in log2 units below it are off by less than one when they are rounded to float32."""


@gluon.jit
def exponents(s, unit, reference):
    """(exponents of one more tile's weights, factor for what was summed before, reference). ``s`` [HALF, KEYS]: scores, which times
    ``unit`` [HALF] are in log2 units."""
    most = gl.max(s, 1)
    zero = gl.zeros_like(most)
    # For huge scores fma(s, unit, -reference) keeps the rounding error of most * unit, which alone overflows exp2. Products with a power
    # of two are exact. It is not below the unit, so that these scores stay above those of other tiles.
    unit = gl.where(gl.abs(most * unit) < EXACT, unit, power_not_below(unit))
    # A multiply-add, so that it is not merged with a difference.
    top = gl.fma(most, unit, zero)
    # Their difference is exact. A sum with a huge reference might be rounded up, past a score whose weight float16 does not hold.
    new = gl.where(top - reference > HIGH, gl.floor(top) - LOW, reference)
    shift = gl.where(new == float("-inf"), 0.0, new)
    return gl.fma(s, unit[:, None], -shift[:, None]), gl.exp2(reference - shift), new


@gluon.jit
def exponents_of_bounded(s, k_scale, reference):
    """:func:`exponents` of products ``s`` that times their keys' scales [KEYS] are scores in log2 units, below EXACT. There is a reference:
    what a multiply-add leaves of a score is exact but for its rounding, and so is a difference of references."""
    x = gl.fma(s, k_scale[None, :], -reference[:, None])
    most = gl.max(x, 1)
    higher = gl.where(most > HIGH, gl.floor(most) - LOW, 0.0)
    return lowered(x, higher), gl.exp2(-higher), reference + higher


@gluon.jit
def exponents_of_one_scale(s, unit, reference):
    """:func:`exponents_of_bounded` of keys that share a scale, ``unit`` [HALF] > 0: the largest product has the largest score."""
    above = gl.fma(gl.max(s, 1), unit, -reference)
    higher = gl.where(above > HIGH, gl.floor(above) - LOW, 0.0)
    reference = reference + higher
    return gl.fma(s, unit[:, None], -reference[:, None]), gl.exp2(-higher), reference


@gluon.jit
def in_log2(reference, unit):
    """A reference of :func:`exponents` in log2 units: for huge scores it was taken with a power of two in place of ``unit`` [HALF]."""
    top = reference + LOW
    return gl.where(gl.abs(top) < EXACT, reference, top * (unit * (1.0 / power_not_below(unit))) - LOW)


@gluon.jit
def power_not_below(x):
    """The least power of two that is not below x > 0."""
    return ((x.to(gl.int32, bitcast=True) + 0x007FFFFF) & 0x7F800000).to(gl.float32, bitcast=True)


@gluon.jit
def weights_of(x, total, alpha):
    """(weights, total) with one more tile's exponents; ``alpha`` [HALF]: the factor for what was summed before."""
    p = gl.exp2(x)
    before = gl.convert_layout(alpha, gl.SliceLayout(1, total.type.layout), assert_trivial=True)
    return p, total * before[:, None] + sums_of_threads(p)


@gluon.jit
def no_sums(KEYS: gl.constexpr):
    """:func:`sums_of_threads` of no weights."""
    return sums_of_threads(gl.zeros([HALF, KEYS], gl.float32, PRODUCT))


@gluon.jit
def sums_of_threads(p):
    """[HALF, KEYS] -> [HALF, 4]: what each of a row's four threads has. They are joined after the last tile."""
    return gl.sum(gl.sum(p.reshape([HALF, p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def joined(total):
    """A row's sums of its four threads, [HALF] in ROWS."""
    return gl.convert_layout(gl.sum(total, 1), ROWS, assert_trivial=True)


@gluon.jit
def rescaled(x, factor):
    """``x`` [HALF, n], a product's result, times ``factor`` [HALF]; a warp whose factors are all 1 skips the multiplications."""
    return unless_neutral(x, factor, "mul.f32", "0f3F800000")


@gluon.jit
def lowered(x, by):
    """``x`` [HALF, n], a product's result, less ``by`` [HALF]; a warp that has nothing to subtract skips it."""
    return unless_neutral(x, by, "sub.f32", "0f00000000")


@gluon.jit
def unless_neutral(x, operand, OPERATION: gl.constexpr, NEUTRAL: gl.constexpr):
    COUNT: gl.constexpr = x.shape[1] // 2
    return gl.inline_asm_elementwise(
        skippable(OPERATION, NEUTRAL, COUNT),
        skippable_operands(COUNT),
        [x, gl.convert_layout(operand, gl.SliceLayout(1, x.type.layout), assert_trivial=True)[:, None]],
        dtype=gl.float32,
        is_pure=True,
        pack=COUNT,
    )


@gluon.constexpr_function
def skippable(operation, neutral, count):
    """A thread's ``count`` numbers, pairs of its two rows in turns, each with its row's operand, unless all of a warp's are ``neutral``."""
    lines = [
        ".reg .pred other, any",
        f"setp.neu.f32 other, ${2 * count}, {neutral}",
        f"setp.neu.or.f32 other, ${2 * count + 2}, {neutral}, other",
        "vote.sync.any.pred any, other, 0xffffffff",
        "@!any bra.uni DONE",
        *(f"{operation} ${i}, ${i}, ${2 * count + i}" for i in range(count)),
    ]
    return "{ " + "; ".join(lines) + "; DONE: }"


@gluon.constexpr_function
def skippable_operands(count):
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)
