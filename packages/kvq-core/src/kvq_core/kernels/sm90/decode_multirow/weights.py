"""Online softmax relative to a reference near each row's maximum, which is raised only when a score exceeds it by HEADROOM."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from kvq_core.kernels.sm90.decode_multirow.copying import exist
from kvq_core.kernels.sm90.decode_multirow.layouts import EVERY_WARP, Scales, State, product
from kvq_core.kernels.sm90.decode_multirow.operands import value_offsets
from kvq_core.kernels.sm90.decode_multirow.rotary import add_rotary_scores
from kvq_core.kernels.sm90.layouts import WARPS
from kvq_core.kernels.sm90.renamed import thread_barrier

HEADROOM = gl.constexpr(7.0)
"""How far scores may be above their row's reference, in log2 units: weights of float16 reach 2^16, and 256 is their usual most."""


@gluon.jit
def load_scales(at, tiles, SPLIT: gl.constexpr, OFFSETS: gl.constexpr, N: gl.constexpr, C: gl.constexpr):
    """Those of the tile at place ``at``."""
    BY_KEY: gl.constexpr = gl.SliceLayout(1, product(C.tile.rows))
    k = gl.full([C.tile.keys], 1.0, gl.float32, BY_KEY)
    v = k
    zero = k
    offsets = k
    if N.scaled:
        k = tiles.k_scales.index(at).load(BY_KEY)
        v = tiles.v_scales.index(at).load(BY_KEY)
        if N.zeros:
            k, zero = SPLIT(k)
            v, _ = SPLIT(v)
            offsets = value_offsets(tiles.v_scales.index(at), OFFSETS, C)
        k = k * N.key_prescale
    return Scales(k, zero, v, offsets)


@gluon.jit
def compare(
    n, first, s, scales, state, rows, rotary, tiles, span, EDGE: gl.constexpr, N: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """Tile n's products as (scores, the same in log2 units relative to their rows' references, whether these must be raised: a scalar)."""
    KEYS: gl.constexpr = C.tile.keys
    ROWS: gl.constexpr = C.tile.rows
    P: gl.constexpr = product(ROWS)
    BY_KEY: gl.constexpr = gl.SliceLayout(1, P)
    if N.scaled:
        # Not a plain product, which may be merged with the difference below: of huge scores the largest would not be 0 away from it.
        nothing = gl.zeros([KEYS, ROWS], gl.float32, P)
        s = gl.fma(s, scales.k[:, None], nothing)
    if C.features.rotary_pairs > 0:
        s = add_rotary_scores(n, s * rows.row_scale[None, :], rotary, C)
    if EDGE:
        position = n * KEYS + gl.arange(0, KEYS, BY_KEY)
        seen = exist(n, span, BY_KEY, C)[:, None] & (position[:, None] <= rows.position[None, :])
        s = gl.where(seen, s, float("-inf"))
    # A row without a maximum has scores above it, if it sees any. A work tile's first key tile is looked at whatever they are.
    z = relative(s, state.shift, rows.score_scale)
    high = any_above(z, scales.v, state.largest, tiles.flags.index((n - first) % 2), N, C)
    return s, z, (n == first) | high


@gluon.jit
def weigh(n, first, s, z, too_high, scales, state, rows, tiles, N: gl.constexpr, C: gl.constexpr):
    """The weights of what :func:`compare` gave, in shared memory, and the state with both them and the values of the tile before."""
    low, high = warpgroup_mma_wait(0, deps=(state.low, state.high))
    state = State(low, high, state.total, state.shift, state.largest, state.grow)
    if too_high:
        state = raise_top(s, scales.v, state, rows, N, C)
        z = relative(s, state.shift, rows.score_scale)
    p = gl.exp2(z)
    total = state.total + sum_of_threads(p, C)
    tiles.weights.index((n - first) % 2).store((p * (scales.v * state.grow)[:, None]).to(gl.float16))
    if N.zeros:
        tiles.offsets.index((n - first) % 2).store(scales.offsets)
    fence_async_shared()
    return State(state.low, state.high, total, state.shift, state.largest, state.grow)


@gluon.jit
def relative(s, shift, score_scale):
    """Scores in log2 units above their row's maximum. ``score_scale`` is a power of two, so that a multiply-add is exact but for its own
    rounding."""
    return gl.fma(s, score_scale[None, :], shift[None, :])


@gluon.jit
def any_above(z, v_scale, largest, flags, N: gl.constexpr, C: gl.constexpr):
    """Whether any of all scores ``z`` leaves the headroom, or a value's scale is larger than ``largest``: a scalar.

    ``flags`` [WARPS], shared memory that nobody has read since the last barrier but one: with one word of each warp's a barrier is enough,
    where a reduction over all threads has two.
    """
    # Keys are spread over warps and eighths of them, rows over the quarters of those; first comes what a thread has to itself.
    z = z.reshape([C.tile.keys // 64, WARPS, 2, 8, C.tile.rows // 8, 4, 2])
    most = gl.max(gl.max(gl.max(gl.max(z, 6), 4), 2), 0)
    high = most > HEADROOM
    if N.scaled:
        scale = gl.max(gl.max(v_scale.reshape([C.tile.keys // 64, WARPS, 2, 8]), 2), 0)
        scale = gl.convert_layout(scale, gl.SliceLayout(2, most.type.layout), assert_trivial=True)
        high = high | (scale > largest)[:, :, None]
    flags.store(gl.max(high.to(gl.int32).reshape([WARPS, 32]), 1))
    thread_barrier()
    return gl.max(flags.load(EVERY_WARP), 0) != 0


@gluon.jit
def raise_top(s, v_scale, state, rows, N: gl.constexpr, C: gl.constexpr):
    """The state relative to maxima with these scores and scales among them."""
    shift = gl.minimum(state.shift, -(gl.max(s, 0) * rows.score_scale))
    alpha = gl.exp2(shift - state.shift)
    OF_THREADS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, state.total.type.layout))
    total = state.total * gl.convert_layout(alpha, OF_THREADS, assert_trivial=True)[None, None, :]
    largest = state.largest
    if N.scaled:
        largest = gl.maximum(largest, gl.max(v_scale, 0))
        alpha = alpha * (state.largest / largest)
    return State(state.low * alpha[None, :], state.high * alpha[None, :], total, shift, largest, 256.0 / largest)


@gluon.jit
def sum_of_threads(p, C: gl.constexpr):
    """[KEYS, ROWS] -> [4, 8, ROWS]: every thread's keys."""
    return gl.sum(gl.sum(p.reshape([C.tile.keys // 64, 4, 2, 8, C.tile.rows]), 2), 0)
