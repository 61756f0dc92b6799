"""The conformance suite on ``int3_per_token_head``, the bytes as they are drawn, and the table of levels."""

import itertools

import pytest
import torch

from kvq_core import QuantKVBackend, single_rht
from kvq_core.hadamard import LARGEST_SCALE, SCALE_BITS, block_of
from kvq_core.testing import BackendTests, TwoScaleTests, budgets
from kvq_int3 import codec


class TestInt3PerTokenHead(TwoScaleTests, BackendTests):
    mode, largest_factor, scale_bits = "int3_per_token_head", codec.LARGEST_FACTOR, SCALE_BITS

    def operand_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float16

    def space(self, x: torch.Tensor) -> torch.Tensor:
        return single_rht(x.double())

    def round_trip_bound(self, x: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
        y = self.space(x)
        steps = [codec.STEP * (n + 0.5) for n in range(4)]
        bound = budgets.as_long(y, budgets.gaussian_levels(y, [(a + b) / 2 for a, b in itertools.pairwise(steps)], steps))
        bound = budgets.with_rounded_scale(y, bound)
        return budgets.not_worse_than_zero(y, bound, rms(y) / (0.5 * codec.STEP * block_of(x.shape[-1])))

    def levels(self, backend: QuantKVBackend, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """At the norm's scale, by which the cells are cut."""
        return (codec.unpack(codes).double() - codec.ZERO) * (codec.STEP * rms(self.space(x)))

    def fitted(self, half: str, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        scale = codec.fitted(self.space(x), codec.unpack(codes), half == "value") / block_of(x.shape[-1])
        return budgets.stored_scale(scale.clamp(max=LARGEST_SCALE).squeeze(-1), scales, self.scale_tolerance)


def rms(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean(-1, keepdim=True).sqrt()


@pytest.mark.quick
def test_bytes_are_as_drawn() -> None:
    codes = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 5], [7, 0, 0, 0, 0, 0, 0, 2]], dtype=torch.uint8)
    codes = torch.cat((codes, codes.flip(0)))
    words = [0b1_101_100_011_010_001, 0b0_000_000_000_000_111, 0b0_000_000_000_000_111, 0b1_101_100_011_010_001]
    sides = [0b01_111_110, 0b10_000_000, 0b10_000_000, 0b01_111_110]
    packed = codec.pack(codes.flatten())
    assert packed.tolist() == [*(byte for word in words for byte in (word & 0xFF, word >> 8)), *(sides[w] for w in (0, 2, 1, 3))]
    assert torch.equal(codec.unpack(packed), codes.flatten())


def test_a_gaussian_row_loses_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal steps: a share of 0.03744, less what the row's own scale regains, more where it is unbiased."""
    x = torch.randn(4096, 128, generator=torch.Generator().manual_seed(1))

    def lost(unbiased: bool = False) -> float:
        return float((codec.dequantize(*codec.quantize(x, unbiased=unbiased)) - x).square().mean() / x.square().mean())

    assert (lost(), lost(unbiased=True)) == (pytest.approx(0.0368, rel=0.01), pytest.approx(0.0378, rel=0.01))
    best, step = lost(), codec.STEP
    for factor in (0.95, 1.05):
        monkeypatch.setattr(codec, "STEP", step * factor)
        assert best < lost()
