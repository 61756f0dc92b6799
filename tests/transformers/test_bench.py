"""The benchmark of kvq-transformers runs and says what it measured; on the CPU, without compiling, in a tiny model."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import bench_transformers
from kvq_core.testing import places
from kvq_transformers.naming import GENERATE

ROOT = Path(__file__).parents[2]

OPTIONS = ["--shape", "tiny", "--device", "cpu", "--contexts", "40", "70", "--tokens", "12", "--no-compile"]


@pytest.fixture(autouse=True)
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    places.enter("eager", monkeypatch)


def told(out: Path) -> dict[tuple[int, str], dict[str, Any]]:
    return {(row["context"], row["cache"]): row for row in json.loads(out.read_text())["results"]}


@pytest.mark.parametrize("prefill", [False, True])
def test_a_small_run(prefill: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results" / "transformers.json"
    caches = ["dynamic", "static", "none", "int5", "int4", "int4-growing"]
    options = [*OPTIONS, *(["--prefill", "--chunk", "32"] if prefill else [])]
    assert bench_transformers.main([*options, "--caches", *caches, "--out", str(out)]) == 1
    about = json.loads(out.read_text())["about"]
    assert about["device"] == "CPU" and about["contexts"] == [40, 70]
    rows = told(out)
    assert set(rows) == {(context, cache) for context in (40, 70) for cache in caches}
    for (_, cache), row in rows.items():
        assert (row["ms_per_token"] is None) == (cache == "int5") == row["error"].startswith("UnknownModeError")
        assert (row["prefill_s"] is not None) == (prefill and cache != "int5")
        assert row["decode_peak_gib"] is None and row["decode"] == ("" if cache == "int5" else "eager")
    assert rows[70, "none"]["cache_gib"] > 3 * rows[70, "int4"]["cache_gib"] > 0
    printed = capsys.readouterr().out
    assert "ms/token" in printed and "UnknownModeError" in printed


@pytest.mark.parametrize("name", ["dynamic", "static", "none", "none-growing"])
def test_filled_caches_are_as_a_model_fills_them(name: str) -> None:
    """The same lengths, rows and room; and layers do not share what they were given."""
    bench = bench_transformers.Bench(bench_transformers.arguments([*OPTIONS, "--no-compile"]))
    row = bench_transformers.Result(name, 40, 2)
    ours = name.startswith("none")
    bench.model.set_attn_implementation("sdpa")
    filled, read = (bench_transformers.build_cache(name, bench.model.config, 40 + bench.spare) for _ in range(2))
    with torch.no_grad():
        bench._fill(filled, row)
        bench.model(torch.randint(3, 99, (2, 40)), **{GENERATE: read})
    assert int(filled.get_seq_length()) == int(read.get_seq_length()) == 40
    stored = []
    for one, other in zip(filled.layers, read.layers, strict=True):
        if ours:
            one, other = one.pages.caches.key_cache, other.pages.caches.key_cache
            assert one.shape == other.shape and torch.equal(one.flatten(1).any(1), other.flatten(1).any(1)), "rows in the same blocks"
        else:
            one, other = one.keys, other.keys
            assert one.shape == other.shape
        stored.append(one.data_ptr())
    assert len(set(stored)) == len(stored)


def test_time_that_is_over_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a row as between rows; what is there stays, and a later run goes on from it."""
    out = tmp_path / "transformers.json"
    real = bench_transformers.build_cache

    def slow(name: str, *rest: Any) -> Any:
        if name == "int8":
            signal.raise_signal(signal.SIGALRM)  # as the clock does
        return real(name, *rest)

    monkeypatch.setattr(bench_transformers, "build_cache", slow)
    options = [*OPTIONS, "--caches", "none", "int8", "int4", "--out", str(out)]
    assert bench_transformers.main([*options, "--seconds", "1000"]) == 0
    rows, first = told(out), out.read_text()
    assert len(rows) == 6
    for (_, cache), row in rows.items():
        assert (row["ms_per_token"] is None) == (cache != "none") == (row["skipped"] == "the run's 1000 s were over")
    assert bench_transformers.main([*options, "--seconds", "0.001"]) == 0
    assert {row["skipped"] for row in told(out).values()} == {"the run's 0.001 s were over"}
    out.write_text(first)
    monkeypatch.setattr(bench_transformers, "build_cache", real)
    assert bench_transformers.main([*options, "--resume"]) == 0
    again = told(out)
    assert all(row["ms_per_token"] for row in again.values()) and len(again) == 6
    assert again[40, "none"] == rows[40, "none"], "not measured again"
    assert bench_transformers.main([*OPTIONS, "--tokens", "20", "--caches", "none", "--out", str(out), "--resume"]) == 0
    assert told(out)[40, "none"] != rows[40, "none"], "other settings"


def test_a_device_that_is_lost_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_transformers.Bench, "lost", lambda self: True)
    out = tmp_path / "transformers.json"
    assert bench_transformers.main([*OPTIONS, "--caches", "int5", "none", "--out", str(out)]) == 1
    rows = told(out)
    assert rows[40, "int5"]["error"] and not rows[40, "int5"]["skipped"]
    assert all("--resume" in row["skipped"] for place, row in rows.items() if place != (40, "int5"))


def test_quantos_codes_are_unpacked() -> None:
    codes = torch.randint(0, 16, (6, 5), dtype=torch.uint8)
    assert torch.equal(bench_transformers.unpack(codes[:3] | codes[3:] << 4, 4), codes)


def test_a_missing_package_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_transformers, "find_spec", lambda name: None)
    assert bench_transformers.missing("hqq") == "hqq is not installed"
    assert bench_transformers.missing("int4") == ""
