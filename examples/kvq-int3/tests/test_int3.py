"""The conformance suite on ``int3_per_token_head``, the bytes as they are drawn, and the table of levels."""

import itertools
import math

import pytest
import torch

from kvq_core import single_rht
from kvq_core.testing import BackendTests, budgets
from kvq_int3 import codec


class TestInt3PerTokenHead(BackendTests):
    mode = "int3_per_token_head"

    def space(self, x: torch.Tensor) -> torch.Tensor:
        return single_rht(x.double())

    def round_trip_bound(self, x: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
        steps = [codec.STEP * (n + 0.5) for n in range(4)]
        return budgets.gaussian_levels(self.space(x), [(a + b) / 2 for a, b in itertools.pairwise(steps)], steps)


def test_bytes_are_as_drawn() -> None:
    codes = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 5], [7, 0, 0, 0, 0, 0, 0, 2]], dtype=torch.uint8)
    words = [0b1_101_100_011_010_001, 0b0_000_000_000_000_111]
    packed = codec.pack(codes.flatten())
    assert packed.tolist() == [*(byte for word in words for byte in (word & 0xFF, word >> 8)), 0b01_111_110, 0b10_000_000]
    assert torch.equal(codec.unpack(packed), codes.flatten())


def test_every_byte_is_a_code() -> None:
    packed = torch.randint(0, 256, (50, 24), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    assert torch.equal(codec.pack(codec.unpack(packed)), packed)


def lost(step: float) -> float:
    """What equal steps lose of a unit Gaussian: of each cell E z^2 - 2 l E z + l^2."""
    levels = [step * (n + 0.5) for n in range(4)]
    edges = [0.0, *((a + b) / 2 for a, b in itertools.pairwise(levels)), math.inf]
    total = 0.0
    for level, (low, high) in zip(levels, itertools.pairwise(edges), strict=True):
        density = [math.sqrt(2 / math.pi) * math.exp(-x * x / 2) for x in (low, high)]
        mass = math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))
        ends = low * density[0] - (high * density[1] if math.isfinite(high) else 0.0)
        total += mass + ends - 2 * level * (density[0] - density[1]) + level * level * mass
    return total


def test_the_step_loses_least() -> None:
    assert lost(codec.STEP) == pytest.approx(0.03744, abs=1e-5)
    assert lost(codec.STEP) < min(lost(codec.STEP * factor) for factor in (0.99, 1.01))


def test_a_gaussian_row_loses_as_much() -> None:
    x = torch.randn(4096, 128, generator=torch.Generator().manual_seed(1))
    found = float((codec.decode(*codec.encode(x)) - x).square().mean() / x.square().mean())
    assert found == pytest.approx(lost(codec.STEP), rel=0.03)
