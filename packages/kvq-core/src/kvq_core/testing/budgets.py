"""How far a result may be from the exact one: bounds derived from what the arithmetic must round, never tuned until green.

**Reads.** A kernel rounds the query once (after rotating it, where the mode rotates) and each probability once, to the 16-bit
operands of the tensor cores; everything else is float32, and the result is rounded to ``out``'s dtype. With unit roundoff u of the
operands, f = 2^-24 of float32, and r the mode's ``read_level_error`` (the relative error its kernels make in a decoded element)::

    score     d_j = 6 (u + sqrt(3) r) / sqrt(3) * scale * sqrt(sum_c q_c^2 k_jc^2)  + r |s_j|
                    + D f scale |q| |k_j| + 8 f (|s_j| + softcap)
    weights   |out' - out| <= sum_j p_j (e^d_j - 1) (|v_j| + |out|) / (sum_j p_j e^-d_j + p_sink)        exactly
    products  (u + 6 f sqrt(n) + 16 f) sum_j p_j |v_j|  +  r sum_j p_j (|v_j| + 6 ||v_j|| / sqrt(Dv))

The first line: rounding errors are independent and uniform in +-u|q_c|, of standard deviation u|q_c| / sqrt(3); the sum over channels
is near Gaussian, and 6 sigma is one in 5e8. Since a mode may round in a rotated basis, the largest of the sum over the plain, the
Hadamard and the randomized Hadamard basis counts. The second is an identity plus the triangle inequality. Softcap maps d_j through tanh.

**Round trips.** One function for each kind of quantizer, in float64, from the definition of the kind.
"""

from __future__ import annotations

import math

import torch

from kvq_core.hadamard import block_hadamard, block_of, single_rht
from kvq_core.testing.oracle import Exact

F32 = 2.0**-24
SIGMAS = 6.0
SMALLEST = 2.0**-126
"""Below this float32 is subnormal, and hardware may flush it to zero."""


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number: the largest relative error of rounding to nearest."""
    return torch.finfo(dtype).eps / 2


def read(exact: Exact, softmax_scale: float, softcap: float, operand: torch.dtype, level_error: float = 0.0) -> torch.Tensor:
    """The bound [Hq, n, Dv] on |float32 result - exact.out| for kernels whose matrix operands are ``operand``."""
    u = unit_roundoff(operand)
    size, num_keys = exact.q.shape[-1], exact.k.shape[1]
    spread = _largest_spread(exact.q, exact.k) * softmax_scale
    lengths = exact.q.norm(dim=-1)[..., None] * exact.k.norm(dim=-1)[:, None, :] * softmax_scale
    score = SIGMAS * (u / math.sqrt(3) + level_error) * spread + level_error * exact.raw.abs() + size * F32 * lengths
    if softcap:
        up, down = (torch.tanh((exact.raw + side * score) / softcap) for side in (1, -1))
        score = softcap * torch.maximum(up - exact.capped / softcap, exact.capped / softcap - down)
    score = score + 8 * F32 * (exact.capped.abs() + softcap) + 4 * F32 * exact.final.abs().nan_to_num(posinf=0.0)

    p, v = exact.weights, exact.v.abs()
    sink = (1 - p.sum(-1, keepdim=True)).clamp(min=0) * (p.sum(-1, keepdim=True) > 0)
    moved = p * torch.expm1(score.clamp(max=50))
    least = (p * torch.exp(-score)).sum(-1, keepdim=True) + sink
    weights = (moved @ v + moved.sum(-1, keepdim=True) * exact.out.abs()) / least.clamp(min=SMALLEST)
    products = (u + (SIGMAS * math.sqrt(num_keys) + 16) * F32) * (p @ v)
    lengths_v = exact.v.norm(dim=-1, keepdim=True) / math.sqrt(exact.v.shape[-1])
    levels = level_error * (p @ (v + SIGMAS * lengths_v))
    return weights + products + levels


def stored(bound: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``bound`` plus the rounding of a value within it of ``exact`` to ``dtype``."""
    info = torch.finfo(dtype)
    return bound + unit_roundoff(dtype) * (exact.abs() + bound) + info.tiny * info.eps


def _largest_spread(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """sqrt(sum_c q_c^2 k_c^2) [Hq, n, m], the largest over the bases a mode may round in."""
    spread = None
    for basis in (lambda x: x, block_hadamard, single_rht):
        norm = 1.0 if basis is not block_hadamard and basis is not single_rht else math.sqrt(block_of(q.shape[-1]))
        here = ((basis(q) / norm).square() @ (basis(k) / norm).square().transpose(1, 2)).sqrt()
        spread = here if spread is None else torch.maximum(spread, here)
    assert spread is not None
    return spread


# -- round trips: |y - y'| in the space a mode quantizes in ----------------------------------------------------------------


def rotation(x: torch.Tensor) -> torch.Tensor:
    """What float32 summation over a transform's block may lose of H x, D x and the like: [..., 1]."""
    block = block_of(x.shape[-1])
    return (math.log2(block) + 4) * F32 * x.abs().unflatten(-1, (-1, block)).sum(-1).amax(-1, keepdim=True)


def symmetric_levels(x: torch.Tensor, largest: int, min_scale: float) -> torch.Tensor:
    """Uniform levels scale * n, |n| <= largest, scale = max(absmax / largest, min_scale): half a step."""
    scale = (x.abs().amax(-1, keepdim=True) / largest).clamp(min=min_scale)
    return scale / 2 + 4 * F32 * x.abs()


def affine_levels(y: torch.Tensor, levels: int, min_scale: float, lost_bits: int) -> torch.Tensor:
    """Levels s * (n - zp), 0 <= n, zp < levels, s = max(range / (levels - 1), min_scale) less ``lost_bits`` of its mantissa.

    Half a step, the drift of the cut scale over the levels, and, where the zero point is clamped (a row all of one sign), the distance
    from y to the nearest level there is.
    """
    low, high = y.amin(-1, keepdim=True), y.amax(-1, keepdim=True)
    scale = ((high - low) / (levels - 1)).clamp(min=min_scale)
    zero = (-low / scale + 0.5).floor().clamp(0, levels - 1)
    outside = torch.maximum(y - scale * (levels - 1 - zero), -scale * zero - y).clamp(min=0)
    return scale / 2 + outside + levels * scale * 2.0 ** (lost_bits - 23) + 8 * F32 * y.abs().amax(-1, keepdim=True)


def minifloat(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """scale * dtype(x / scale): half an ulp of the 8-bit float, half its smallest subnormal near 0, and what is clamped."""
    info = torch.finfo(dtype)
    clamped = (x.abs() - scale * info.max).clamp(min=0)
    # tiny is the smallest normal; the numbers below it are tiny * eps apart.
    return scale * torch.maximum(x.abs() / scale * (info.eps / 2), torch.tensor(info.tiny * info.eps / 2)) + clamped + 4 * F32 * x.abs()


def gaussian_levels(y: torch.Tensor, boundary: float, inner: float, outer: float) -> torch.Tensor:
    """Four levels +-inner, +-outer times rms(y), cells cut at 0 and +-boundary: how far a cell's points are from its level."""
    rms = y.square().mean(-1, keepdim=True).sqrt()
    z = y.abs() / rms.clamp(min=1e-300)
    within = torch.where(z < boundary, max(inner, boundary - inner), torch.maximum(z - outer, torch.tensor(outer - boundary)))
    # A point at the boundary may fall on either side of it, at the same distance.
    return rms * within * (1 + 16 * F32) + 16 * F32 * y.abs().amax(-1, keepdim=True)
