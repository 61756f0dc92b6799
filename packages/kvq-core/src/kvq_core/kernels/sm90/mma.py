"""A multiplying group: its query rows against tile after tile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from kvq_core.kernels.args import LN2 as _LN2
from kvq_core.kernels.args import LOG2E as _LOG2E
from kvq_core.kernels.sm90.layouts import COLUMNS, HALF, PRODUCT, REST, ROWS, WEIGHTS, product_layout
from kvq_core.kernels.sm90.queries import load_queries, rows_of, score_shift, store_output
from kvq_core.kernels.sm90.rotary import load_rotary_channels, load_rotary_queries
from kvq_core.kernels.sm90.scheduler import all_exist

LOG2E = gl.constexpr(_LOG2E.value)
LN2 = gl.constexpr(_LN2.value)
WEIGHT_BITS = gl.constexpr(7.0)
"""Weights of staged values are 2^7 times what they mean, so that float16 holds small ones. With 8, a maximum whose last bit is 16 could
leave 2^16, which float16 does not hold."""
HUGE = gl.constexpr(2.0**100)
"""The largest unit of scores: sums of staged rows times it are finite."""


@gluon.jit
def multiply_tiles(
    GROUP: gl.constexpr, work, span, shared, rotary, COPIED: gl.constexpr,
    SCALED: gl.constexpr, BALANCED: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr, ADJACENT: gl.constexpr,
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
    acc = gl.zeros([HALF, D], gl.float32, OUTPUT)
    top = gl.full([HALF], float("-inf"), gl.float32, ROWS)
    total = gl.zeros([HALF], gl.float32, ROWS)
    largest = gl.full([HALF], 1e-30, gl.float32, ROWS)
    whole = gl.where(all_exist(0, span.whole * C.tile.keys, span, C), span.whole, 0)
    query = work.tile.index(GROUP)
    rotary_query = rotary.tile.index(GROUP)
    if not COPIED:
        for n in range(0, whole):
            acc, top, total, largest = multiply(
                n, acc, top, total, largest, row_scale, score_scale, position, query, rotary_query, shared, SCALED, False, C
            )
        for n in range(whole, span.last):
            acc, top, total, largest = multiply(
                n, acc, top, total, largest, row_scale, score_scale, position, query, rotary_query, shared, SCALED, True, C
            )
    else:
        acc, top, total, largest = multiply_pingpong(
            GROUP, whole, acc, top, total, largest, score_scale, position, query, rotary_query, span, shared, SCALED, C
        )
    if COPIED and SCALED:
        total = total * (1.0 / 2.0**WEIGHT_BITS)
        largest = largest * (1.0 / 2.0**WEIGHT_BITS)
    else:
        # Products rounded before a difference, as in softmax.add_sink.
        top = gl.fma(top, score_scale, gl.zeros_like(top))
    if C.features.shifted:
        top += score_shift(work, rotary.unit, GROUP, C)
    scale, top, total = take_sink(top, total, head, valid, work, SINKS)
    if LSE:
        at = token.to(gl.int64) * (gl.num_programs(1) * C.shape.group) + head
        gl.store(work.lse + at, (top + gl.log2(total)) * LN2, mask=valid)
    scale = scale * gl.where(total == 0.0, 0.0, 1.0 / total) * work.value_unit
    if SCALED:
        scale = scale * largest
    store_output(acc * gl.convert_layout(scale, gl.SliceLayout(1, OUTPUT))[:, None], work, GROUP, ADJACENT, C)


@gluon.jit
def multiply(
    n, acc, top, total, largest, row_scale, score_scale, position, query, rotary_query, shared,
    SCALED: gl.constexpr, EDGE: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """One tile: scores, softmax, weighted values. Its buffers are free once their product is done."""
    KEYS: gl.constexpr = C.tile.keys
    at = n % C.tile.stages
    full = (n // C.tile.stages) & 1
    mbarrier.wait(shared.k_full.index(at), full)
    nothing = gl.zeros([HALF, KEYS], gl.float32, PRODUCT)
    s = warpgroup_mma(query, shared.k.index(at).permute((1, 0)), nothing, use_acc=False, is_async=True)
    if SCALED:
        k_scale = shared.k_scales.index(at).load(COLUMNS)
    s = warpgroup_mma_wait(0, deps=(s,))
    if not EDGE and C.features.rotary_pairs == 0:
        mbarrier.arrive(shared.k_free.index(at), count=1)
    if SCALED:
        # Not a plain product, which may be merged with the difference below: of huge scores the largest would not be 0 away from it.
        s = gl.fma(s, nothing + k_scale[None, :], nothing)
    if C.features.rotary_pairs > 0:
        # After the scales of keys and rows, which are not those of this.
        s = s * row_scale[:, None]
        s = warpgroup_mma(rotary_query, shared.rotary.index(at).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        if not EDGE:
            mbarrier.arrive(shared.k_free.index(at), count=1)
    if EDGE:
        key_position = shared.positions.index(at).load(COLUMNS)
        mbarrier.arrive(shared.k_free.index(at), count=1)
        s = gl.where(key_position[None, :] <= position[:, None], s, float("-inf"))
    p, alpha, new, total = softmax_step(s, top, total, score_scale, C)
    mbarrier.wait(shared.v_full.index(at), full)
    if SCALED:
        grown = shared.v_largest.index(at).load(ROWS)
        p = p * shared.v_scales.index(at).load(COLUMNS)[None, :]
        alpha = alpha * (largest / grown)
        largest = grown
    else:
        p = p * 256.0
    weights = gl.convert_layout(p.to(shared.v.dtype), WEIGHTS)
    acc = warpgroup_mma(weights, shared.v.index(at), acc * alpha[:, None], is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(shared.v_free.index(at), count=1)
    return acc, new, total, largest


@gluon.jit
def softmax_step(s, top, total, score_scale, C: gl.constexpr):
    """(weights, factor for what was summed before, maximum, sum of weights) with the scores of one more tile."""
    new = gl.maximum(top, gl.max(s, 1))
    safe = gl.where(new == float("-inf"), 0.0, new)
    if C.format.key.packed:
        zero = gl.zeros_like(s)
        # A power of two: both products are exact, and the largest score is 0 away from itself, merged or not.
        p = gl.exp2(gl.fma(s, zero + score_scale[:, None], zero - (safe * score_scale)[:, None]))
    else:
        p = gl.exp2((s - safe[:, None]) * score_scale[:, None])
    alpha = gl.exp2((top - safe) * score_scale)
    total = total * alpha + gl.sum(p, 1)
    return p, alpha, new, total


@gluon.jit
def multiply_pingpong(
    GROUP: gl.constexpr, whole, acc, top, total, largest, score_scale, position, query, rotary_query, span, shared,
    SCALED: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Tiles that were copied, at least one, with FlashAttention 3's ping-pong schedule: a group issues two products in its turn, PV of
    a tile and QK of the next, and computes its softmax during the other group's turn. Without it both groups multiply at the same time, and
    the tensor cores idle during both softmaxes.

    Tiles that are unpacked gain nothing: that needs the issue slots that a softmax leaves.
    """
    final = span.last - 1
    whole = gl.minimum(whole, final)
    mbarrier.wait(shared.k_full.index(0), 0)
    fence_async_shared()
    take_turn(0, GROUP, shared)
    s = begin_scores(0, query, rotary_query, shared, C)
    end_turn(GROUP, shared)
    s = warpgroup_mma_wait(0, deps=(s,))
    for n in range(0, whole):
        s, acc, top, total, largest = multiply_ahead(
            n, s, acc, top, total, largest, score_scale, position, query, rotary_query, shared, SCALED, GROUP, False, False, C
        )
    for n in range(whole, final):
        s, acc, top, total, largest = multiply_ahead(
            n, s, acc, top, total, largest, score_scale, position, query, rotary_query, shared, SCALED, GROUP, True, False, C
        )
    s, acc, top, total, largest = multiply_ahead(
        final, s, acc, top, total, largest, score_scale, position, query, rotary_query, shared, SCALED, GROUP, True, True, C
    )
    return acc, top, total, largest


