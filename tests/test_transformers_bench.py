"""The benchmark of kvq-transformers runs and says what it measured; on the CPU, without compiling, in a tiny model."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_transformers  # noqa: E402
from kvq_core.testing import places  # noqa: E402


def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    places.enter("eager", monkeypatch)
    out = tmp_path / "results" / "transformers.json"
    caches = ["dynamic", "static", "none", "int4", "int4-growing", "int5"]
    options = ["--shape", "tiny", "--device", "cpu", "--contexts", "40", "70", "--tokens", "12", "--chunk", "32", "--no-compile"]
    assert bench_transformers.main([*options, "--caches", *caches, "--out", str(out)]) == 1
    told = json.loads(out.read_text())
    assert told["about"]["device"] == "CPU" and told["about"]["contexts"] == [40, 70]
    rows = {(row["context"], row["cache"]): row for row in told["results"]}
    assert set(rows) == {(context, cache) for context in (40, 70) for cache in caches}
    for (_, cache), row in rows.items():
        assert (row["ms_per_token"] is None) == (cache == "int5") == row["error"].startswith("UnknownModeError")
        assert row["peak_gib"] is None
    assert rows[70, "none"]["cache_gib"] > 3 * rows[70, "int4"]["cache_gib"] > 0
    printed = capsys.readouterr().out
    assert "ms/token" in printed and "UnknownModeError" in printed


def test_a_missing_package_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_transformers, "find_spec", lambda name: None)
    assert bench_transformers.missing("hqq") == "hqq is not installed"
    assert bench_transformers.missing("int4") == ""
