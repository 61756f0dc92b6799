"""How far a result may be from the exact one: bounds derived from what the arithmetic must round, never tuned until green.

**Reads.** A kernel rounds the query once (after rotating it, where the mode rotates) and each probability once, to the 16-bit
operands of the tensor cores; everything else is float32, and the result is rounded to ``out``'s dtype. Let u be the unit roundoff of
the operands, f = 2^-24 that of float32, and r and r' the mode's :func:`level_error`. To first order an error e of the
query moves the result by ``scale * sum_d e_d G_dc``, with ``G_dc = sum_j p_j c_j k_jd (v_jc - out_c)`` and c_j the softcap's slope.
Rounding errors are independent and spread evenly over +-u|q_d|, so that this has the standard deviation ``sigma_c`` below, and the sum
over channels is near Gaussian: 6 sigma is one in 5e8. The rest is bounded by the triangle inequality::

    scores    (6 sigma_c + sum_j p_j w_j (|v_j| + |out|)) / (sum_j p_j e^-d_j + p_sink)
              sigma_c = u / sqrt(3) * scale * sqrt(sum_d q_d^2 G_dc^2)
              d_j = 6 u / sqrt(3) * scale * sqrt(sum_d q_d^2 k_jd^2) + t_j           w_j = e^d_j - 1 - d_j + t_j + d_j^2 / softcap
              t_j = r |s_j - a| + 6 r' scale |q| |k_j| / sqrt(D) + D f (scale |q| |k_j| + sum |a|) + 8 f (|s_j| + softcap)
              a: the part of smoothed keys' scores that is their mean's, where a softcap or a sink sees it; sum |a|: of its terms
    products  u sum_j p_j |v_j|  +  f (6 sqrt(n) + 16) sum_j p_j ||v_j||  +  sum_j p_j (r |v_j| + 6 r' ||v_j|| / sqrt(Dv))
              +  Dv 2^-126, since numbers below float32's smallest normal one may be flushed
              +  2^-32 n max_j ||v_j||, since weights may be float16, with 256 for the largest scale of values in a tile: what rounds to
                 a multiple of 2^-24 loses half of it, times codes of up to twice that row's peak (those of affine levels)

A mode may round in a rotated basis, which is its own business: the largest sigma over the plain, the Hadamard and the randomized
Hadamard basis counts.

**Round trips.** One function for each kind of quantizer, in float64, from the definition of the kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvq_core.hadamard import LARGEST_SCALE, SCALE_BITS, block_of, hadamard_matrix, rht_signs, rounded_scale
from kvq_core.testing.oracle import Exact

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend

F32 = 2.0**-24
SIGMAS = 6.0
FLOAT16_WEIGHT = 2.0**-33
"""Half the smallest float16 above 0, relative to the 256 that the largest scale of a tile's values stands for."""
ROTARY = 2.0**-10
"""Of a rotary mean's terms: operands are float16, both a query's and a position's."""
SMALLEST = 2.0**-126
"""Below this float32 is subnormal, and hardware may flush it to zero."""


class LevelError(NamedTuple):
    """What a row y of levels becomes where each is off by a factor 1 + e of its own: (1 + g) y + z.

    With g the mean of e over y's energy, z is orthogonal to y. ``shared`` bounds the size of g; ``spread`` the length of z relative to y's,
    which is a standard deviation, and so at most half the range. A row of one level alone has no z, and all of that level's e in g.
    """

    shared: float = 0.0
    spread: float = 0.0


def level_error(backend: QuantKVBackend) -> LevelError:
    """From :attr:`~kvq_core.QuantKVBackend.read_level_errors`."""
    errors = backend.read_level_errors
    return LevelError(max(map(abs, errors)), (max(errors) - min(errors)) / 2) if errors else LevelError()


NO_LEVEL_ERROR = LevelError()