@gluon.jit
def multiply_ahead(
    n, s, acc, top, total, largest, score_scale, position, query, rotary_query, shared,
    SCALED: gl.constexpr, GROUP: gl.constexpr, EDGE: gl.constexpr, FINAL: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """One tile from its scores ``s``: softmax, weighted values and, unless FINAL, the next tile's scores.

    Values of a staged tile that all rows see have one scale. At an EDGE, each row's own counts, and values are taken relative to the
    largest so far. The accumulator is in units of ``largest``.
    """
    STAGES: gl.constexpr = C.tile.stages
    OUTPUT: gl.constexpr = product_layout(C.channels)
    at = n % STAGES
    if EDGE:
        key_position = shared.positions.index(at).load(COLUMNS)
    if SCALED:
        k_scale = shared.k_scales.index(at).load(COLUMNS)
        grown = shared.v_largest.index(at).load(ROWS)
        if EDGE:
            v_scale = shared.v_scales.index(at).load(COLUMNS)
            grown = gl.maximum(grown, largest)
    mbarrier.arrive(shared.k_free.index(at), count=1)
    if SCALED:
        s = s * k_scale[None, :]
    if EDGE:
        s = gl.where(key_position[None, :] <= position[:, None], s, float("-inf"))
    if SCALED:
        p, alpha, top, total = staged_softmax_step(s, top, total, gl.minimum(score_scale * REST, HUGE))
    else:
        p, alpha, top, total = softmax_step(s, top, total, score_scale, C)
    if SCALED:
        if EDGE:
            p = p * (v_scale[None, :] * (1.0 / grown)[:, None])
        alpha = alpha * (largest / grown)
        largest = grown
    weights = gl.convert_layout(p.to(shared.v.dtype), gl.DotOperandLayout(0, OUTPUT, 2))
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, OUTPUT))[:, None]
    mbarrier.wait(shared.v_full.index(at), (n // STAGES) & 1)
    if not FINAL:
        mbarrier.wait(shared.k_full.index((n + 1) % STAGES), ((n + 1) // STAGES) & 1)
    # cp.async writes through the generic proxy, wgmma reads through the async one.
    fence_async_shared()
    take_turn(n + 1, GROUP, shared)
    acc = warpgroup_mma(weights, shared.v.index(at), acc, is_async=True)
    if FINAL:
        end_turn(GROUP, shared)
        acc = warpgroup_mma_wait(0, deps=(acc,))
    else:
        s = begin_scores(n + 1, query, rotary_query, shared, C)
        end_turn(GROUP, shared)
        acc, s = warpgroup_mma_wait(0, deps=(acc, s))
    mbarrier.arrive(shared.v_free.index(at), count=1)
    return s, acc, top, total, largest


@gluon.jit
def staged_softmax_step(s, top, total, unit):
    """:func:`softmax_step` with a maximum in log2 units; weights and their sum are 2^WEIGHT_BITS times as large."""
    new = gl.maximum(top, gl.fma(gl.max(s, 1), unit, gl.zeros_like(unit)))
    safe = gl.where(new == float("-inf"), 0.0, new)
    zero = gl.zeros_like(s)
    p = gl.exp2(gl.fma(s, zero + unit[:, None], zero + (WEIGHT_BITS - safe)[:, None]))
    alpha = gl.exp2(top - safe)
    return p, alpha, new, total * alpha + gl.sum(p, 1)


@gluon.jit
def begin_scores(n, query, rotary_query, shared, C: gl.constexpr):
    """Issue QK of tile n; the result must be waited for."""
    KEYS: gl.constexpr = C.tile.keys
    at = n % C.tile.stages
    nothing = gl.zeros([HALF, KEYS], gl.float32, PRODUCT)
    s = warpgroup_mma(query, shared.k.index(at).permute((1, 0)), nothing, use_acc=False, is_async=True)
    if C.features.rotary_pairs > 0:
        s = warpgroup_mma(rotary_query, shared.rotary.index(at).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def take_turn(number, GROUP: gl.constexpr, shared):
    """Wait for a group's turn of this number; group 0 has the first."""
    mbarrier.wait(shared.turns.index(GROUP), (number & 1) ^ (1 - GROUP))


@gluon.jit
def end_turn(GROUP: gl.constexpr, shared):
    """The other group's turn begins when this one's products have been issued, not when they end."""
    mbarrier.arrive(shared.turns.index(1 - GROUP), count=1)


@gluon.jit
def take_sink(top, total, head, valid, work, SINKS: gl.constexpr):
    """(factor for the accumulator, maximum in log2 units, sum of weights) with exp(sink) in the sum."""
    factor = gl.full_like(total, 1.0)
    if SINKS:
        sink = gl.load(work.sinks + head, mask=valid, other=float("-inf")).to(gl.float32)
        sink = gl.fma(sink, gl.full_like(total, LOG2E), gl.zeros_like(total))
        new = gl.maximum(top, sink)
        safe = gl.where(new == float("-inf"), 0.0, new)
        factor = gl.exp2(top - safe)
        total = total * factor + gl.exp2(sink - safe)
        top = new
    return factor, top, total
