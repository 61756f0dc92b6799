"""The benchmark of kvq-transformers runs and says what it measured and what failed; on the CPU, without compiling, in a tiny model."""

import json
from pathlib import Path

import pytest

import bench_transformers

OPTIONS = ["--shape", "tiny", "--device", "cpu", "--tokens", "3", "--no-compile", "--contexts", "40"]
pytestmark = pytest.mark.usefixtures("torch_path")


def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that fails costs the others nothing, and the run its exit status; a resumed run measures only what is missing."""
    monkeypatch.setattr(bench_transformers, "SHORT", 1)
    monkeypatch.setattr(bench_transformers, "release", lambda device: None)  # collects garbage, which takes longer than all else
    out, runs = tmp_path / "results" / "transformers.json", []
    for caches, more in ((["none", "int5"], []), (["dynamic", "none", "int5", "int4-growing"], ["--resume"])):
        assert bench_transformers.main([*OPTIONS, "--prefill", "--chunk", "32", "--caches", *caches, "--out", str(out), *more]) == 1
        rows = {row["cache"]: row for row in json.loads(out.read_text())["results"]}
        assert set(rows) == set(caches)
        for cache, row in rows.items():
            broken = cache == "int5"
            assert (row["ms_per_token"] is None) == (row["prefill_s"] is None) == broken == row["error"].startswith("UnknownModeError")
        runs.append(rows)
    assert runs[0]["none"] == runs[1]["none"]
    assert rows["none"]["cache_gib"] > 2 * rows["int4-growing"]["cache_gib"] > 0
