"""Generated parts of the pages show the committed figures, and what is no whole run changes nothing."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

import accuracy_agreement as agreement
import accuracy_compare as compare
import accuracy_page
import accuracy_report
import generated
import other_gpus
import performance_tables as tables
import plots
import rows
from kvq_core.plan.lookup import SWITCH

pytestmark = pytest.mark.quick


def content(file: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads(file.read_text(encoding="utf-8"))
    return found


def test_speed() -> None:
    """Otherwise: ``hatch run tables``."""
    runs = tables.Run(content(tables.DATA)), tables.Run(content(tables.H200))
    assert [run.peer for run in runs] == [rows.FLASHATTENTION, rows.FLASHINFER]
    assert not any(run.machine["commit"].endswith("dirty") for run in runs)
    for path, parts in tables.pages(*runs).items():
        for marks, expected in parts.items():
            assert generated.part(path.read_text(encoding="utf-8"), marks) == expected, marks[0]


def test_other_gpus_follow_from_golden_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise: ``hatch run tables``. Clocks give the datasheets' TFLOP/s of float32, two operations a clock and lane."""
    monkeypatch.setenv(SWITCH, "")
    assert generated.part(other_gpus.PAGE.read_text(encoding="utf-8"), other_gpus.MARKS) == other_gpus.part()
    rates = {name: 2 * (64 if gpu.target == "sm_80" else 128) * gpu.sms * gpu.clock / 1e12 for name, gpu in other_gpus.GPUS.items()}
    expected = {"A100 80GB SXM": 19.5, "A10": 31.2, "RTX 3090": 35.6, "L4": 30.3, "L40S": 91.6, "RTX 4090": 82.6}
    assert rates == pytest.approx(expected | {"H100 SXM": 67, "H200": 67, "B200": 75, "RTX 5090": 104.8}, abs=0.15)


def test_accuracy() -> None:
    """Otherwise: ``hatch run accuracy --from-data``, ``hatch run compare --from-data``."""
    found, others = content(accuracy_report.DATA), content(compare.DATA)
    assert found["sizes"] == json.loads(json.dumps(asdict(accuracy_report.Sizes()))), "measured with the sizes that the script has now"
    gpu = content(accuracy_report.GPU_DATA) if accuracy_report.GPU_DATA.exists() else None
    assert gpu is None or agreement.agree(agreement.agreements(found, gpu))
    text = accuracy_page.PAGE.read_text(encoding="utf-8")
    for marks, expected in (accuracy_page.parts(found, gpu) | {compare.MARKS: compare.table(others)}).items():
        assert generated.part(text, marks) == expected
    for name in ("position", "layers", "needles"):
        for theme in plots.THEMES:
            kept = plots.kept_in(f"accuracy-{name}", theme)
            assert kept == (accuracy_page.SCRIPT, accuracy_page.figure_key(found)), f"{name}, {theme}"


def test_what_is_no_whole_run_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = json.loads(tables.DATA.read_text(encoding="utf-8"))
    failed = run["rows"][3] | {"us": None, "error": "OutOfMemoryError", "hbm": None, "x_none": None, "x_peer": None}
    cut_off, an_error = (json.dumps(run | {"rows": rows}) for rows in (run["rows"][:-1], [*run["rows"][:3], failed, *run["rows"][4:]]))
    file, paths = tmp_path / "benchmarks.json", (tables.DATA, tables.PAGE, tables.FIGURES)
    before = [path.read_bytes() for path in paths]
    for text, said in (("[", str(file)), (cut_off, "int2_per_token_head in setting w8192-8"), (an_error, "in setting A:")):
        file.write_text(text)
        with pytest.raises(SystemExit, match="2"):
            tables.main([str(file)])
        assert said in capsys.readouterr().err and [path.read_bytes() for path in paths] == before
