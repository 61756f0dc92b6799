"""Scores to weights, and the state that both are summed in: the softmax, with a maximum that is looked up anew only when it must be."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from kvq_core.kernels.warpgroups.drafts.copying import find_keys
from kvq_core.kernels.warpgroups.drafts.layouts import State, product

HEADROOM = gl.constexpr(7.0)
"""How far scores may be above their row's maximum as last looked up, in log2 units: weights of float16 reach 2^16, and 256 is their usual
most."""


@gluon.jit
def weigh(
    n, first, s, state, rows, tiles, span, EDGE: gl.constexpr, SCALED: gl.constexpr, SHRUNK: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """From tile n's products to its weights in shared memory, while the values of the tile before are summed, and the state with both."""
    KEYS: gl.constexpr = C.keys
    ROWS: gl.constexpr = C.rows
    P: gl.constexpr = product(ROWS)
    BY_KEY: gl.constexpr = gl.SliceLayout(1, P)
    at = (n - first) % C.stages
    nothing = gl.zeros([KEYS, ROWS], gl.float32, P)
    v_scale = gl.full([KEYS], 1.0, gl.float32, BY_KEY)
    if SCALED:
        # Not a plain product, which may be merged with the difference below: of huge scores the largest would not be 0 away from it.
        s = gl.fma(s, nothing + (tiles.k_scales.index(at).load(BY_KEY) * SHRUNK)[:, None], nothing)
        v_scale = tiles.v_scales.index(at).load(BY_KEY)
    if EDGE:
        position = n * KEYS + gl.arange(0, KEYS, BY_KEY)
        _, _, exists = find_keys(n, span, BY_KEY, True, C)
        s = gl.where(exists[:, None] & (position[:, None] <= rows.position[None, :]), s, float("-inf"))
        z = s
        too_high = True
    else:
        # In a tile that all rows see, a row without a maximum has scores above it.
        z = relative(s, state.top, rows.left, 1e30, C)
        too_high = above(z, v_scale, state.largest, SCALED, C) > HEADROOM
    low, high = warpgroup_mma_wait(0, deps=(state.low, state.high))
    state = State(low, high, state.total, state.top, state.largest, state.grow)
    if too_high:
        state = raise_top(s, v_scale, state, rows, SCALED, C)
        z = relative(s, state.top, rows.left, 0.0, C)
    p = gl.exp2(z)
    total = state.total + sum_of_threads(p, C)
    tiles.weights.index((n - first) % 2).store((p * (v_scale * state.grow)[:, None]).to(gl.float16))
    fence_async_shared()
    return State(state.low, state.high, total, state.top, state.largest, state.grow)


@gluon.jit
def relative(s, top, left, unseen, C: gl.constexpr):
    """Scores in log2 units above their row's maximum; ``unseen`` above nothing where a row has none yet. ``left`` is a power of two, so
    that a multiply-add is exact but for its own rounding."""
    KEYS: gl.constexpr = C.keys
    ROWS: gl.constexpr = C.rows
    nothing = gl.zeros([KEYS, ROWS], gl.float32, product(ROWS))
    shift = gl.where(top == float("-inf"), unseen, -(top * left))
    return gl.fma(s, nothing + left[None, :], nothing + shift[None, :])


@gluon.jit
def above(z, v_scale, largest, SCALED: gl.constexpr, C: gl.constexpr):
    """The largest of all scores ``z``; or more, if a value's scale is larger than ``largest``."""
    THREADS: gl.constexpr = 128
    # Keys are spread over warps and eighths of them, rows over the quarters of those; first comes what a thread has to itself.
    z = z.reshape([C.keys // 64, 4, 2, 8, C.rows // 8, 4, 2])
    most = gl.max(gl.max(gl.max(gl.max(z, 6), 4), 2), 0)
    if SCALED:
        scale = gl.max(gl.max(v_scale.reshape([C.keys // 64, 4, 2, 8]), 2), 0)
        scale = gl.convert_layout(scale, gl.SliceLayout(2, most.type.layout), assert_trivial=True)
        most = gl.where(scale[:, :, None] > largest, 1e30, most)
    return gl.max(most.reshape([THREADS]), 0)


@gluon.jit
def raise_top(s, v_scale, state, rows, SCALED: gl.constexpr, C: gl.constexpr):
    """The state relative to maxima with these scores and scales among them."""
    top = gl.maximum(state.top, gl.max(s, 0))
    # A row that has seen nothing yet keeps -inf; subtracting 0 instead avoids inf - inf.
    alpha = gl.exp2((state.top - gl.where(top == float("-inf"), 0.0, top)) * rows.left)
    OF_THREADS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, state.total.type.layout))
    total = state.total * gl.convert_layout(alpha, OF_THREADS, assert_trivial=True)[None, None, :]
    largest = state.largest
    if SCALED:
        largest = gl.maximum(largest, gl.max(v_scale, 0))
        alpha = alpha * (state.largest / largest)
    return State(state.low * alpha[None, :], state.high * alpha[None, :], total, top, largest, 256.0 / largest)


@gluon.jit
def sum_of_threads(p, C: gl.constexpr):
    """[KEYS, ROWS] -> [4, 8, ROWS]: every thread's keys."""
    return gl.sum(gl.sum(p.reshape([C.keys // 64, 4, 2, 8, C.rows]), 2), 0)
