"""int8 and fp8: one byte a value, scaled per (token, head) or, for ``fp8_per_tensor``, by two scalars the caller gives.

::

    s    = max(absmax(x) / QMAX, 1e-6)                QMAX = 127 (int8) or 448 (float8_e4m3fn); stored as 2^107 at most
    code = clamp(round(x / s), -128, 127)             int8, half away from zero
    code = e4m3(clamp(x / s, -448, 448))              fp8, to nearest, ties to even
    x'   = code * s

Byte i of a head is the code of channel i: int8 in two's complement, fp8 as sign, 4 exponent bits (bias 7), 3 mantissa bits.
vLLM's ``int8_per_token_head`` and ``fp8_per_token_head`` have the same bytes.
"""

from __future__ import annotations

import torch

from kvq_core.hadamard import LARGEST_SCALE

MIN_SCALE = 1e-6
E4M3_MAX = 448.0
INT8_MAX = 127.0


def quantize_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., d] -> codes [..., d] int8 and scales [...] float32."""
    x = x.float()
    scale = _scale(x, INT8_MAX)
    scaled = x / scale
    rounded = torch.trunc(scaled + torch.copysign(torch.full_like(scaled, 0.5), scaled))
    return torch.clamp(rounded, -128, 127).nan_to_num(0).to(torch.int8), _stored(scale)


def quantize_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., d] -> codes [..., d] float8_e4m3fn and scales [...] float32."""
    x = x.float()
    scale = _scale(x, E4M3_MAX)
    return to_e4m3(x / scale), _stored(scale)


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Clamp into e4m3's range and cast."""
    return torch.clamp(x, -E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Codes [..., d] (int8 or e4m3) and scales [...] -> rows [..., d] float32."""
    return codes.float() * scales[..., None]


def _scale(x: torch.Tensor, largest: float) -> torch.Tensor:
    return torch.clamp(x.abs().amax(-1, keepdim=True) / largest, min=MIN_SCALE)


def _stored(scale: torch.Tensor) -> torch.Tensor:
    """[..., 1] -> [...], not above ``LARGEST_SCALE``; NaN where there is no scale."""
    return (scale.clamp(max=LARGEST_SCALE) + 0 * scale).squeeze(-1)
