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
        return budgets.gaussian_levels(self.space(x), codec.BOUNDARIES, codec.LEVELS)


def test_bytes_are_as_drawn() -> None:
    codes = torch.tensor([[1, 2, 4, 7, 0, 6, 5, 3], [0, 0, 0, 0, 0, 0, 0, 7]])
    # Channels 7 .. 0, as bits 7 .. 0 of each plane.
    drawn = [[0b11001001, 0b10101010, 0b01101100], [0b10000000, 0b10000000, 0b10000000]]
    packed = codec.pack(codes.flatten())
    assert packed.tolist() == list(itertools.chain(*drawn))
    assert torch.equal(codec.unpack(packed), codes.flatten())


def test_every_byte_is_a_code() -> None:
    packed = torch.randint(0, 256, (50, 24), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    assert torch.equal(codec.pack(codec.unpack(packed)), packed)


def test_levels_and_boundaries_are_lloyds() -> None:
    """A level is the mean of its cell under a unit Gaussian, a boundary the middle of two levels."""
    edges = (0.0, *codec.BOUNDARIES, math.inf)
    for level, (low, high) in zip(codec.LEVELS, itertools.pairwise(edges), strict=True):
        mass = math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))
        mean = math.sqrt(2 / math.pi) * (math.exp(-low * low / 2) - math.exp(-high * high / 2)) / mass
        assert level == pytest.approx(mean, abs=1.5e-5)
    for boundary, pair in zip(codec.BOUNDARIES, itertools.pairwise(codec.LEVELS), strict=True):
        assert boundary == pytest.approx(sum(pair) / 2, abs=1.5e-5)


def test_a_gaussian_row_loses_what_max_says() -> None:
    x = torch.randn(4096, 128, generator=torch.Generator().manual_seed(1))
    lost = float((codec.decode(*codec.encode(x)) - x).square().mean() / x.square().mean())
    assert lost == pytest.approx(0.03454, rel=0.03)
