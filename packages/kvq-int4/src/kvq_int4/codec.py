"""int4: rotate, then 16 levels over 95 % of each row's range, and a scale without bias. vLLM's ``int4_per_token_head`` has the same bytes.

::

    y    = H D x                                      (randomized Hadamard transform, kvq_core.hadamard)
    r    = max(max y, 0) - min(min y, 0)              the row's range, 0 in it
    t    = max(0.95 r / 15, 1e-6)                     the step that codes are chosen in: the range's ends are clipped
    zp   = clamp(round(-(min(min y, 0) + 0.025 r) / t), 0, 15)
    code = clamp(round(y / t + zp), 0, 15)
    s    = <y, y> / <y, code - zp>                    t where <y, y> is below 4e-10 or above 2^100; at most 2^107
    s'   = s, rounded to SCALE_BITS bits              stored (kvq_core.hadamard)
    y'   = (code - zp) * s',                          x' = D H y' / b

    byte i of a head:     7 6 5 4   3 2 1 0           scale word:   31 .. 4            3 2 1 0
                         code[2i+1] code[2i]                        s' (float32 bits)  zp

The zero point rides in the scale's low four mantissa bits, so that a (token, head) costs ``head_size / 2 + 4`` bytes.
Rounding is half away from zero.

A range that ends short of the extremes makes all steps finer; few values pay for it. The stored scale is not the step but the one that
leaves a row's product with itself as it is, <y, y'> = <y, y>: what attention sums over many keys and values then has no bias. Both are
the writer's business: whoever reads vLLM's format reads these bytes.

No finite row whose scale is a normal number comes back further from itself than zero is. With the step as its scale no value's error is
above the value, nor above half a step but for the clipped ends. The fitted scale leaves ||y||^2 (1 / f^2 - 1), f the cosine of y and code -
zp, at most ||y||^2 while f^2 >= 1/2, and 1 - f^2 is at most the sum of the squared errors over that of the squares. In steps, the range is
15.79 long and an end is clipped by 0.79, or by 0.9 where the zero point is rounded away from it. Worst is a zero point of 0 (or 15), one
value at the far end and all others at l < 0.9 on the near one, where their code is the zero point: f^2 >= 1/2 while (d - 1) l^2 <= (15.79 -
l)^2, up to d = 256, where f^2 is above 0.51, so that a scale may be 2^-7 of itself larger. Where ``MIN_SCALE`` is the step, a range of h
steps leaves l < 0.5 + 0.025 h, and rows below ``SMALLEST_LENGTH`` may break that. A scale held at 2^107 is one between 0 and that of least
squares.
"""

from __future__ import annotations

import torch

from kvq_core.hadamard import LARGEST_SCALE, block_of, headroom, rounded_scale, single_rht

MIN_SCALE = 1e-6
LEVELS = 16
SMALLEST_LENGTH = 4e-10
"""Shorter rows, squared, may lie between the levels next to 0 as a whole, or most of them, since the step does not go below ``MIN_SCALE``.
256 values lose more than half of their squares to a step of 1e-6 only below 3.9e-10."""
LARGEST_LENGTH = 2.0**100
"""Longer rows, squared, may be more than float32 holds. No row of fp16 is."""
CLIP = 0.025
"""The share of a row's range that is clipped at either end."""


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., d] of any float dtype -> codes [..., d / 2] uint8 and scale words [...] float32."""
    x = x.float()
    room = headroom(x)
    y = single_rht(x * room)
    return quantize_on_grid(y, *grid(y), room)


def quantize_on_grid(
    y: torch.Tensor, step: torch.Tensor, zero: torch.Tensor, room: torch.Tensor | float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated rows [..., d] on the grid of ``step`` and ``zero`` [..., 1] -> codes and scale words as :func:`quantize` returns them.

    ``room``: what the rows were multiplied by."""
    # Below 0.5 everything clamps to 0, so that flooring x + 0.5 is rounding half away from zero here.
    codes = torch.clamp(torch.floor(y / step + zero + 0.5), 0, LEVELS - 1)
    scale = (fitted(y, codes, step, zero) / room).clamp(max=LARGEST_SCALE)
    return pack(codes.nan_to_num(0).to(torch.uint8)), join_scale(rounded_scale(scale.squeeze(-1)), zero.squeeze(-1))


def grid(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The step that codes of rotated rows [..., d] are chosen in, and the zero point, both [..., 1]."""
    low, high = y.amin(-1, keepdim=True).clamp(max=0), y.amax(-1, keepdim=True).clamp(min=0)
    step = torch.clamp((high - low) * ((1 - 2 * CLIP) / (LEVELS - 1)), min=MIN_SCALE)
    zero = torch.clamp(torch.floor((low + CLIP * (high - low)) / -step + 0.5), 0, LEVELS - 1)
    return step, zero


def fitted(y: torch.Tensor, codes: torch.Tensor, step: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """The scale [..., 1] of rotated rows for which <y, y'> = <y, y>; the step where float32 cannot tell."""
    length, shadow = y.square().sum(-1, keepdim=True), (y * (codes - zero)).sum(-1, keepdim=True)
    # A range without an end leaves NaN.
    return torch.where((length < SMALLEST_LENGTH) | (length > LARGEST_LENGTH), step + 0 * step, length / shadow)


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
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
