"""The demo, in its quick form on a small random model: the table, the files beside it, and the exit status."""

import contextlib
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import demo
from command_line import row
from kvq_core import list_backends, register_backend, unregister_backend
from kvq_core.none import NoneBackend

MODES = sorted({entry.mode for entry in list_backends()})


@pytest.fixture(scope="module")
def whole(small_weights: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The demo over every installed mode: its folder, and what it printed."""
    out, printed = tmp_path_factory.mktemp("demo-out") / "nested", io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert demo.main(["--quick", "--device", "cpu", "--out", str(out), "--model", str(small_weights)]) == 0
    return out, printed.getvalue()


def test_the_table_has_a_line_for_every_installed_mode_and_files_lie_beside_it(whole: tuple[Path, str]) -> None:
    out, text = whole
    assert all(len(row(text, mode)) >= 10 for mode in MODES) and "torch" in text and f"-- {MODES[0]}" in text
    table = text[text.index("mode  ") : text.index("\n\n", text.index("mode  "))].splitlines()
    assert len({len(line) for line in table[2:]}) == 1, "columns must be aligned"
    assert sorted(p.name for p in out.iterdir()) == ["demo.json", "demo.png"] and (out / "demo.png").stat().st_size > 10_000
    content = json.loads((out / "demo.json").read_text())
    assert {"device", "torch", "triton", "commit"} <= set(content["machine"]) and content["sizes"]["documents"] >= 2
    results = {r["mode"]: r for r in content["results"]}
    none, int4, int2 = (results[mode] for mode in ("none", "int4_per_token_head", "int2_per_token_head"))
    assert none["difference"] == none["attention_error"] == 0 and none["top1_agreement"] == 1 and none["key_snr_db"] is None
    assert set(results) == set(MODES) and [one["bits_per_element"] for one in (none, int4, int2)] == [16, 4.5, 2.5]
    assert int4["value_snr_db"] > 17 > int2["key_snr_db"] > 8 and 0 < int4["attention_error"] < int2["attention_error"] < 0.6
    assert all(math.isfinite(r["bits_per_byte"]) and r["decode_tokens_per_second"] > 0 for r in results.values())


@pytest.mark.parametrize("raises", [False, True])
def test_a_mode_that_fails_costs_the_others_nothing(raises: bool, small_weights: Path, tmp_path: Path, capsys: Any) -> None:
    class Ruined(NoneBackend):
        mode = "ruined_test"

        def encode(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> Any:
            return super().encode(x, scale) if not raises else 1 / 0

        def decode(self, codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
            return super().decode(codes, scales) * float("nan")

    register_backend(Ruined)
    try:
        given = ["--quick", "--device", "cpu", "--modes", Ruined.mode, "--out", str(tmp_path), "--model", str(small_weights)]
        assert demo.main(given) == 1
    finally:
        unregister_backend(Ruined.mode)
    printed = capsys.readouterr()
    assert f"broken: {Ruined.mode}: " in printed.err and ("ZeroDivisionError" if raises else "bits_per_byte is nan") in printed.err
    assert row(printed.out, "none") and (raises or row(printed.out, Ruined.mode)) and (tmp_path / "demo.json").exists()


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
    with pytest.raises(SystemExit) as stop:
        demo.main(["--quick", "--device", "cpu", "--out", str(tmp_path), "--model", str(small_weights), *arguments])
    last = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2 and "error:" in last and message in last


@pytest.mark.gpu
def test_the_demo_runs_its_kernels_on_a_gpu(small_weights: Path, tmp_path: Path) -> None:
    assert demo.main(["--quick", "--device", "cuda", "--out", str(tmp_path), "--model", str(small_weights)]) == 0
    results = {r["mode"]: r for r in json.loads((tmp_path / "demo.json").read_text())["results"]}
    assert set(results) == set(MODES)
    assert all(abs(r["difference"]) < 1 for r in results.values())
