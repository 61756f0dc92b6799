"""What is expected to limit decode on other GPUs: the page shows it, and its figures are those of the datasheets and golden counts."""

import pytest

import generated
import other_gpus
from kvq_core.plan.lookup import SWITCH

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def shipped_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "")


def test_the_page_shows_the_golden_counts() -> None:
    """Otherwise: ``hatch run tables``."""
    assert generated.part(other_gpus.PAGE.read_text(encoding="utf-8"), other_gpus.MARKS) == other_gpus.part()


def test_clocks_give_the_datasheets_rate_of_float32() -> None:
    """Two operations a clock in each of 64 lanes (sm_80) or 128 of a multiprocessor, in TFLOP/s."""
    rates = {name: 2 * (64 if gpu.target == "sm_80" else 128) * gpu.sms * gpu.clock / 1e12 for name, gpu in other_gpus.GPUS.items()}
    assert {name: round(rate, 1) for name, rate in rates.items()} == {
        "A100 80GB SXM": 19.5,
        "A10": 31.2,
        "RTX 3090": 35.6,
        "L4": 30.3,
        "L40S": 91.6,
        "RTX 4090": 82.6,
        "H100 SXM": 66.9,  # 67
        "H200": 66.9,
        "B200": 75.0,
        "RTX 5090": 104.8,
    }
