"""Streams: the interleaved columns that share a lane. Channel ``S * lane + s`` is stream s; a row is a tuple of S streams."""

import triton
import triton.language as tl


@triton.jit
def to_streams(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, STREAMS: tl.constexpr):
    """[ROWS, STREAMS * WIDTH] in channel order -> a tuple of STREAMS tensors [ROWS, WIDTH]."""
    if STREAMS == 1:
        streams = (x,)
    else:
        even, odd = tl.split(tl.reshape(x, [ROWS, WIDTH * STREAMS // 2, 2]))
        evens = to_streams(even, ROWS, WIDTH, STREAMS // 2)
        odds = to_streams(odd, ROWS, WIDTH, STREAMS // 2)
        streams = ()
        for i in tl.static_range(STREAMS // 2):
            streams = streams + (evens[i], odds[i])
    return streams


@triton.jit
def from_streams(streams, ROWS: tl.constexpr, WIDTH: tl.constexpr, STREAMS: tl.constexpr):
    """A tuple of STREAMS tensors [ROWS, WIDTH] -> [ROWS, STREAMS * WIDTH] in channel order."""
    if STREAMS == 1:
        x = streams[0]
    else:
        evens = ()
        odds = ()
        for i in tl.static_range(STREAMS // 2):
            evens = evens + (streams[2 * i],)
            odds = odds + (streams[2 * i + 1],)
        even = from_streams(evens, ROWS, WIDTH, STREAMS // 2)
        odd = from_streams(odds, ROWS, WIDTH, STREAMS // 2)
        x = tl.reshape(tl.join(even, odd), [ROWS, WIDTH * STREAMS])
    return x
