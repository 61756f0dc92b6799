"""A multiplying group over tiles that were copied, with FlashAttention 3's ping-pong schedule.

A group issues two products in its turn, PV of a tile and QK of the next, and computes its softmax during the other group's turn. Without it
both groups multiply at the same time, and the tensor cores idle during both softmaxes. Tiles that are unpacked gain nothing: that needs the
issue slots that a softmax leaves.

Tiles come in rounds: the values of a tile with the keys of the next, which a turn needs together. Round n has tile n's keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from kvq_core.kernels.sm90.layouts import COLUMNS, HALF, PRODUCT, ROWS, Sums, product_layout
from kvq_core.kernels.sm90.softmax import exponents, exponents_of_bounded, exponents_of_one_scale, rescaled, weights_of
from kvq_core.kernels.staging import FARTHEST as _FARTHEST
from kvq_core.kernels.staging import inverse_power

REST = gl.constexpr(2.0**10)
"""Moved from the scales of keys into the unit of scores, so that products times scales are finite."""
FARTHEST = gl.constexpr(_FARTHEST.value)
HUGE = gl.constexpr(2.0**100)
"""The largest unit of scores: sums of staged rows times it are finite."""


@gluon.jit
def multiply_copied(
    GROUP: gl.constexpr, whole, sums, rows, span, shared, SCALED: gl.constexpr, ONE_SCALE: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """All tiles, at least one. The first ``whole`` are seen by all rows. ONE_SCALE: each tile has one scale for its keys and one for its
    values, and rows' ``score_scale`` is 1."""
    final = span.last - 1
    await_round(0, shared, C)
    take_turn(0, GROUP, shared)
    s = begin_scores(0, rows, shared, C)
    end_turn(GROUP, shared)
    s = warpgroup_mma_wait(0, deps=(s,))
    k_scale = sums.reference
    if SCALED:
        k_scale = key_scales(0, shared, ONE_SCALE)
    x, alpha, reference = tile_exponents(0, s, sums.reference, k_scale, rows, shared, SCALED, ONE_SCALE, True, C)
    sums = Sums(sums.acc, reference, sums.total, sums.largest)
    end_round(0, shared, C)
    # A step takes the next tile's scores, too: the last tile that all rows see is followed by one that needs the mask.
    whole = gl.maximum(gl.minimum(whole, final) - 1, 0)
    # Without ONE_SCALE ``whole`` is then 0.
    if ONE_SCALE or not C.format.key.one_scale:
        for n in range(0, whole):
            x, alpha, sums = multiply_ahead(n, x, alpha, sums, rows, shared, GROUP, SCALED, ONE_SCALE, False, False, C)
    for n in range(whole, final):
        x, alpha, sums = multiply_ahead(n, x, alpha, sums, rows, shared, GROUP, SCALED, ONE_SCALE, True, False, C)
    x, alpha, sums = multiply_ahead(final, x, alpha, sums, rows, shared, GROUP, SCALED, ONE_SCALE, True, True, C)
    return sums


