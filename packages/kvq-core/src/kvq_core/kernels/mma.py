"""The two matrix products of attention over ways, in either orientation."""

import triton
import triton.language as tl

from kvq_core.kernels.dots import dot
from kvq_core.kernels.lane_chunks import from_chunks, to_chunks
from kvq_core.kernels.masks import by_key, by_row
from kvq_core.kernels.narrow_n import first_columns, gathered, scattered, spread
from kvq_core.kernels.packing import deinterleave, interleave


@triton.jit
def operand(ways, COUNT: tl.constexpr, ROW: tl.constexpr):
    """Unpacked ways [COUNT, WIDTH] (or transposed) as the products take them: joined into channel order, or as they are."""
    if ROW.joined:
        WIDTH: tl.constexpr = ways[0].shape[1]
        result = (interleave(ways, COUNT, WIDTH, tl.constexpr(ROW.ways)),)
    else:
        result = ways
    return result


@triton.jit
def operands(chunks, PLANE: tl.constexpr, ROW: tl.constexpr, C: tl.constexpr):
    """Lanes of a tile in chunks -> the operands of all of them."""
    result = ()
    for i in tl.static_range(len(chunks)):
        if PLANE.packed:
            result = result + operand(PLANE.unpack(chunks[i], C), tl.constexpr(C.tile.keys), ROW)
        else:
            result = result + (chunks[i],)
    return result


@triton.jit
def query_operand(ways, C: tl.constexpr):
    """Query ways [ROWS, WIDTH], transposed or joined once so that every tile can multiply them."""
    ROW: tl.constexpr = C.key_row
    if C.tile.keys_first:
        rows = ways
        if len(ROW.chunks) > 1:
            rows = to_chunks(ways, ROW)
        result = ()
        for s in tl.static_range(tl.constexpr(ROW.operands)):
            result = result + (tl.trans(scattered(rows[s], C)),)
    else:
        result = operand(ways, tl.constexpr(C.tile.rows), ROW)
    return result


@triton.jit
def scores(q, k, seed, C: tl.constexpr):
    """q.k summed over ways, on top of ``seed`` (or None): [KEYS, ROWS] if keys come first, else [ROWS, KEYS].

    A seed takes off what the codes' zero points will add, which costs less, and rounds better, than taking it off afterwards.
    """
    s = seed
    for i in tl.static_range(tl.constexpr(C.key_row.operands)):
        if C.tile.keys_first:
            s = dot(k[i], q[i], s, C.features.upcast_dots)
        else:
            s = dot(q[i], k[i] if C.tile.keys_transposed else tl.trans(k[i]), s, C.features.upcast_dots)
    return first_columns(s, C)


@triton.jit
def seed_of_rows(x, C: tl.constexpr):
    """A seed of :func:`scores` that is the same for every key: a [ROWS] vector, spread."""
    KEYS: tl.constexpr = C.tile.keys
    return by_row(x, C) + by_key(tl.zeros([KEYS], tl.float32), C)


@triton.jit
def accumulate(weights, v, acc, alpha, offset, C: tl.constexpr):
    """alpha * acc - offset + weights v for each operand: [WIDTH, ROWS] if keys come first, else [ROWS, WIDTH].

    ``weights`` and ``alpha`` are of the rows that have scores. ``offset``: a vector of theirs, or None. What the codes' zero points add is
    taken off *before* the product that adds it, so that sums stay as small as the values: the tensor cores truncate, which a large common
    part would turn into a bias.
    """
    weights, alpha = spread(weights, tl.zeros_like(weights), C), spread(alpha, alpha, C)
    if offset is not None:
        offset = spread(offset, offset, C)
    result = ()
    for i in tl.static_range(tl.constexpr(C.value_row.operands)):
        before = acc[i] * by_row(alpha, C)
        if offset is not None:
            before -= by_row(offset * C.value_gains[i % C.value_row.ways], C)
        if C.tile.keys_first:
            after = dot(v[i], weights, before, C.features.upcast_dots)
        else:
            after = dot(weights, v[i], before, C.features.upcast_dots)
        result = result + (after,)
    return result


@triton.jit
def accumulator(C: tl.constexpr):
    """Zero accumulators, float32 x WAYS, in the shape of :func:`accumulate`."""
    ROWS: tl.constexpr = C.tile.rows
    ROW: tl.constexpr = C.value_row
    acc = ()
    for i in tl.static_range(tl.constexpr(ROW.operands)):
        if C.tile.keys_first:
            acc = acc + (tl.zeros([tl.constexpr(ROW.operand_lanes[i]), ROWS], tl.float32),)
        else:
            acc = acc + (tl.zeros([ROWS, tl.constexpr(C.value_heads.width * ROW.ways // ROW.operands)], tl.float32),)
    return acc


@triton.jit
def accumulated_rows(acc, unit, C: tl.constexpr):
    """What was accumulated, times a scalar, as the format's ways [ROWS, WIDTH] in either orientation."""
    ROWS: tl.constexpr = C.tile.rows
    WIDTH: tl.constexpr = C.value_heads.width
    ROW: tl.constexpr = C.value_row
    if ROW.joined:
        rows = deinterleave(acc[0] * (unit * (1.0 / C.value_gains[0])), ROWS, WIDTH, tl.constexpr(ROW.ways))
    else:
        rows = ()
        for i in tl.static_range(tl.constexpr(ROW.operands)):
            x = acc[i] * (unit * (1.0 / C.value_gains[i % ROW.ways]))
            if C.tile.keys_first:
                x = gathered(tl.trans(x), C)
            rows = rows + (x,)
        if C.tile.keys_first and len(ROW.chunks) > 1:
            rows = from_chunks(rows, ROW)
    return rows


@triton.jit
def weigh(p, v_scale, largest, C: tl.constexpr):
    """Fold the values' scales into the probabilities: (float16 weights, factor for the accumulator, new largest scale).

    float16 holds weights of at most 256, so they are taken relative to the largest scale so far, which :func:`unweigh` puts back.
    """
    grown = tl.maximum(largest, tl.max(v_scale, 0))
    weights = (p * by_key(v_scale * (256.0 / grown), C)).to(tl.float16)
    return weights, largest / grown, grown


@triton.jit
def sum_over_keys(weights, C: tl.constexpr):
    """The sum of each row's float16 weights, float32.

    Where keys come first, a product with ones adds a thread's own: one instruction for 16 keys, not a conversion and an addition for each.
    It pays where instructions limit the loop, beyond two ways.
    """
    if C.tile.keys_first and not C.tile.narrow_n:
        ones = tl.full([16, C.tile.lane_rows], 1.0, tl.float16)
        # Every row of the product has the sums.
        total = tl.sum(dot(ones, weights, None, C.features.upcast_dots), 0) * (1.0 / 16)
    else:
        total = tl.sum(weights.to(tl.float32), 0 if C.tile.keys_first else 1)
    return total


@triton.jit
def unweigh(largest):
    """The factor that turns a sum of :func:`weigh`'s weights into a sum over probabilities times scales."""
    return largest * (1.0 / 256.0)
