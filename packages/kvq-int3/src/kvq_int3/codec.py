"""int3: rotate, then eight equal steps around 0, cells by the row's norm, and a scale that fits the levels taken.

::

    y     = H D x                                     (randomized Hadamard transform, kvq_core.hadamard; blocks of b = d & -d)
    z     = y * sqrt(d) / ||y||                       ~ N(0, 1)
    code  = clamp(floor(z / 0.586 + 4), 0, 7)
    level = code - 3.5
    s     = ||y|| / (||level|| b)                     keys: x' is as long as x
    s     = ||y||^2 / (<y, level> b)                  values: x' has no bias, <x, x'> = <x, x>
            at most 1.9 <y, level> / (||level||^2 b)  where levels fit the row badly; rounded to SCALE_BITS bits (kvq_core.hadamard)
    x'    = D H (level * s)                           no further factor; s = 0 for a zero row

    d / 8 16-bit words (little-endian), channels 8w .. 8w + 7, and then d / 8 bytes, byte w for word w:

        word w    bit 15    14 .. 12   11 .. 9   8 .. 6   5 .. 3   2 .. 0        byte w   7 .. 6        5 .. 3   2 .. 0
                  8w+7 (2)  8w+4       8w+3      8w+2     8w+1     8w+0                   8w+7 (1..0)   8w+6     8w+5

    order of the bytes: 0, d / 16, 1, d / 16 + 1, 2, ...

A masked field is a float16 subnormal, whatever its place in the low ten bits (format.py): hence the order of bits. Two bytes are a word
that the tensor cores' threads get as they get the row's first d / 16 words: hence the order of bytes.

Equal steps make the unpacking cheap. The step is Max's for a Gaussian (1960, "Quantizing for minimum distortion", table II), where they
lose 3.74 % of the energy; the best eight levels lose 3.45 %, and no mask makes them. Measured on Gaussian rows of 128 channels: the scale
of least squares loses 3.64 %, the keys' 3.68 %, the values' 3.78 %. The least squared error shortens each row by a twenty-eighth, which a
mean over many values does not average out. Where a mean over values is as large as what varies, attention over 4,096 keys is off by 3.6 %
with these scales, and by 4.9 % with those of least squares; without a mean they do equally well. The tiny model of kvq eval has a KL of
.069 nats with these, .071 where keys have no bias either, .072 with those of least squares, and .087 with the step as the scale.

The bound is int2's, for its reasons: up to twice the scale of least squares no finite row comes back further from itself than zero is.
"""

from __future__ import annotations

import torch

from kvq_core import single_rht
from kvq_core.hadamard import LARGEST_SCALE, block_of, headroom, rounded_scale

BITS = 3
STEP = 0.586
"""In root mean squares."""
ZERO = 3.5
"""The code, which there is not, of 0."""
LARGEST_FACTOR = 1.9
"""Of the stored scale over that of least squares. From 2 on a row may come back worse than zero is."""
WORD, BYTE = (0, 1, 2, 3, 4), (5, 6, 7)
"""Channels of eight whose fields lie in the word and in the byte, from the lowest bits on; the last one's highest bit is the word's."""


def quantize(x: torch.Tensor, *, unbiased: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., d] of any float dtype, d a multiple of 16 -> bytes [..., 3 d / 8] uint8 and scales [...] float32; ``unbiased``: the
    values' scale."""
    x = x.float()
    room = headroom(x)
    y = single_rht(x * room)
    # Taking the largest magnitude out first keeps the squares of huge rows finite and those of tiny rows above zero.
    peak = y.abs().amax(-1, keepdim=True)
    unit = y / torch.where(peak > 0, peak, 1.0)
    step = STEP * unit.square().mean(-1, keepdim=True).sqrt()
    codes = torch.clamp(torch.floor(unit / torch.where(step > 0, step, 1.0) + 4), 0, 7).nan_to_num(0).to(torch.uint8)
    scale = peak * fitted(unit, codes, unbiased) / block_of(x.shape[-1]) / room
    return pack(codes), rounded_scale(scale.clamp(max=LARGEST_SCALE).squeeze(-1))


def fitted(y: torch.Tensor, codes: torch.Tensor, unbiased: bool) -> torch.Tensor:
    """The factor [..., 1] with which the levels taken for rotated rows [..., d] are as long as y, or have no bias, if it is not too large;
    0 for a zero row, and not above 0 where levels point away from y: they can for a row that the hardware flushed to zero."""
    level = codes.to(y.dtype) - ZERO
    squares, level_squares = y.square().sum(-1, keepdim=True), level.square().sum(-1, keepdim=True)
    shadow = (y * level).sum(-1, keepdim=True)
    wanted = squares / torch.where(shadow > 0, shadow, 1.0) if unbiased else (squares / level_squares).sqrt()
    return torch.minimum(wanted, LARGEST_FACTOR * shadow / level_squares)


def dequantize(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Bytes [..., 3 d / 8] uint8 and scales [...] -> rows [..., d] float32."""
    return single_rht((unpack(packed).float() - ZERO) * scales[..., None], inverse=True)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes [..., d] uint8 in 0..7 -> bytes [..., 3 d / 8] uint8."""
    fields = codes.int().unflatten(-1, (-1, 8))
    word = sum(fields[..., channel] << (3 * n) for n, channel in enumerate(WORD)) | (fields[..., 7] >> 2) << 15
    side = sum(fields[..., channel] << (3 * n) for n, channel in enumerate(BYTE)) & 0xFF
    words = torch.stack((word & 0xFF, word >> 8), -1).flatten(-2)
    side = side.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return torch.cat((words, side), -1).to(torch.uint8)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Bytes [..., 3 d / 8] uint8 -> codes [..., d] uint8."""
    words, side = packed.int().split([packed.shape[-1] // 3 * 2, packed.shape[-1] // 3], -1)
    word = words[..., 0::2] | words[..., 1::2] << 8
    side = side.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) | (word >> 15) << 8
    fields = [word >> (3 * n) for n in range(len(WORD))] + [side >> (3 * n) for n in range(len(BYTE))]
    return (torch.stack(fields, -1) & 7).flatten(-2).to(torch.uint8)
