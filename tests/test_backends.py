"""The conformance suite, for each of the six modes, with each mode's own error bounds."""

import torch

from kvq_core.hadamard import block_hadamard, single_rht
from kvq_core.testing import BackendTests, budgets


class TestNone(BackendTests):
    mode = "none"

    def round_trip_bound(self, x: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
        return torch.zeros_like(x, dtype=torch.float64)

    def operand_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype


class QuantizedTests(BackendTests):
    """The kernels of all quantized modes multiply in float16, whatever the model's dtype: codes are exact there."""

    def operand_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float16


class TestInt8PerTokenHead(QuantizedTests):
    mode = "int8_per_token_head"

    def round_trip_bound(self, x: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
        return budgets.symmetric_levels(x.double(), 127, 1e-6)


class TestFP8PerTokenHead(QuantizedTests):
    mode = "fp8_per_token_head"

    def round_trip_bound(self, x: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
        scale = (x.double().abs().amax(-1, keepdim=True) / 448).clamp(min=1e-6)
        return budgets.minifloat(x.double(), scale, torch.float8_e4m3fn)


class TestFP8PerTensor(QuantizedTests):
    mode = "fp8_per_tensor"

    def round_trip_bound(self, x: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
        assert given is not None
        return budgets.minifloat(x.double(), given.double(), torch.float8_e4m3fn)


class TestInt4PerTokenHead(QuantizedTests):
    mode = "int4_per_token_head"
    # Four bits of the scale word hold the zero point: two scales one float32 step apart may differ by sixteen.
    scale_tolerance = 2.0**-18

    def space(self, x: torch.Tensor) -> torch.Tensor:
        return single_rht(x.double())

    def round_trip_bound(self, x: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
        return budgets.affine_levels(self.space(x), 16, 1e-6, lost_bits=4)


class TestInt2PerTokenHead(QuantizedTests):
    mode = "int2_per_token_head"

    def space(self, x: torch.Tensor) -> torch.Tensor:
        return block_hadamard(x.double())

    def round_trip_bound(self, x: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
        return budgets.gaussian_levels(self.space(x), (0.9816,), (0.4528, 1.5104))
