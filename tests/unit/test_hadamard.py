"""Hadamard transforms against the matrix they are defined by, whose fixed signs are in the golden bytes (test_golden.py)."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from kvq_core.errors import ArgumentError
from kvq_core.hadamard import block_hadamard, fast_hadamard_transform, hadamard_matrix, rht_signs, single_rht

pytestmark = pytest.mark.quick


def sylvester(size: int) -> torch.Tensor:
    return torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(size)] for i in range(size)], dtype=torch.float64)


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 2, 256])
def test_fast_transform(size: int, dtype: torch.dtype, device: torch.device) -> None:
    x = rows(3, 2, size).to(device, dtype)
    exact = x.double() @ sylvester(size).to(device)
    y = fast_hadamard_transform(x)
    assert y.dtype == dtype and y.shape == x.shape and torch.equal(hadamard_matrix(size).double(), sylvester(size))
    # Sums of log2(d) steps in float32 at least, rounded once to the dtype.
    steps = math.log2(size) * torch.finfo(torch.float32 if dtype.itemsize < 4 else dtype).eps
    bound = x.double().abs().sum(-1, keepdim=True) * steps + exact.abs() * torch.finfo(dtype).eps / 2 * 1.01
    assert bool(((y.double() - exact).abs() <= bound).all())


def test_a_tracer_s_matrix_serves_nobody_else() -> None:
    x = torch.ones(2, 8)
    for _ in range(2):
        with FakeTensorMode():
            fast_hadamard_transform(torch.ones(2, 8, dtype=torch.float16, device="cuda" if torch.cuda.is_available() else "cpu"))
            assert isinstance(hadamard_matrix(8), FakeTensor)
        assert torch.equal(x @ hadamard_matrix(8), fast_hadamard_transform(x))
    with torch.inference_mode():
        hadamard_matrix(4)
    assert not hadamard_matrix(4).is_inference()


def test_only_powers_of_two() -> None:
    for size in (0, 80):
        with pytest.raises(ArgumentError, match="power of two" if size else r"x: got shape \(2, 0\)"):
            fast_hadamard_transform(torch.zeros(2, size))
        with pytest.raises(ArgumentError, match="power of two"):
            hadamard_matrix(size)


@pytest.mark.parametrize("size", [16, 80, 96, 256])
def test_block_transforms(size: int, device: torch.device) -> None:
    x, block = rows(7, size).to(device), size & -size
    matrix, signs = torch.block_diag(*[sylvester(block)] * (size // block)).to(device), rht_signs(size, device=device).double()
    found = [block_hadamard(x), single_rht(x), single_rht(single_rht(x), inverse=True) / block]
    torch.testing.assert_close(found, [x @ matrix, (x * signs) @ matrix, x], rtol=0, atol=1e-11)
