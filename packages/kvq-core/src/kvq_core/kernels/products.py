"""The two matrix products of attention over streams, in either orientation."""

import triton
import triton.language as tl

from kvq_core.kernels.dots import dot
from kvq_core.kernels.masks import by_key


@triton.jit
def query_operand(streams, C: tl.constexpr):
    """Query streams [ROWS, WIDTH], turned once so that every tile can multiply them."""
    if C.keys_first:
        result = ()
        for s in tl.static_range(tl.constexpr(C.streams)):
            result = result + (tl.trans(streams[s]),)
    else:
        result = streams
    return result


@triton.jit
def scores(q, k, C: tl.constexpr):
    """q.k summed over streams: [KEYS, ROWS] if keys come first, else [ROWS, KEYS]."""
    s = None
    for i in tl.static_range(tl.constexpr(C.streams)):
        if C.keys_first:
            s = dot(k[i], q[i], s, C.upcast_dots)
        else:
            s = dot(q[i], tl.trans(k[i]), s, C.upcast_dots)
    return s


@triton.jit
def accumulate(weights, v, acc, alpha, C: tl.constexpr):
    """alpha * acc + weights v for each stream: [ROWS, WIDTH] x STREAMS."""
    if C.keys_first:
        weights = tl.trans(weights)
    result = ()
    for i in tl.static_range(tl.constexpr(C.streams)):
        result = result + (dot(weights, v[i], acc[i] * alpha[:, None], C.upcast_dots),)
    return result


@triton.jit
def accumulator(C: tl.constexpr):
    """Zero accumulators, [ROWS, WIDTH] float32 x STREAMS."""
    ROWS: tl.constexpr = C.rows
    WIDTH: tl.constexpr = C.value_heads.width
    acc = ()
    for _ in tl.static_range(tl.constexpr(C.streams)):
        acc = acc + (tl.zeros([ROWS, WIDTH], tl.float32),)
    return acc


@triton.jit
def weigh(p, v_scale, largest, C: tl.constexpr):
    """Fold the values' scales into the probabilities: (float16 weights, factor for the accumulator, new largest scale).

    float16 holds weights of at most 256, so they are taken relative to the largest scale so far, which :func:`unweigh` puts back.
    """
    grown = tl.maximum(largest, tl.max(v_scale, 0))
    weights = (p * by_key(v_scale * (256.0 / grown), C)).to(tl.float16)
    return weights, largest / grown, grown


@triton.jit
def unweigh(largest):
    """The factor that turns a sum of :func:`weigh`'s weights into a sum over probabilities times scales."""
    return largest * (1.0 / 256.0)
