"""The three one-byte modes: ``int8_per_token_head``, ``fp8_per_token_head`` and ``fp8_per_tensor``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvq_core.backend import QuantKVBackend
from kvq_int8fp8 import codec

if TYPE_CHECKING:
    from kvq_core.kernels.api import Kernels


class _OneByte(QuantKVBackend):
    """What the three modes share: a byte a value, in one of two dtypes."""

    dtype: torch.dtype
    head_size_multiple = 2

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype

    def decode(self, codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        return codec.dequantize(codes.view(self.dtype), self.required(scales))


class Int8PerTokenHead(_OneByte):
    """Signed bytes, one float32 scale per (token, head) of K and of V: 1.94 times smaller than bf16."""

    mode = "int8_per_token_head"
    dtype = torch.int8

    def encode(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        return codec.quantize_int8(x)

    def kernels(self) -> Kernels:
        from kvq_int8fp8 import kernels

        return kernels.INT8


class FP8PerTokenHead(_OneByte):
    """float8_e4m3fn codes, one float32 scale per (token, head) of K and of V: 1.94 times smaller than bf16."""

    mode = "fp8_per_token_head"
    dtype = torch.float8_e4m3fn

    def encode(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        return codec.quantize_fp8(x)

    def kernels(self) -> Kernels:
        from kvq_int8fp8 import kernels

        return kernels.FP8


class FP8PerTensor(_OneByte):
    """float8_e4m3fn codes of ``x / scale``, with one float32 scale for all keys and one for all values, given by the caller."""

    mode = "fp8_per_tensor"
    dtype = torch.float8_e4m3fn
    needs_scale_caches = False

    def encode(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        return codec.to_e4m3(x.float() / self.required(scale).reshape(())), None

    def decode(self, codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        return codes.view(self.dtype).float() * self.required(scales).reshape(())

    def kernels(self) -> Kernels:
        from kvq_int8fp8 import kernels

        return kernels.FP8_PER_TENSOR
