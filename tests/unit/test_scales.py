"""One scale for a whole tensor: found over any number of rows, smoothed or not, and refused where it is none.

Scales that a cache is given are refused in test_cache.py.
"""

import pytest
import torch

from cache_checks import MODES
from kvq_core import ArgumentError, get_backend
from kvq_core.scales import LARGEST_CODE, TensorRange, checked_scale
from kvq_core.smoothing.calibration import KeySmoothing

pytestmark = pytest.mark.quick
ROWS = torch.randn(50, 2, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 1, 64) + 3


def found(rows: torch.Tensor, smoothing: KeySmoothing | None = None) -> float:
    seen = TensorRange()
    for part in (rows[:20], rows[20:20], rows[20:21], rows[21:]):
        seen.add(part)
    return float(seen.scale(smoothing))


@pytest.mark.parametrize("rows", [ROWS, -ROWS, ROWS.bfloat16()])
def test_the_largest_value_becomes_the_largest_code(rows: torch.Tensor) -> None:
    assert found(rows) * LARGEST_CODE == pytest.approx(float(rows.abs().max()), rel=1e-6)
    assert checked_scale("k_scale", 0, found(torch.zeros(30, 2, 64))) > 0


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
def test_of_smoothed_rows_it_is_theirs(balanced: bool, sign: int) -> None:
    rows = sign * ROWS
    smoothing = KeySmoothing.estimate(rows, torch.randn(9, 4, 64) * torch.logspace(1, -1, 64) if balanced else None)
    stored = (rows - smoothing.mean) / (1 if smoothing.balance is None else smoothing.balance)
    assert found(rows, smoothing) * LARGEST_CODE == pytest.approx(float(stored.abs().max()), rel=1e-5)
    assert abs(found(rows, smoothing) / found(rows) - 1) > 0.02, "otherwise this tells nothing"


def test_what_has_no_scale_is_refused() -> None:
    for rows in (torch.zeros(3, 64), torch.zeros(3, 2, 64).long()):
        with pytest.raises(ArgumentError, match=r"^rows: got shape"):
            TensorRange().add(rows)
    with pytest.raises(ArgumentError, match=r"^rows: got none so far"):
        TensorRange().scale()
    with pytest.raises(ArgumentError, match=r"^smoothing: got one for 2 heads of 32, need one for 2 heads of 64"):
        found(ROWS, KeySmoothing(torch.zeros(2, 32)))


def test_only_modes_without_scales_of_their_own_take_them() -> None:
    assert [mode for mode in MODES if get_backend(mode).takes_scales] == ["fp8_per_tensor"]
