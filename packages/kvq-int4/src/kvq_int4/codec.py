"""int4: rotate, then 16 levels between each row's minimum and maximum. Byte-compatible with vLLM's ``int4_per_token_head``.

::

    y    = H D x                                      (randomized Hadamard transform, kvq_core.hadamard)
    s    = max((max y - min y) / 15, 1e-6)
    zp   = clamp(round(-min y / s), 0, 15)
    code = clamp(round(y / s + zp), 0, 15)            y' = (code - zp) * s',   x' = D H y' / b

    byte i of a head:     7 6 5 4   3 2 1 0           scale word:   31 .. 4            3 2 1 0
                         code[2i+1] code[2i]                        s' (float32 bits)  zp

The zero point rides in the scale's low four mantissa bits, so that a (token, head) costs ``head_size / 2 + 4`` bytes.
Rounding is half away from zero.
"""

from __future__ import annotations

import torch

from kvq_core.hadamard import block_of, single_rht

MIN_SCALE = 1e-6
LEVELS = 16


def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., d] of any float dtype -> codes [..., d / 2] uint8 and scale words [...] float32."""
    y = single_rht(x.float())
    low, high = y.amin(-1, keepdim=True), y.amax(-1, keepdim=True)
    scale = torch.clamp((high - low) / (LEVELS - 1), min=MIN_SCALE)
    zero = torch.clamp(torch.floor(-low / scale + 0.5), 0, LEVELS - 1)
    # Below 0.5 everything clamps to 0, so that flooring x + 0.5 is rounding half away from zero here.
    codes = torch.clamp(torch.floor(y / scale + zero + 0.5), 0, LEVELS - 1).nan_to_num(0).to(torch.uint8)
    return pack(codes), join_scale(scale.squeeze(-1), zero.squeeze(-1))


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Codes [..., d / 2] uint8 and scale words [...] -> rows [..., d] float32."""
    scale, zero = split_scale(scales)
    y = (unpack(codes).float() - zero[..., None]) * scale[..., None]
    return single_rht(y, inverse=True) / block_of(y.shape[-1])


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes [..., d] uint8 below 16 -> bytes [..., d / 2], even channels in the low nibble."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Bytes [..., d / 2] -> codes [..., d] uint8."""
    return torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)


def join_scale(scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Put the zero point (0..15) in the scale's low four mantissa bits."""
    return (scale.view(torch.int32) & ~0xF | zero.nan_to_num(0).to(torch.int32)).view(torch.float32)


def split_scale(word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale words -> (scale, zero point), both float32."""
    bits = word.contiguous().view(torch.int32)
    return (bits & ~0xF).view(torch.float32), (bits & 0xF).float()
