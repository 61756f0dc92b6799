"""int3: rotate, then eight equal steps around 0, as wide as suits a Gaussian of the row's root mean square.

::

    y    = H D x                                      (randomized Hadamard transform, kvq_core.hadamard; blocks of b = d & -d)
    t    = 0.586 rms(y)                               the step
    code = clamp(floor(y / t + 4), 0, 7)
    s    = t / b                                      x' = D H ((code - 3.5) s), no further factor; 0 for a zero row

    d / 8 16-bit words (little-endian), channels 8w .. 8w + 7, and then d / 8 bytes:

        word w    bit 15    14 .. 12   11 .. 9   8 .. 6   5 .. 3   2 .. 0        byte w   7 .. 6        5 .. 3   2 .. 0
                  8w+7 (2)  8w+4       8w+3      8w+2     8w+1     8w+0                   8w+7 (1..0)   8w+6     8w+5

A masked field is a float16 subnormal, whatever its place in the low ten bits (format.py): hence the order. Of a unit Gaussian these levels
lose 3.74 %; the eight of Lloyd and Max, which no mask makes, lose 3.45 %. (Step: Max (1960), "Quantizing for minimum distortion", table
II.)
"""

from __future__ import annotations

import torch

from kvq_core import single_rht
from kvq_core.hadamard import LARGEST_SCALE, block_of, headroom

BITS = 3
STEP = 0.586
"""In root mean squares."""
ZERO = 3.5
"""The code, which there is not, of 0."""
WORD, BYTE = (0, 1, 2, 3, 4), (5, 6, 7)
"""Channels of eight whose fields lie in the word and in the byte, from the lowest bits on; the last one's highest bit is the word's."""


def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., d] of any float dtype, d a multiple of 16 -> bytes [..., 3 d / 8] uint8 and scales [...] float32."""
    x = x.float()
    room = headroom(x)
    y = single_rht(x * room)
    # Taking the largest magnitude out first keeps the squares of huge rows finite and those of tiny rows above zero.
    peak = y.abs().amax(-1, keepdim=True)
    unit = y / torch.where(peak > 0, peak, 1.0)
    step = STEP * unit.square().mean(-1, keepdim=True).sqrt()
    codes = torch.clamp(torch.floor(unit / torch.where(step > 0, step, 1.0) + 4), 0, 7).nan_to_num(0).to(torch.uint8)
    scale = (peak * step / block_of(x.shape[-1]) / room).clamp(max=LARGEST_SCALE).squeeze(-1)
    return pack(codes), scale


def decode(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Bytes [..., 3 d / 8] uint8 and scales [...] -> rows [..., d] float32."""
    return single_rht((unpack(packed).float() - ZERO) * scales[..., None], inverse=True)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes [..., d] uint8 in 0..7 -> bytes [..., 3 d / 8] uint8."""
    fields = codes.int().unflatten(-1, (-1, 8))
    word = sum(fields[..., channel] << (3 * n) for n, channel in enumerate(WORD)) | (fields[..., 7] >> 2) << 15
    side = sum(fields[..., channel] << (3 * n) for n, channel in enumerate(BYTE)) & 0xFF
    words = torch.stack((word & 0xFF, word >> 8), -1).flatten(-2)
    return torch.cat((words, side), -1).to(torch.uint8)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Bytes [..., 3 d / 8] uint8 -> codes [..., d] uint8."""
    words, side = packed.int().split([packed.shape[-1] // 3 * 2, packed.shape[-1] // 3], -1)
    word = words[..., 0::2] | words[..., 1::2] << 8
    side = side | (word >> 15) << 8
    fields = [word >> (3 * n) for n in range(len(WORD))] + [side >> (3 * n) for n in range(len(BYTE))]
    return (torch.stack(fields, -1) & 7).flatten(-2).to(torch.uint8)
