"""The conformance suite, for each of kvq's modes and two composed ones, with each mode's own error bounds."""

import pytest
import torch

from kvq_core.hadamard import SCALE_BITS
from kvq_core.testing import BackendTests, ComposedTests, TwoScaleTests, budgets
from kvq_int2 import codec as int2
from kvq_int4 import codec as int4
from mode_bounds import Int2Bounds, Int4Bounds


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
        bound = budgets.symmetric_levels(x.double(), 127, 1e-6)
        return budgets.not_worse_than_zero(x.double(), bound, x.double().abs().amax(-1, keepdim=True) / 127)


class TestFP8PerTokenHead(QuantizedTests):
    mode = "fp8_per_token_head"

    def round_trip_bound(self, x: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
        scale = (x.double().abs().amax(-1, keepdim=True) / 448).clamp(min=1e-6)
        return budgets.not_worse_than_zero(x.double(), budgets.minifloat(x.double(), scale, torch.float8_e4m3fn), scale)


class TestFP8PerTensor(QuantizedTests):
    mode = "fp8_per_tensor"

    def round_trip_bound(self, x: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
        assert given is not None
        return budgets.minifloat(x.double(), given.double(), torch.float8_e4m3fn)


class TestInt4PerTokenHead(Int4Bounds, QuantizedTests):
    mode = "int4_per_token_head"

    @pytest.mark.quick
    @pytest.mark.parametrize("size", [64, 80, 128, 256])
    def test_products_have_no_bias(self, size: int) -> None:
        """<x, x'> = <x, x>, for rows of every shape, but for the rounding of scales, which favours neither side."""
        x = torch.randn(64, size, generator=torch.Generator().manual_seed(size)) * torch.logspace(-3, 3, 64)[:, None]
        x[1::4] += x[1::4].abs().amax(-1, keepdim=True)
        x[2::4, 5] *= 100
        x[3] = torch.eye(size)[0]
        back = int4.dequantize(*int4.quantize(x)).double()
        kept = (back * x).sum(-1) / x.double().square().sum(-1)
        torch.testing.assert_close(kept, torch.ones_like(kept), rtol=2.0**-SCALE_BITS + 2.0**-18, atol=0)
        assert abs(float(kept.mean()) - 1) < 1.5e-3


class TestInt2PerTokenHead(Int2Bounds, TwoScaleTests, QuantizedTests):
    mode, largest_factor, scale_bits = "int2_per_token_head", int2.LARGEST_FACTOR, SCALE_BITS


class TestInt8Int4(ComposedTests):
    mode = "int8_per_token_head/int4_per_token_head"
    key_tests, value_tests = TestInt8PerTokenHead, TestInt4PerTokenHead


class TestInt4Int2(ComposedTests):
    mode = "int4_per_token_head/int2_per_token_head"
    key_tests, value_tests = TestInt4PerTokenHead, TestInt2PerTokenHead
