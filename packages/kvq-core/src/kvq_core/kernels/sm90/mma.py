"""A multiplying group: its query rows against tile after tile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from kvq_core.kernels.args import LN2 as _LN2
from kvq_core.kernels.args import LOG2E as _LOG2E
from kvq_core.kernels.sm90.layouts import COLUMNS, HALF, PRODUCT, ROWS, WEIGHTS, GroupRows, Sums, product_layout
from kvq_core.kernels.sm90.pingpong import beyond_huge, multiply_copied
from kvq_core.kernels.sm90.queries import load_queries, rows_of, score_shift, store_output
from kvq_core.kernels.sm90.rotary import load_rotary_channels, load_rotary_queries
from kvq_core.kernels.sm90.scheduler import all_exist
from kvq_core.kernels.sm90.softmax import exponents, in_log2, joined, no_sums, rescaled, weights_of

LOG2E = gl.constexpr(_LOG2E.value)
LN2 = gl.constexpr(_LN2.value)


@gluon.jit
def multiply_tiles(
    GROUP: gl.constexpr, work, span, shared, rotary, COPIED: gl.constexpr,
    SCALED: gl.constexpr, BALANCED: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr, JOINS: gl.constexpr, ADJACENT: gl.constexpr,
    C: gl.constexpr,
):  # fmt: skip
    """From query rows to finished output rows. Tiles that all rows see, in blocks that all exist, come first and need no mask."""
    D: gl.constexpr = C.channels
    OUTPUT: gl.constexpr = product_layout(D)
    score_scale = load_queries(work, GROUP, BALANCED, ADJACENT, C)
    row_scale = score_scale
    if C.features.rotary_pairs > 0:
        if COPIED:
            load_rotary_channels(work, rotary, score_scale, GROUP, BALANCED, C)
        else:
            # In log2 units, as what joins the scores is.
            load_rotary_queries(work, rotary, GROUP, C)
            score_scale = gl.full_like(row_scale, 1.0)
    token, head, position, valid = rows_of(work, GROUP, ROWS, C)
    rows = GroupRows(work.tile.index(GROUP), rotary.tile.index(GROUP), position, row_scale, score_scale)
    acc = gl.zeros([HALF, D], gl.float32, OUTPUT)
    reference = gl.full([HALF], float("-inf"), gl.float32, ROWS)
    sums = Sums(acc, reference, no_sums(C.tile.keys), gl.full([HALF], 2.0**-100, gl.float32, ROWS))
    # Where a tile's keys share a scale, the loop goes by that in masked iterations, too: all tiles count.
    checked = span.last if C.format.key.one_scale else span.whole
    regular = all_exist(0, checked * C.tile.keys, span, C)
    if COPIED and SCALED:
        # Without rows in other units, which are rare, and with bounded keys (kernels/staging.py) scores are bounded.
        regular = regular & (gl.max((score_scale != 1.0).to(gl.int32), 0) == 0)
    whole = gl.where(regular, span.whole, 0)
    if C.format.key.one_scale:
        if regular:
            sums = multiply_copied(GROUP, whole, sums, rows, span, shared, SCALED, True, C)
        else:
            sums = multiply_copied(GROUP, whole, sums, rows, span, shared, SCALED, False, C)
    elif COPIED:
        sums = multiply_copied(GROUP, whole, sums, rows, span, shared, SCALED, False, C)
    else:
        for n in range(0, whole):
            sums = multiply(n, sums, rows, shared, SCALED, False, C)
        for n in range(whole, span.last):
            sums = multiply(n, sums, rows, shared, SCALED, True, C)
    total = joined(sums.total)
    reference = sums.reference
    if LSE or SINKS or JOINS:
        reference = in_log2(reference, rows.score_scale)
        if COPIED and SCALED:
            reference = reference * beyond_huge(rows.score_scale)
    if C.features.shifted:
        reference += score_shift(work, rotary.unit, GROUP, C)
    scale = gl.full_like(total, 1.0)
    share = scale
    at = token.to(gl.int64) * (gl.num_programs(1) * C.shape.group) + head
    if SINKS:
        sink = gl.load(work.sinks + head, mask=valid, other=float("-inf")).to(gl.float32)
        scale, reference, total, _ = take_term(sink, scale, reference, total)
    if JOINS:
        other = gl.load(work.other_lse + at, mask=valid, other=float("-inf"))
        scale, reference, total, share = take_term(other, scale, reference, total)
    if LSE:
        gl.store(work.lse + at, (reference + gl.log2(total)) * LN2, mask=valid)
    inverse = gl.where(total == 0.0, 0.0, 1.0 / total)
    scale = scale * inverse * work.value_unit
    if SCALED:
        scale = scale * sums.largest
    y = sums.acc * gl.convert_layout(scale, gl.SliceLayout(1, OUTPUT))[:, None]
    store_output(y, share * inverse, work, GROUP, JOINS, ADJACENT, C)


@gluon.jit
def multiply(n, sums, rows, shared, SCALED: gl.constexpr, EDGE: gl.constexpr, C: gl.constexpr):
    """One tile: scores, softmax, weighted values. Its buffers are free once their product is done."""
    KEYS: gl.constexpr = C.tile.keys
    at = n % C.tile.stages
    full = (n // C.tile.stages) & 1
    mbarrier.wait(shared.k_full.index(at), full)
    nothing = gl.zeros([HALF, KEYS], gl.float32, PRODUCT)
    s = warpgroup_mma(rows.tile, shared.k.index(at).permute((1, 0)), nothing, use_acc=False, is_async=True)
    if SCALED:
        k_scale = shared.k_scales.index(at).load(COLUMNS)
    s = warpgroup_mma_wait(0, deps=(s,))
    if not EDGE and C.features.rotary_pairs == 0:
        mbarrier.arrive(shared.k_free.index(at), count=1)
    if SCALED:
        # Not a plain product, which may be merged with the difference below: of huge scores the largest would not be 0 away from it.
        s = gl.fma(s, k_scale[None, :], nothing)
    if C.features.rotary_pairs > 0:
        # After the scales of keys and rows, which are not those of this.
        s = s * rows.row_scale[:, None]
        s = warpgroup_mma(rows.rotary_tile, shared.rotary.index(at).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        if not EDGE:
            mbarrier.arrive(shared.k_free.index(at), count=1)
    if EDGE:
        key_position = shared.positions.index(at).load(COLUMNS)
        mbarrier.arrive(shared.k_free.index(at), count=1)
        s = gl.where(key_position[None, :] <= rows.position[:, None], s, float("-inf"))
    x, alpha, reference = exponents(s, rows.score_scale, sums.reference)
    p, total = weights_of(x, sums.total, alpha)
    largest = sums.largest
    mbarrier.wait(shared.v_full.index(at), full)
    if SCALED:
        grown = shared.v_largest.index(at).load(ROWS)
        p = p * shared.v_scales.index(at).load(COLUMNS)[None, :]
        alpha = alpha * (largest / grown)
        largest = grown
    weights = gl.convert_layout(p.to(shared.v.dtype), WEIGHTS)
    acc = warpgroup_mma(weights, shared.v.index(at), rescaled(sums.acc, alpha), is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(shared.v_free.index(at), count=1)
    return Sums(acc, reference, total, largest)


@gluon.jit
def take_term(term, scale, reference, total):
    """(factor ``scale`` for the accumulator, reference, sum of weights, weight of the term) with exp(term) [HALF] in the sum."""
    term = gl.fma(term, gl.full_like(total, LOG2E), gl.zeros_like(total))
    new = gl.maximum(reference, term)
    safe = gl.where(new == float("-inf"), 0.0, new)
    kept, weight = gl.exp2(reference - safe), gl.exp2(term - safe)
    return scale * kept, new, total * kept + weight, weight
