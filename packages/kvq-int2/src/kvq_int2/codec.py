"""int2: rotate, then the four Lloyd-Max levels of a Gaussian, cells by the row's norm, and a scale that fits the levels taken.

::

    y    = H x                                        (plain Hadamard transform, kvq_core.hadamard; blocks of b = d & -d)
    z    = y * sqrt(d) / ||y||                        ~ N(0, 1)
    code = the cell of z between -0.9816, 0, 0.9816   centroids c = -1.5104, -0.4528, 0.4528, 1.5104 (codes 0..3)
    s    = ||y|| / (||c|| b)                          keys: x' is as long as x
    s    = ||y||^2 / (<y, c> b)                       values: x' has no bias, <x, x'> = <x, x>
           at most 1.9 <y, c> / (||c||^2 b)           where levels fit the row badly; rounded to SCALE_BITS bits (kvq_core.hadamard)
    x'   = H (c * s)                                  no further factor; s = 0 for a zero row

    16-bit word w of a head (little-endian), channels 8w .. 8w + 7:

        bit       15    14   ...   8    7    6   ...   0
        channel  8w+0  8w+1  ... 8w+7  8w+0 8w+1 ... 8w+7
                 |-- negative? -----|  |-- outer level? -|

Sign and magnitude lie in two planes of eight, because one shift then brings a channel's two bits to where a half-precision number
wants them: ``(word << i) & 0x8080 | 0x0037`` is the fp16 subnormal +-55 or +-183, whose ratio 3.327 stands in for 3.336
(format.py; it moves a value by 0.09 %, the mode itself by 34 %, both rms). Levels and boundaries: Lloyd (1982), Max (1960), four
levels, unit Gaussian.

No finite row whose scale is a normal number comes back further from itself than zero is. For a fixed c the squared error of a scale t = s b
is

    ||y - t c||^2 = ||y||^2 - 2 t <y, c> + t^2 ||c||^2 = ||y||^2 - t ||c||^2 (2 t* - t),    t* = <y, c> / ||c||^2 > 0

which is at most ||y||^2 for every t from 0 to 2 t*. With f the cosine of y and c, the keys' scale is t* / f and the values' t* / f^2: they
leave that range where f < 1/2 and f^2 < 1/2, as for a row that turns into a single large number. The bound at 1.9 t* holds from there on
(ordinary rows have f near 0.94), and leaves 1 - 0.19 f^2 of ||y||^2 at most, so that rounding and format.py's levels do not matter.

The least squared error would have a smaller scale, and shrink every row by a ninth. Scores then are too flat, and a mean over many values
too short, which more keys do not average out; the noise is what they average out.
"""

from __future__ import annotations

import math

import torch

from kvq_core.hadamard import LARGEST_SCALE, block_hadamard, block_of, headroom, rounded_scale

BOUNDARY = 0.9816
INNER, OUTER = 0.4528, 1.5104
LARGEST_FACTOR = 1.9
"""Of the stored scale over that of least squares. From 2 on a row may come back worse than zero is."""
# The attention kernel's levels are 55 and 183 times this; the factor keeps their mean square, over a Gaussian, that of the centroids.
READ_LEVEL = 0.0082503


def quantize(x: torch.Tensor, *, unbiased: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., d] of any float dtype -> bytes [..., d / 4] uint8 and scales [...] float32; ``unbiased``: the values' scale."""
    x = x.float()
    room = headroom(x)
    y = block_hadamard(x * room)
    size = y.shape[-1]
    # Taking the largest magnitude out first keeps the squares of huge rows finite and those of tiny rows above zero.
    peak = y.abs().amax(-1, keepdim=True)
    unit = y / torch.where(peak > 0, peak, 1.0)
    squares = unit.square().sum(-1, keepdim=True)
    outer = unit.abs() * math.sqrt(size) >= BOUNDARY * torch.where(squares > 0, squares, 1.0).sqrt()
    scale = peak * fitted(unit, outer, unbiased) / block_of(size) / room
    return pack(y < 0, outer), rounded_scale(scale.clamp(max=LARGEST_SCALE).squeeze(-1))


def fitted(y: torch.Tensor, outer: torch.Tensor, unbiased: bool) -> torch.Tensor:
    """The factor [..., 1] with which the levels taken for rotated rows [..., d] are as long as y, or have no bias, if it is not too large;
    0 for a zero row."""
    level = levels(outer)
    squares, level_squares = y.square().sum(-1, keepdim=True), level.square().sum(-1, keepdim=True)
    shadow = (y.abs() * level).sum(-1, keepdim=True)
    wanted = squares / torch.where(shadow == 0, 1.0, shadow) if unbiased else (squares / level_squares).sqrt()
    return torch.minimum(wanted, LARGEST_FACTOR * shadow / level_squares)


def levels(outer: torch.Tensor) -> torch.Tensor:
    """The magnitudes of channels [...] bool, float32."""
    return torch.full(outer.shape, INNER, dtype=torch.float32, device=outer.device).masked_fill(outer, OUTER)


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Bytes [..., d / 4] uint8 and scales [...] -> rows [..., d] float32."""
    negative, outer = unpack(codes)
    level = levels(outer)
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
