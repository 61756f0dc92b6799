"""Which keys a row sees, and the two orientations a tile of scores can have.

Few query rows (decode): keys first, scores are [KEYS, ROWS], so that the tensor cores' long side holds keys. Many (prefill): rows
first, [ROWS, KEYS]. The helpers below turn key and row vectors so that they broadcast in either.
"""

import triton
import triton.language as tl


@triton.jit
def by_key(x, C: tl.constexpr):
    """A [KEYS] vector, shaped to broadcast against a tile of scores."""
    if C.keys_first:
        y = x[:, None]
    else:
        y = x[None, :]
    return y


@triton.jit
def by_row(x, C: tl.constexpr):
    """A [ROWS] vector, shaped to broadcast against a tile of scores."""
    if C.keys_first:
        y = x[None, :]
    else:
        y = x[:, None]
    return y


@triton.jit
def visible(rows, tile, seq, scoring, C: tl.constexpr):
    """Mask of the scores that count."""
    p = by_row(rows.position, C)
    j = by_key(tile.position, C)
    seen = by_key(tile.valid, C)
    # A sequence's only row is its newest token: the end of the keys is the causal limit.
    if C.max_query_len > 1:
        seen = seen & (j <= p)
    if scoring.window_left is not None:
        seen = seen & (p - j <= scoring.window_left)
    if scoring.ranges is not None:
        for r in range(scoring.num_ranges):
            start = tl.load(scoring.ranges + (seq * scoring.num_ranges + r) * 2)
            end = tl.load(scoring.ranges + (seq * scoring.num_ranges + r) * 2 + 1)
            both = by_key(tile.valid, C) & (p >= start) & (p <= end) & (j >= start) & (j <= end) & (start < end)
            seen = seen | both
    return seen
