"""The unquantized mode: pages hold the model's own fp16, bf16 or fp32 values. The baseline, and what skipped layers use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvq_core.backend import QuantKVBackend

if TYPE_CHECKING:
    from kvq_core.kernels.formats import Kernels


class NoneBackend(QuantKVBackend):
    """``none``: K and V as they come. 2 bytes per value for a 16-bit model."""

    mode = "none"
    needs_scale_caches = False
    reads_scales = False

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def encode(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        return x, None

    def decode(self, codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        return codes.float()

    def kernels(self) -> Kernels:
        from kvq_core.kernels import plain

        return plain.KERNELS
