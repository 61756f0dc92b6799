"""Rows of lanes whose number is no power of two: 48 lanes are loaded, unpacked and multiplied as 32 and 16, without padding."""

import triton
import triton.language as tl


@triton.jit
def cut(x, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """[R, WIDTH] -> a tuple of the chunks that its first LANES columns are, the largest first."""
    if LANES == WIDTH:
        result = (x,)
    else:
        HALF: tl.constexpr = WIDTH // 2
        low, high = tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, HALF]), (0, 2, 1)))
        if LANES <= HALF:
            result = cut(low, LANES, HALF)
        else:
            result = (low,) + cut(high, LANES - HALF, HALF)
    return result


@triton.jit
def paste(chunks, AT: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr):
    """What :func:`cut` made chunks of, from chunk AT on; zeros beyond."""
    if LANES == WIDTH:
        result = chunks[AT]
    else:
        HALF: tl.constexpr = WIDTH // 2
        if LANES <= HALF:
            low = paste(chunks, AT, LANES, HALF)
            high = tl.zeros_like(low)
        else:
            low = chunks[AT]
            high = paste(chunks, AT + 1, LANES - HALF, HALF)
        result = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), [low.shape[0], WIDTH])
    return result


@triton.jit
def to_chunks(ways, ROW: tl.constexpr):
    """Ways [ROWS, lanes of a row, padded] -> operands: the ways of a chunk, then those of the next."""
    WIDTH: tl.constexpr = ROW.width
    LANES: tl.constexpr = ROW.lanes
    cuts = ()
    for s in tl.static_range(tl.constexpr(ROW.ways)):
        cuts = cuts + (cut(ways[s], LANES, WIDTH),)
    result = ()
    for i in tl.static_range(len(ROW.chunks)):
        for s in tl.static_range(tl.constexpr(ROW.ways)):
            result = result + (cuts[s][i],)
    return result


@triton.jit
def from_chunks(operands, ROW: tl.constexpr):
    """The ways that :func:`to_chunks` would make these operands of."""
    WIDTH: tl.constexpr = ROW.width
    LANES: tl.constexpr = ROW.lanes
    WAYS: tl.constexpr = ROW.ways
    result = ()
    for s in tl.static_range(WAYS):
        chunks = ()
        for i in tl.static_range(len(ROW.chunks)):
            chunks = chunks + (operands[i * WAYS + s],)
        result = result + (paste(chunks, 0, LANES, WIDTH),)
    return result
