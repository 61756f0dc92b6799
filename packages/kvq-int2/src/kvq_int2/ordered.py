"""int2's keys with an order of channels (kvq_core.smoothing.order): four bits for a quarter of them, two for half, none for a quarter.

A row has four parts of d / 4 places, each rotated by itself. The first three, the *coarse* ones, have codes as in codec.py, of one scale
for the row::

    n  = root mean square of the coarse places       the first part's over FIRST, as large as others
    s  = GAIN n / b                                   b: the size of the rotation's blocks
    c  = the cell of y / n                            in the coarse places

The last part has the first one's channels again, times FINER, so that y there is FINER times the first part's, bit for bit. Its codes are
of what the first ones leave::

    r  = y - FINER c s b                              c: the cell of y / FINER n, which is the first part's
    c' = the cell of r / (s b)

The scale is the row's size times a constant, not what fits the codes taken: a first part that is larger than usual has its codes clipped,
and a scale that makes up for it would spoil the others. Two codes reach 1.89 s b.

Rows of up to 256 channels come back no further from themselves than zero is, by trial (tests/unit/test_order.py): the worst becomes one
large number of the first part in 256 places, where .997 of its square is left.
"""

from __future__ import annotations

import torch

from kvq_core.hadamard import LARGEST_SCALE, block_hadamard, block_of, headroom, rounded_scale
from kvq_core.smoothing.order import FINER, FIRST, PARTS
from kvq_int2.codec import BOUNDARY, levels, pack, unpack

GAIN = 1.02
"""Of the scale over a row's size. At 1.06 the levels of a Gaussian row are as long as it is. From 1 to 1.06 SmolLM2 loses the same; at .94
and 1.12 a fifth to a third more (docs/dev/experiments/2026-11.md)."""


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., d] in places, of any float dtype -> bytes [..., d / 4] uint8 and scales [...] float32."""
    x = x.float()
    room = headroom(x)
    y = rotated(x * room)
    part = y.shape[-1] // PARTS
    # Taking the largest magnitude out first keeps the squares of huge rows finite and those of tiny rows above zero.
    peak = y.abs().amax(-1, keepdim=True)
    unit = torch.where(peak > 0, peak, 1.0)
    y = y / unit
    weights = y.new_tensor([1 / FIRST**2, 1.0, 1.0]).repeat_interleave(part)
    size = ((y[..., : 3 * part].square() * weights).sum(-1, keepdim=True) / (3 * part)).sqrt()
    block = block_of(part)
    scale = rounded_scale((GAIN * size * unit / (block * room)).clamp(max=LARGEST_SCALE))
    outer = y.abs() >= BOUNDARY * torch.where(size > 0, size, 1.0)
    step = scale * (block * room) / unit
    fine = y[..., 3 * part :]
    coarse = levels(outer[..., :part]) * step * FINER
    left = fine - torch.where(fine < 0, -coarse, coarse)
    outer[..., 3 * part :] = left.abs() >= BOUNDARY * step
    return pack(torch.cat((y[..., : 3 * part], left), -1) < 0, outer), scale.squeeze(-1)


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Bytes [..., d / 4] uint8 and scales [...] -> rows [..., d] float32, in places."""
    negative, outer = unpack(codes)
    level = levels(outer)
    return rotated(torch.where(negative, -level, level) * scales[..., None])


def rotated(x: torch.Tensor) -> torch.Tensor:
    """H applied to the blocks of each part of rows [..., d]."""
    return block_hadamard(x.unflatten(-1, (PARTS, -1))).flatten(-2)