@gluon.jit
def multiply_ahead(
    n, x, alpha, sums, rows, shared,
    GROUP: gl.constexpr, SCALED: gl.constexpr, ONE_SCALE: gl.constexpr, EDGE: gl.constexpr, FINAL: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """One tile from its weights' exponents ``x`` and the factor for what was summed before: weights, weighted values and, unless FINAL, the
    next tile's exponents. ``sums.reference`` is of the exponents.

    Values of a staged tile that all rows see have one scale. At an EDGE, unless ONE_SCALE, each row's own counts, and values are taken
    relative to the tile's largest, or to the largest so far where these are too far apart.
    """
    OUTPUT: gl.constexpr = product_layout(C.channels)
    PER_KEY: gl.constexpr = SCALED and not ONE_SCALE
    at = (n + 1) % C.tile.stages
    p, total = weights_of(x, sums.total, alpha)
    largest = sums.largest
    await_round(n + 1, shared, C)
    if SCALED:
        grown = shared.v_largest.index(at).load(ROWS)
        if EDGE and not ONE_SCALE:
            # Not to the largest so far if it can be helped: float16 weights times scales over it may be rounded to 0.
            near = (grown <= FARTHEST) & (grown * FARTHEST >= 1.0) & (largest <= FARTHEST)
            grown = gl.where(near, grown, gl.maximum(grown, largest))
            p = p * (shared.v_scales.index(at).load(COLUMNS)[None, :] * inverse_power(grown)[:, None])
        alpha = alpha * (largest * inverse_power(grown))
        largest = grown
    weights = gl.convert_layout(p.to(shared.v.dtype), gl.DotOperandLayout(0, OUTPUT, 2))
    acc = rescaled(sums.acc, alpha)
    reference = sums.reference
    k_scale = reference
    if SCALED and not FINAL:
        # Here and not where they are needed: an access to shared memory after a turn's end has a barrier of its own.
        k_scale = key_scales(at, shared, ONE_SCALE)
    take_turn(n + 1, GROUP, shared)
    if FINAL:
        acc = warpgroup_mma(weights, shared.v.index(at), acc, is_async=True)
        end_turn(GROUP, shared)
        acc = warpgroup_mma_wait(0, deps=(acc,))
    else:
        if PER_KEY:
            acc = warpgroup_mma(weights, shared.v.index(at), acc, is_async=True)
            s = begin_scores(n + 1, rows, shared, C)
            end_turn(GROUP, shared)
            acc, s = warpgroup_mma_wait(0, deps=(acc, s))
        else:
            # The next exponents hide behind PV. Of keys with a scale each they and the products take longer so.
            s = begin_scores(n + 1, rows, shared, C)
            acc = warpgroup_mma(weights, shared.v.index(at), acc, is_async=True)
            end_turn(GROUP, shared)
            s = warpgroup_mma_wait(1, deps=(s,))
        x, alpha, reference = tile_exponents(n + 1, s, reference, k_scale, rows, shared, SCALED, ONE_SCALE, EDGE, C)
        if not PER_KEY:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        end_round(n + 1, shared, C)
    return x, alpha, Sums(acc, reference, total, largest)


@gluon.jit
def begin_scores(n, rows, shared, C: gl.constexpr):
    """Issue QK of tile n; the result must be waited for."""
    KEYS: gl.constexpr = C.tile.keys
    at = n % C.tile.stages
    nothing = gl.zeros([HALF, KEYS], gl.float32, PRODUCT)
    s = warpgroup_mma(rows.tile, shared.k.index(at).permute((1, 0)), nothing, use_acc=False, is_async=True)
    if C.features.rotary_pairs > 0:
        s = warpgroup_mma(rows.rotary_tile, shared.rotary.index(at).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def tile_exponents(
    n, s, reference, k_scale, rows, shared, SCALED: gl.constexpr, ONE_SCALE: gl.constexpr, EDGE: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """Tile n's products as softmax.exponents has them. ``k_scale``: :func:`key_scales`, if SCALED."""
    at = n % C.tile.stages
    if SCALED and not EDGE:
        if ONE_SCALE:
            x, alpha, reference = exponents_of_one_scale(s, k_scale, reference)
        else:
            x, alpha, reference = exponents_of_bounded(s, k_scale, reference)
    else:
        score_scale = rows.score_scale
        if ONE_SCALE:
            score_scale = k_scale
        elif SCALED:
            s = s * (k_scale * (1.0 / REST))[None, :]
            score_scale = gl.minimum(score_scale * REST, HUGE)
        if EDGE:
            s = gl.where(shared.positions.index(at).load(COLUMNS)[None, :] <= rows.position[:, None], s, float("-inf"))
        x, alpha, reference = exponents(s, score_scale, reference)
    return x, alpha, reference


@gluon.jit
def key_scales(at, shared, ONE_SCALE: gl.constexpr):
    """Scales of the keys in a buffer, [KEYS]; if ONE_SCALE the one that they share, for each query row, [HALF]."""
    if ONE_SCALE:
        # Of a key that is missing it is negative. Above 0, so that -inf times it is -inf.
        scale = gl.maximum(gl.abs(shared.k_scales.index(at).slice(0, HALF).load(ROWS)), 2.0**-126)
    else:
        scale = shared.k_scales.index(at).load(COLUMNS)
    return scale


@gluon.jit
def beyond_huge(score_scale):
    """The factor, a power of two, from :func:`tile_exponents`' scores of staged keys, whose unit ends at HUGE, to log2 units."""
    return gl.maximum(score_scale * (REST / HUGE), 1.0)


@gluon.jit
def await_round(n, shared, C: gl.constexpr):
    """Wait until the copies of round n have arrived, where wgmma sees them."""
    mbarrier.wait(shared.k_full.index(n % C.tile.stages), (n // C.tile.stages) & 1)
    # cp.async writes through the generic proxy, wgmma reads through the async one.
    fence_async_shared()


@gluon.jit
def end_round(n, shared, C: gl.constexpr):
    """This group is done with the buffers of round n."""
    mbarrier.arrive(shared.k_free.index(n % C.tile.stages), count=1)


@gluon.jit
def take_turn(number, GROUP: gl.constexpr, shared):
    """Wait for a group's turn of this number; group 0 has the first."""
    mbarrier.wait(shared.turn_1 if GROUP else shared.turn_0, (number & 1) ^ (1 - GROUP))


@gluon.jit
def end_turn(GROUP: gl.constexpr, shared):
    """The other group's turn begins when this one's products have been issued, not when they end."""
    mbarrier.arrive(shared.turn_0 if GROUP else shared.turn_1, count=1)
