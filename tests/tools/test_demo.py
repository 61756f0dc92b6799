"""The demo, in its quick form on a small random model: the table, the files beside it, and the exit status.

On CPU these take the torch path even under TRITON_INTERPRET=1: kernels have suites of their own.
"""

import contextlib
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import demo
from kvq_core import get_backend, list_backends, register_backend, unregister_backend
from kvq_core.none import NoneBackend

ROOT = Path(__file__).parents[2]

MODES = sorted({entry.mode for entry in list_backends()})


@pytest.fixture(scope="module")
def whole(small_weights: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The demo over every installed mode: its folder, and what it printed."""
    out = tmp_path_factory.mktemp("demo-out") / "nested"
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.delenv("TRITON_INTERPRET", raising=False)
        assert demo.main(["--quick", "--device", "cpu", "--out", str(out), "--model", str(small_weights)]) == 0
    return out, printed.getvalue()


def line_of(text: str, mode: str) -> list[str]:
    return next(line for line in text.splitlines() if line.startswith(f"{mode} ")).split()


def test_the_table_has_a_line_for_every_installed_mode(whole: tuple[Path, str]) -> None:
    _, text = whole
    for mode in MODES:
        assert len(line_of(text, mode)) >= 10
    assert "torch" in text and "kvq-core" in text and f"-- {MODES[0]}" in text
    table = text[text.index("mode  ") : text.index("\n\n", text.index("mode  "))].splitlines()
    assert len({len(line) for line in table[2:]}) == 1, "columns must be aligned"


@pytest.mark.quick
def test_the_numbers_are_what_the_formats_promise(whole: tuple[Path, str]) -> None:
    results = {r["mode"]: r for r in json.loads((whole[0] / "demo.json").read_text())["results"]}
    assert set(results) == set(MODES)
    none = results["none"]
    assert none["difference"] == none["attention_error"] == 0 and none["top1_agreement"] == 1
    assert none["key_snr_db"] is None and none["bits_per_element"] == 16
    for mode, bits in (("int8_per_token_head", 8.5), ("fp8_per_tensor", 8.0), ("int4_per_token_head", 4.5), ("int2_per_token_head", 2.5)):
        if mode in results:
            assert results[mode]["bits_per_element"] == pytest.approx(bits, abs=0.05)
            assert results[mode]["times_smaller"] == pytest.approx(16 / bits, rel=0.01)
    finest_first = [results[m]["key_snr_db"] for m in ("int8_per_token_head", "int4_per_token_head", "int2_per_token_head") if m in results]
    assert finest_first == sorted(finest_first, reverse=True)
    for mode, decibels in (
        ("int8_per_token_head", 40),
        ("fp8_per_token_head", 28),
        ("int4_per_token_head", 17),
        ("int2_per_token_head", 8),
    ):
        if mode in results:
            assert results[mode]["key_snr_db"] > decibels and results[mode]["value_snr_db"] > decibels
            assert 0 < results[mode]["attention_error"] < 10 ** (-decibels / 20) * 1.5
    assert all(math.isfinite(r["bits_per_byte"]) and r["decode_tokens_per_second"] > 0 for r in results.values())


def test_json_and_plot_lie_beside_it(whole: tuple[Path, str]) -> None:
    out, _ = whole
    assert sorted(p.name for p in out.iterdir()) == ["demo.json", "demo.png"]
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG") and (out / "demo.png").stat().st_size > 10_000
    content = json.loads((out / "demo.json").read_text())
    assert {"device", "torch", "triton", "commit"} <= set(content["machine"]) and content["sizes"]["documents"] >= 2


@pytest.fixture
def ruined() -> Iterator[str]:
    class Ruined(NoneBackend):
        mode = "ruined_test"

        def decode(self, codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
            return super().decode(codes, scales) * float("nan")

    register_backend(Ruined)
    yield Ruined.mode
    unregister_backend(Ruined.mode)


def test_a_mode_that_returns_nan_fails_the_demo(
    ruined: str, small_weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    arguments = ["--quick", "--device", "cpu", "--modes", ruined, "--out", str(tmp_path), "--model", str(small_weights)]
    assert demo.main(arguments) == 1
    printed = capsys.readouterr()
    assert f"broken: {ruined}: " in printed.err and "bits_per_byte is nan" in printed.err
    assert line_of(printed.out, "none") and line_of(printed.out, ruined)


def test_a_mode_that_raises_costs_the_others_nothing(
    ruined: str, small_weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(type(get_backend(ruined)), "encode", lambda self, x, scale=None: 1 / 0)
    arguments = ["--quick", "--device", "cpu", "--modes", ruined, "--out", str(tmp_path), "--model", str(small_weights)]
    assert demo.main(arguments) == 1
    printed = capsys.readouterr()
    assert f"broken: {ruined}: ZeroDivisionError" in printed.err
    assert line_of(printed.out, "none") and (tmp_path / "demo.json").exists()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modes", "int5"], "no installed package provides mode 'int5'"),
        (["--device", "abacus"], "--device: got 'abacus'"),
        (["--model", "/no/such/weights"], "/no/such/weights"),
        (["--out", "/dev/null/below"], "/dev/null"),
    ],
)
def test_bad_arguments_end_with_status_2_and_one_line(
    arguments: list[str], message: str, small_weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--quick", "--device", "cpu", "--out", str(tmp_path), "--model", str(small_weights), *arguments]
    with pytest.raises(SystemExit) as stop:
        demo.main(given)
    assert stop.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "error:" in last and message in last


@pytest.mark.gpu
def test_the_demo_runs_its_kernels_on_a_gpu(small_weights: Path, tmp_path: Path) -> None:
    assert demo.main(["--quick", "--device", "cuda", "--out", str(tmp_path), "--model", str(small_weights)]) == 0
    results = {r["mode"]: r for r in json.loads((tmp_path / "demo.json").read_text())["results"]}
    assert set(results) == set(MODES)
    assert all(abs(r["difference"]) < 1 for r in results.values())
