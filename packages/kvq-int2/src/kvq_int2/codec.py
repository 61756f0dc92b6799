"""int2: rotate, then the four Lloyd-Max levels of a Gaussian, cells by the row's norm, and a scale that fits the levels taken.

::

    y    = H x                                        (plain Hadamard transform, kvq_core.hadamard; blocks of b = d & -d)
    z    = y * sqrt(d) / ||y||                        ~ N(0, 1)
    code = the cell of z between -0.9816, 0, 0.9816   centroids c = -1.5104, -0.4528, 0.4528, 1.5104 (codes 0..3)
    s    = ||y|| / (||c|| b)                          keys: x' is as long as x
    s    = ||y||^2 / (<y, c> b)                       values: x' has no bias, <x, x'> = <x, x>
    x'   = H (c * s)                                  no further factor; s = 0 for a zero row

    16-bit word w of a head (little-endian), channels 8w .. 8w + 7:

        bit       15    14   ...   8    7    6   ...   0
        channel  8w+0  8w+1  ... 8w+7  8w+0 8w+1 ... 8w+7
                 |-- negative? -----|  |-- outer level? -|

Sign and magnitude lie in two planes of eight, because one shift then brings a channel's two bits to where a half-precision number
wants them: ``(word << i) & 0x8080 | 0x0037`` is the fp16 subnormal +-55 or +-183, whose ratio 3.327 stands in for 3.336
(read.py; it moves a value by 0.09 %, the mode itself by 35 %). Levels and boundaries: Lloyd (1982), Max (1960), four levels, unit Gaussian.

The least squared error would have a smaller scale, and shrink every row by a ninth. Scores then are too flat, and a mean over many values
too short, which more keys do not average out; the noise is what they average out.
"""

from __future__ import annotations

import math

import torch

from kvq_core.hadamard import block_hadamard, block_of

BOUNDARY = 0.9816
INNER, OUTER = 0.4528, 1.5104
# The attention kernel's levels are 55 and 183 times this; the factor keeps their mean square, over a Gaussian, that of the centroids.
READ_LEVEL = 0.0082503


def encode(x: torch.Tensor, *, unbiased: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., d] of any float dtype -> bytes [..., d / 4] uint8 and scales [...] float32; ``unbiased``: the values' scale."""
    y = block_hadamard(x.float())
    size = y.shape[-1]
    # Taking the largest magnitude out first keeps the squares of huge rows finite and those of tiny rows above zero.
    peak = y.abs().amax(-1, keepdim=True)
    unit = y / torch.where(peak > 0, peak, 1.0)
    squares = unit.square().sum(-1, keepdim=True)
    outer = unit.abs() * math.sqrt(size) >= BOUNDARY * torch.where(squares > 0, squares, 1.0).sqrt()
    return pack(y < 0, outer), (peak * fitted(unit, outer, unbiased) / block_of(size)).squeeze(-1)


def fitted(y: torch.Tensor, outer: torch.Tensor, unbiased: bool) -> torch.Tensor:
    """The factor [..., 1] with which the levels taken for rotated rows [..., d] are as long as y, or have no bias; 0 for a zero row."""
    level = torch.where(outer, OUTER, INNER)
    squares = y.square().sum(-1, keepdim=True)
    if not unbiased:
        return (squares / level.square().sum(-1, keepdim=True)).sqrt()
    shadow = (y.abs() * level).sum(-1, keepdim=True)
    return squares / torch.where(shadow == 0, 1.0, shadow)


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Bytes [..., d / 4] uint8 and scales [...] -> rows [..., d] float32."""
    negative, outer = unpack(codes)
    level = torch.where(outer, OUTER, INNER)
    y = torch.where(negative, -level, level)
    return block_hadamard(y * scales[..., None])


def pack(negative: torch.Tensor, outer: torch.Tensor) -> torch.Tensor:
    """Two planes [..., d] bool -> bytes [..., d / 4]: the magnitude byte, then the sign byte, of each eight channels."""
    weights = 2 ** torch.arange(7, -1, -1, device=negative.device)

    def plane(bits: torch.Tensor) -> torch.Tensor:
        return (bits.unflatten(-1, (-1, 8)) * weights).sum(-1).to(torch.uint8)

    return torch.stack((plane(outer), plane(negative)), -1).flatten(-2)


def unpack(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes [..., d / 4] -> (negative, outer), each [..., d] bool."""
    shifts = torch.arange(7, -1, -1, device=packed.device)
    bits = (packed[..., None] >> shifts & 1).bool()
    return bits[..., 1::2, :].flatten(-2), bits[..., 0::2, :].flatten(-2)
