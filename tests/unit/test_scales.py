"""One scale for a whole tensor: found over any number of rows, smoothed or not, and refused where it is none."""

import math

import pytest
import torch

from kvq_core import ArgumentError, get_backend
from kvq_core.scales import LARGEST_CODE, TensorRange, checked_scale
from kvq_core.smoothing.calibration import KeySmoothing

pytestmark = pytest.mark.quick
ROWS = torch.randn(50, 2, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 1, 64) + 3


def found(rows: torch.Tensor, smoothing: KeySmoothing | None = None) -> float:
    seen = TensorRange()
    for part in (rows[:20], rows[20:20], rows[20:21], rows[21:]):
        seen.add(part)
    scale = seen.scale(smoothing)
    assert scale.shape == (1,) and scale.dtype == torch.float32
    return float(scale)


@pytest.mark.parametrize("rows", [ROWS, -ROWS, ROWS.bfloat16()])
def test_the_largest_value_becomes_the_largest_code(rows: torch.Tensor) -> None:
    assert found(rows) * LARGEST_CODE == pytest.approx(float(rows.abs().max()), rel=1e-6)


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
def test_of_smoothed_rows_it_is_theirs(balanced: bool, sign: int) -> None:
    rows = sign * ROWS
    smoothing = KeySmoothing.estimate(rows, torch.randn(9, 4, 64) * torch.logspace(1, -1, 64) if balanced else None)
    stored = (rows - smoothing.mean) / (1 if smoothing.balance is None else smoothing.balance)
    assert found(rows, smoothing) * LARGEST_CODE == pytest.approx(float(stored.abs().max()), rel=1e-5)
    assert abs(found(rows, smoothing) / found(rows) - 1) > 0.02, "otherwise this tells nothing"


def test_zeros_have_a_scale_that_divides() -> None:
    assert checked_scale("k_scale", 0, found(torch.zeros(30, 2, 64))) > 0


@pytest.mark.parametrize("scale", [0, -1.0, math.nan, math.inf, 1e-60, torch.tensor([0.0]), torch.ones(2), "1", None])
def test_what_is_no_scale_is_refused(scale: object) -> None:
    with pytest.raises(ArgumentError, match=r"^v_scale: got .* for layer 3"):
        checked_scale("v_scale", 3, scale)


@pytest.mark.parametrize("rows", [torch.zeros(3, 64), torch.zeros(3, 2, 64, dtype=torch.int64)])
def test_what_are_no_rows_is_refused(rows: torch.Tensor) -> None:
    with pytest.raises(ArgumentError, match=r"^rows: got shape"):
        TensorRange().add(rows)


def test_no_rows_have_no_scale() -> None:
    with pytest.raises(ArgumentError, match=r"^rows: got none so far"):
        TensorRange().scale()


def test_a_smoothing_of_other_heads_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"^smoothing: got one for 2 heads of 32, need one for 2 heads of 64"):
        found(ROWS, KeySmoothing(torch.zeros(2, 32)))


def test_only_modes_without_scales_of_their_own_take_them() -> None:
    takers = [mode for mode in ("none", "int8", "fp8", "fp8_per_tensor", "int4", "int2") if get_backend(mode).takes_scales]
    assert takers == ["fp8_per_tensor"]
