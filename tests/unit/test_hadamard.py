"""Hadamard transforms against the matrix they are defined by, and the fixed signs against the published bits."""

import math

import pytest
import torch

from kvq_core.errors import ArgumentError
from kvq_core.hadamard import (
    block_hadamard,
    block_of,
    butterfly,
    fast_hadamard_transform,
    hadamard_matrix,
    rht_signs,
    sign_bits,
    single_rht,
)

pytestmark = pytest.mark.quick
SIZES = (1, 2, 64, 256)
HEAD_SIZES = (16, 80, 96, 128, 256)
D64, D128, D256 = "0d597365b1358080", "6c3d44a638547f6b", "818ba44a41c4afab48980b32a04320fa"


def sylvester(size: int) -> torch.Tensor:
    return torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(size)] for i in range(size)], dtype=torch.float64)


def by_blocks(size: int) -> torch.Tensor:
    block = size & -size
    return torch.block_diag(*[sylvester(block)] * (size // block))


def rows(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES)
def test_fast_transform(size: int, dtype: torch.dtype, device: torch.device) -> None:
    x = rows(3, 2, size, dtype=dtype).to(device)
    assert torch.equal(hadamard_matrix(size).double(), sylvester(size))
    exact = x.double() @ sylvester(size).to(device)
    whole = x.mul(30).round().float()
    assert torch.equal(butterfly(whole).double(), whole.double() @ sylvester(size).to(device)), "exact on integers"
    y = fast_hadamard_transform(x)
    assert y.dtype == dtype and y.shape == x.shape
    # Sums of log2(d) steps in float32 at least, rounded once to the dtype.
    steps = math.log2(size) * torch.finfo(torch.float32 if dtype.itemsize < 4 else dtype).eps
    bound = x.double().abs().sum(-1, keepdim=True) * steps + exact.abs() * torch.finfo(dtype).eps / 2 * 1.01
    assert bool(((y.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("size", [0, 3, 80])
def test_only_powers_of_two(size: int) -> None:
    with pytest.raises(ArgumentError, match="power of two" if size else r"x: got shape \(2, 0\)"):
        fast_hadamard_transform(torch.zeros(2, size))
    with pytest.raises(ArgumentError, match="power of two"):
        hadamard_matrix(size)


@pytest.mark.parametrize("size", HEAD_SIZES)
def test_block_transforms(size: int, device: torch.device) -> None:
    x = rows(7, size).to(device)
    matrix = by_blocks(size).to(device)
    signs = rht_signs(size, device=device).double()
    assert block_of(size) == size & -size and torch.equal(signs, rht_signs(size & -size, device=device).repeat(size // (size & -size)))
    torch.testing.assert_close(block_hadamard(x), x @ matrix, rtol=0, atol=1e-11)
    torch.testing.assert_close(single_rht(x), (x * signs) @ matrix, rtol=0, atol=1e-11)
    torch.testing.assert_close(single_rht(x, inverse=True), (x @ matrix) * signs, rtol=0, atol=1e-11)
    torch.testing.assert_close(single_rht(single_rht(x), inverse=True) / block_of(size), x, rtol=0, atol=1e-11)
    scores = (single_rht(x) @ single_rht(x).T) / block_of(size)
    torch.testing.assert_close(scores, x @ x.T, rtol=0, atol=1e-10)


def test_signs_are_the_published_ones() -> None:
    def little_endian(bits: str) -> int:
        return int.from_bytes(bytes.fromhex(bits), "little")

    assert sign_bits() & (2**64 - 1) == little_endian(D64)
    assert sign_bits() & (2**128 - 1) == little_endian(D64 + D128)
    assert sign_bits() & (2**256 - 1) == little_endian(D64 + D128 + D256)
    assert sign_bits(0, 64) == little_endian(D64), "a longer vector begins with the shorter one"
    assert sign_bits(1) != sign_bits(0) and set(rht_signs(128).tolist()) == {-1.0, 1.0}
