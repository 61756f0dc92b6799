"""Ways: the interleaved columns that share a lane. Channel ``S * lane + s`` is way s; a row is a tuple of S ways."""

import triton
import triton.language as tl


@triton.jit
def deinterleave(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, WAYS: tl.constexpr):
    """[ROWS, WAYS * WIDTH] in channel order -> a tuple of WAYS tensors [ROWS, WIDTH]."""
    if WAYS == 1:
        ways = (x,)
    else:
        even, odd = tl.split(tl.reshape(x, [ROWS, WIDTH * WAYS // 2, 2]))
        evens = deinterleave(even, ROWS, WIDTH, WAYS // 2)
        odds = deinterleave(odd, ROWS, WIDTH, WAYS // 2)
        ways = ()
        for i in tl.static_range(WAYS // 2):
            ways = ways + (evens[i], odds[i])
    return ways


@triton.jit
def interleave(ways, ROWS: tl.constexpr, WIDTH: tl.constexpr, WAYS: tl.constexpr):
    """A tuple of WAYS tensors [ROWS, WIDTH] -> [ROWS, WAYS * WIDTH] in channel order."""
    if WAYS == 1:
        x = ways[0]
    else:
        evens = ()
        odds = ()
        for i in tl.static_range(WAYS // 2):
            evens = evens + (ways[2 * i],)
            odds = odds + (ways[2 * i + 1],)
        even = interleave(evens, ROWS, WIDTH, WAYS // 2)
        odd = interleave(odds, ROWS, WIDTH, WAYS // 2)
        x = tl.reshape(tl.join(even, odd), [ROWS, WIDTH * WAYS])
    return x