def read(
    exact: Exact,
    softmax_scale: float,
    softcap: float,
    u: float,
    level_error: LevelError = NO_LEVEL_ERROR,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """The bound [Hq, n, Dv] on |float32 result - exact.out| where matrix operands have unit roundoff ``u``; 0: they are not rounded.

    ``rows`` [n] bool: where sigma_c counts, which takes longest; the bound is less elsewhere. By default everywhere.
    """
    num_keys = exact.k.shape[1]
    deviation = _deviation(softmax_scale, u)
    from_query, rest = _scores(exact, softmax_scale, softcap, u, level_error)

    p, v = exact.weights, exact.v.abs()
    score = from_query + rest
    slope = torch.ones_like(p)
    beyond = torch.expm1(score.clamp(max=50)) - score + rest
    if softcap:
        # No score leaves +-softcap; and the cap's second derivative is below 1 / softcap.
        up, down = (softcap * torch.tanh((exact.raw + side * score) / softcap) for side in (1, -1))
        score = torch.maximum(up - exact.capped, exact.capped - down) + 16 * F32 * softcap
        slope = 1 - (exact.capped / softcap).square()
        beyond = torch.minimum(beyond + from_query.square() / softcap, torch.expm1(score) + slope * from_query)
    sink = (1 - p.sum(-1, keepdim=True)).clamp(min=0) * (p.sum(-1, keepdim=True) > 0)
    least = ((p * torch.exp(-score)).sum(-1, keepdim=True) + sink).clamp(min=SMALLEST)
    moved = p * beyond
    effect = deviation * _largest_effect(exact, p * slope, rows) if u else 0.0
    weights = (effect + moved @ v + moved.sum(-1, keepdim=True) * exact.out.abs()) / least
    # Sums run over codes in the mode's own basis, so that what float32 loses there is relative to the whole row.
    rows = p @ exact.v.norm(dim=-1, keepdim=True)
    products = u * (p @ v) + (SIGMAS * math.sqrt(num_keys) + 16) * F32 * rows
    levels = level_error.shared * (p @ v) + level_error.spread * SIGMAS / math.sqrt(v.shape[-1]) * rows
    lost = 2 * num_keys * FLOAT16_WEIGHT * exact.v.norm(dim=-1).amax(-1)[:, None, None] if num_keys else 0.0
    return weights + products + levels + lost + v.shape[-1] * SMALLEST


def lse(exact: Exact, softmax_scale: float, softcap: float, u: float, level_error: LevelError = NO_LEVEL_ERROR) -> torch.Tensor:
    """The bound [Hq, n] on |float32 LSE - exact.lse|. A log-sum-exp moves by no more than the score that moves most (a softcap's slope is
    at most 1); its sum's rounding, relative to the sum, adds to it."""
    from_query, rest = _scores(exact, softmax_scale, softcap, u, level_error)
    error = (from_query + rest).masked_fill(exact.final == -math.inf, 0.0)
    num_keys = exact.k.shape[1]
    moved = error.amax(-1) if num_keys else torch.zeros_like(exact.lse)
    return moved + (SIGMAS * math.sqrt(num_keys) + 16) * F32 + 4 * F32 * exact.lse.abs().nan_to_num(posinf=0.0)


def joined(exact: Exact, other: torch.Tensor, other_lse: torch.Tensor, bound: torch.Tensor, lse_bound: torch.Tensor) -> torch.Tensor:
    """The bound [Hq, n, Dv] where a result with ``bound``, and an LSE with ``lse_bound``, are joined with those of another read, which are
    exact. A share w moves by at most w (1 - w) times what an LSE does."""
    total = torch.logaddexp(exact.lse, other_lse)
    share = (exact.lse - total).exp().nan_to_num(nan=0.0)[..., None]
    moved = lse_bound + 4 * F32 * other_lse.abs().nan_to_num(posinf=0.0) + 16 * F32
    spread = share * (1 - share) * moved[..., None] * (exact.out - other).abs()
    # What a share moves beside one that is nearly all: to second order.
    spread = spread * torch.exp(moved[..., None].clamp(max=50))
    return share * bound + spread + 8 * F32 * (share * exact.out.abs() + (1 - share) * other.abs())


def _deviation(softmax_scale: float, u: float) -> float:
    return SIGMAS * u / math.sqrt(3) * softmax_scale


def _scores(exact: Exact, softmax_scale: float, softcap: float, u: float, level_error: LevelError) -> tuple[torch.Tensor, torch.Tensor]:
    """How far scores may be off [Hq, n, m]: what the query's rounding makes of it, and the rest."""
    size = exact.q.shape[-1]
    lengths = exact.q.norm(dim=-1)[..., None] * exact.k.norm(dim=-1)[:, None, :] * softmax_scale
    rest = level_error.shared * (exact.raw - exact.shift).abs() + level_error.spread * SIGMAS * lengths / math.sqrt(size)
    rest = rest + size * F32 * (lengths + exact.shift_terms) + ROTARY * exact.rotary_terms
    rest = rest + 8 * F32 * (exact.raw.abs() + softcap) + 4 * F32 * exact.final.abs().nan_to_num(posinf=0.0)
    from_query = _deviation(softmax_scale, u) * _largest_spread(exact.q, exact.k) if u else torch.zeros_like(rest)
    return from_query, rest


def stored(bound: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, u: float) -> torch.Tensor:
    """``bound`` plus the rounding of a value within it of ``exact`` to ``dtype``, of unit roundoff ``u``."""
    info = torch.finfo(dtype)
    return bound + u * (exact.abs() + bound) + info.tiny * info.eps


def _bases(x: torch.Tensor) -> list[torch.Tensor]:
    """``x`` [..., D] in the orthonormal bases that a mode may round in. Products with a matrix: of this many rows, quicker than passes."""
    block = block_of(x.shape[-1])
    matrix = hadamard_matrix(block, x.device).to(x.dtype) / math.sqrt(block)
    signs = rht_signs(x.shape[-1], device=x.device).to(x.dtype)
    return [x, *((rows.unflatten(-1, (-1, block)) @ matrix).flatten(-2) for rows in (x, x * signs))]


def _largest_spread(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """sqrt(sum_d q_d^2 k_jd^2) [Hq, n, m], the largest over the bases."""
    return torch.stack([(a.square() @ b.square().transpose(1, 2)).sqrt() for a, b in zip(_bases(q), _bases(k), strict=True)]).amax(0)


def _largest_effect(exact: Exact, weights: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """sqrt(sum_d q_d^2 G_dc^2) [Hq, n, Dv], the largest over the bases, 0 but in ``rows`` [n]; ``weights`` [Hq, n, m] are p_j c_j."""
    q, k, v = exact.q, exact.k, exact.v
    effect = torch.zeros_like(exact.out)
    numbers = torch.arange(q.shape[1], device=q.device) if rows is None else rows.nonzero().flatten()
    per_row = k.shape[0] * (k.shape[1] + v.shape[2]) * k.shape[2]
    # 16 MiB at once: few enough that they stay near the processor, and enough for one launch on a GPU.
    for at in numbers.split(max(1, 2**21 // max(per_row, 1))):
        weighted = weights[:, at, None] * v.transpose(1, 2)[:, None]
        gains = weighted @ k[:, None] - exact.out[:, at, :, None] * (weights[:, at] @ k)[:, :, None]
        squares = [(a[:, :, None].square() * g.square()).sum(-1) for a, g in zip(_bases(q[:, at]), _bases(gains), strict=True)]
        effect[:, at] = torch.stack(squares).amax(0).sqrt()
    return effect


# -- round trips: |y - y'| in the space a mode quantizes in ----------------------------------------------------------------


def rotation(x: torch.Tensor) -> torch.Tensor:
    """What float32 summation over a transform's block may lose of H x, D x and the like: [..., 1]."""
    block = block_of(x.shape[-1])
    return (math.log2(block) + 4) * F32 * x.abs().unflatten(-1, (-1, block)).sum(-1).amax(-1, keepdim=True)


def symmetric_levels(x: torch.Tensor, largest: int, min_scale: float) -> torch.Tensor:
    """Uniform levels scale * n, n from -largest to largest, scale = max(absmax / largest, min_scale): half a step."""
    scale = (x.abs().amax(-1, keepdim=True) / largest).clamp(min=min_scale)
    return scale / 2 + 4 * F32 * x.abs()


def affine_levels(y: torch.Tensor, levels: int, min_scale: float, lost_bits: int, clip: float = 0.0) -> torch.Tensor:
    """Levels s * (n - zp), 0 <= n, zp < levels, s = max(range / (levels - 1), min_scale) less ``lost_bits`` of its mantissa.

    The range has 0 in it, and is ``clip`` of itself shorter at either end. Half a step, the drift of the cut scale over the levels, and,
    where levels end before y does, the distance from y to the nearest level there is.
    """
    low, high = y.amin(-1, keepdim=True).clamp(max=0), y.amax(-1, keepdim=True).clamp(min=0)
    low, high = low + clip * (high - low), high - clip * (high - low)
    scale = ((high - low) / (levels - 1)).clamp(min=min_scale)
    zero = (-low / scale + 0.5).floor().clamp(0, levels - 1)
    outside = torch.maximum(y - scale * (levels - 1 - zero), -scale * zero - y).clamp(min=0)
    return scale / 2 + outside + levels * scale * 2.0 ** (lost_bits - 23) + 8 * F32 * y.abs().amax(-1, keepdim=True)


def unbiased(y: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """``bound`` on |y - y_t| after y_t has become y' = f y_t with <y, y'> = <y, y>.

    f - 1 = <y, y - y_t> / <y, y_t>, and <y, y_t> is not below sum |y| (|y| - bound), nor |<y, y - y_t>| above sum |y| bound.
    """
    moved, kept = (y.abs() * bound).sum(-1, keepdim=True), (y.abs() * (y.abs() - bound)).sum(-1, keepdim=True)
    return bound + torch.where(kept > 0, moved / kept, torch.inf) * (y.abs() + bound)


def as_long(y: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """``bound`` on |y - y_t| after y_t has become y' = f y_t with ||y'|| = ||y||: f - 1 is at most ||y - y_t|| / ||y_t||."""
    moved, length = bound.norm(dim=-1, keepdim=True), y.norm(dim=-1, keepdim=True)
    return bound + torch.where(length > moved, moved / (length - moved), torch.inf).nan_to_num(nan=0.0) * (y.abs() + bound)


def not_worse_than_zero(y: torch.Tensor, bound: torch.Tensor, largest_scale: torch.Tensor) -> torch.Tensor:
    """``bound`` on |y - y'|, and no more than ||y||; that alone where ``largest_scale``, which the scale may be, is more than is stored."""
    length = y.norm(dim=-1, keepdim=True)
    return torch.where(largest_scale > LARGEST_SCALE, length, torch.minimum(bound, length))


def with_rounded_scale(y: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """``bound`` on |y - y'| after the scale of y' has been rounded to SCALE_BITS."""
    return bound + 2.0**-SCALE_BITS * (y.abs() + bound)


def stored_scale(scale: torch.Tensor, stored: torch.Tensor, tolerance: float) -> torch.Tensor:
    """``scale`` [...] rounded to SCALE_BITS, or ``stored`` where ``scale`` times 1 +- ``tolerance`` rounds to it."""
    low, high = (rounded_scale((scale.double() * (1 + sign * tolerance)).float()) for sign in (-1, 1))
    return torch.where((stored == low) | (stored == high), stored, rounded_scale(scale.float()))


def minifloat(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """scale * dtype(x / scale): half an ulp of the 8-bit float, half its smallest subnormal near 0, and what is clamped."""
    info = torch.finfo(dtype)
    clamped = (x.abs() - scale * info.max).clamp(min=0)
    # tiny is the smallest normal; the numbers below it are tiny * eps apart.
    half_step = (x.abs() / scale * (info.eps / 2)).clamp(min=info.tiny * info.eps / 2)
    return scale * half_step + clamped + 4 * F32 * x.abs()


def gaussian_levels(y: torch.Tensor, boundaries: Sequence[float], levels: Sequence[float]) -> torch.Tensor:
    """Levels +-``levels`` times rms(y), cells cut at 0 and +-``boundaries`` times it: how far a cell's points are from its level.

    Both are of the positive half, ascending; a boundary lies midway between two levels, and the outermost cell has no end.
    """
    rms = y.square().mean(-1, keepdim=True).sqrt()
    z = y.abs() / rms.clamp(min=1e-300)
    *inner, outer = levels
    within = (z - outer).clamp(min=outer - boundaries[-1])
    for low, level, high in reversed([*zip((0.0, *boundaries[:-1]), inner, boundaries, strict=True)]):
        within = torch.where(z < high, max(level - low, high - level), within)
    # A point at the boundary may fall on either side of it, at the same distance.
    return rms * within * (1 + 16 * F32) + 16 * F32 * y.abs().amax(-1, keepdim=True)
