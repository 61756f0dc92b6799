"""Which keys a row sees, and the two orientations a tile of scores can have.

With ``C.tile.keys_first`` scores are [KEYS, ROWS], and the M of the MMA holds keys: in decode, unless 16 rows on one warp fill M
themselves. Otherwise, and in prefill, they are [ROWS, KEYS]. The helpers below shape vectors of keys and of rows to broadcast in either.
"""

import triton
import triton.language as tl

from kvq_core.kernels.pack_keys import by_folded_key


@triton.jit
def by_key(x, C: tl.constexpr):
    """A [KEYS] vector, shaped to broadcast against a tile of scores."""
    if C.tile.fold > 1:
        y = by_folded_key(x, C)
    elif C.tile.keys_first:
        y = x[:, None]
    else:
        y = x[None, :]
    return y


@triton.jit
def by_row(x, C: tl.constexpr):
    """A [ROWS] vector, shaped to broadcast against a tile of scores."""
    if C.tile.keys_first:
        y = x[None, :]
    else:
        y = x[:, None]
    return y


@triton.jit
def hide_invalid(k_scale, tile):
    """What a score gets for its key, [KEYS]: 0, or -inf for an invalid one, which a scale tells by its sign (``load_scales``)."""
    if k_scale is None:
        hidden = tl.where(tile.valid, 0.0, float("-inf"))
    else:
        # A NaN is a key's own: it shows.
        hidden = tl.where(k_scale < 0.0, float("-inf"), 0.0)
    return hidden


@triton.jit
def hide_unseen(s, rows, tile, seq, scoring, LOOP: tl.constexpr, C: tl.constexpr):
    """-inf for valid keys that a row does not see; nothing to do in unmasked iterations."""
    if scoring.ranges is not None or LOOP > 0:
        s = tl.where(visible(rows, tile, seq, scoring, C), s, float("-inf"))
    return s


@triton.jit
def visible(rows, tile, seq, scoring, C: tl.constexpr):
    """Mask of the scores that count, as far as rows differ in it."""
    p = by_row(rows.position, C)
    j = by_key(tile.position, C)
    seen = j <= p
    if scoring.window_left is not None:
        seen = seen & (p - j <= scoring.window_left)
    if scoring.ranges is not None:
        for r in range(scoring.num_ranges):
            start = tl.load(scoring.ranges + (seq * scoring.num_ranges + r) * 2)
            end = tl.load(scoring.ranges + (seq * scoring.num_ranges + r) * 2 + 1)
            seen = seen | ((p >= start) & (p <= end) & (j >= start) & (j <= end) & (start < end))
    return seen
