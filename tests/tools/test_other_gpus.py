"""What is expected to limit decode on other GPUs: the page shows it, and its figures are those of the datasheets and golden counts."""

import pytest

import generated
import other_gpus
from kvq_core.plan.lookup import SWITCH
from kvq_core.testing.golden_counts import GoldenCounts

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


def test_the_tile_is_the_one_of_the_call() -> None:
    """On sm_90 a call with much to read has other tiles than the matrix's case of decode."""
    chosen = other_gpus.loop("int2_per_token_head", "sm_90", 132)
    assert chosen == other_gpus.golden().kernels["int2_per_token_head sm_90 decode-keys128-warps1-stages5-loops2 attend"]
    chosen = other_gpus.loop("int2_per_token_head", "sm_80", 108)
    assert chosen == other_gpus.golden().kernels["int2_per_token_head sm_80 decode attend"]


@pytest.mark.parametrize(
    ("row", "cell"),
    [
        # A key's 72 bytes take 0.5 ns, 40 instructions 1 ns.
        ({"instructions": 504, "keys": 32, "warps": 1}, "0.79 memory"),
        ({"instructions": 260, "keys": 64, "warps": 4}, "0.81 instructions"),
        ({"instructions": 480, "keys": 1, "warps": 1}, ""),
        (None, ""),
    ],
)
def test_a_cell_is_the_ratio_of_two_times(row: dict[str, int] | None, cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = {} if row is None else {"int2_per_token_head sm_80 decode attend": row}
    monkeypatch.setattr(other_gpus, "golden", lambda: GoldenCounts("", kernels))
    monkeypatch.setattr(other_gpus, "loop", other_gpus.loop.__wrapped__)
    gpu = other_gpus.GPU("sm_80", 10, 1e9, 144e9)
    assert other_gpus.expected("int2_per_token_head", gpu) == cell
    assert other_gpus.bytes_us("int2_per_token_head", gpu) == pytest.approx(64 * 8192 * 8 * 0.5e-3)
