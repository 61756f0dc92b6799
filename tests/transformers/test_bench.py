"""The benchmark of kvq-transformers runs and says what it measured; on the CPU, without compiling, in a tiny model."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import bench_transformers
from kvq_transformers.naming import GENERATE

OPTIONS = ["--shape", "tiny", "--device", "cpu", "--tokens", "3", "--no-compile"]
pytestmark = pytest.mark.usefixtures("torch_path")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token a generation; and no collection of garbage, which takes longer than all else."""
    monkeypatch.setattr(bench_transformers, "SHORT", 1)
    monkeypatch.setattr(bench_transformers, "release", lambda device: None)


def told(out: Path) -> dict[tuple[int, str], dict[str, Any]]:
    return {(row["context"], row["cache"]): row for row in json.loads(out.read_text())["results"]}


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--contexts", "40", "70", "--prefill", "--chunk", "32"]
    out, caches = tmp_path / "results" / "transformers.json", ["dynamic", "static", "none", "int5", "int4-growing"]
    assert bench_transformers.main([*OPTIONS, *more, "--caches", *caches, "--out", str(out)]) == 1
    rows = told(out)
    assert set(rows) == {(context, cache) for context in (40, 70) for cache in caches}
    for (_, cache), row in rows.items():
        broken = cache == "int5"
        assert (row["ms_per_token"] is None) == broken == row["error"].startswith("UnknownModeError")
        assert (row["prefill_s"] is None) == broken and row["decode"] == ("" if broken else "eager")
    assert rows[40, "none"]["cache_gib"] > 2 * rows[40, "int4-growing"]["cache_gib"] > 0
    printed = capsys.readouterr().out
    assert "ms/token" in printed and "UnknownModeError" in printed


@pytest.mark.parametrize("name", ["static", "none", "none-growing"])
def test_filled_caches_are_as_a_model_fills_them(name: str) -> None:
    """The same lengths, rows and room; and layers do not share what they were given."""
    bench = bench_transformers.Bench(bench_transformers.arguments([*OPTIONS, "--contexts", "40"]))
    bench.model.set_attn_implementation("sdpa")
    filled, read = (bench_transformers.build_cache(name, bench.model.config, 40 + bench.spare) for _ in range(2))
    with torch.no_grad():
        bench._fill(filled, bench_transformers.Result(name, 40, 2))
        bench.model(torch.randint(3, 99, (2, 40)), **{GENERATE: read})
    assert int(filled.get_seq_length()) == int(read.get_seq_length()) == 40
    stored = []
    for layers in zip(filled.layers, read.layers, strict=True):
        one, other = (layer.keys if name == "static" else layer.pages.caches.key_cache for layer in layers)
        assert one.shape == other.shape and torch.equal(one.flatten(1).any(1), other.flatten(1).any(1)), "rows in the same blocks"
        stored.append(one.data_ptr())
    assert len(set(stored)) == len(stored)


def test_time_that_is_over_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a row as between rows; what is there stays, and a later run goes on from it."""
    out, real = tmp_path / "transformers.json", bench_transformers.build_cache

    def slow(name: str, *rest: Any) -> Any:
        if name == "int8":
            signal.raise_signal(signal.SIGALRM)  # as the clock does
        return real(name, *rest)

    monkeypatch.setattr(bench_transformers, "build_cache", slow)
    options = [*OPTIONS, "--contexts", "40", "--caches", "none", "int8", "int4", "--out", str(out)]
    assert bench_transformers.main([*options, "--seconds", "1000"]) == 0
    rows, first = told(out), out.read_text()
    for (_, cache), row in rows.items():
        assert (row["ms_per_token"] is None) == (cache != "none") == (row["skipped"] == "the run's 1000 s were over")
    assert bench_transformers.main([*options, "--seconds", "0.001"]) == 0
    assert {row["skipped"] for row in told(out).values()} == {"the run's 0.001 s were over"}
    out.write_text(first)
    monkeypatch.setattr(bench_transformers, "build_cache", real)
    assert bench_transformers.main([*options, "--resume"]) == 0
    again = told(out)
    assert len(again) == 3 and all(row["ms_per_token"] for row in again.values())
    assert again[40, "none"] == rows[40, "none"], "not measured again"
