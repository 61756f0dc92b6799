"""What is made of a profiler's words, without one."""

import csv
import io
import json
import re
from collections.abc import Sequence
from typing import Any

import pytest

import limits

pytestmark = pytest.mark.quick


def words(launches: dict[str, list[str]], kernels: list[tuple[str, dict[str, str]]], unknown: Sequence[str] = ()) -> str:
    """What Nsight Compute prints of ``kernels``, each with its figures, after what the watched process says."""
    metrics = [metric for metric in (*limits._METRICS.values(), *limits._WAITS.values()) if metric not in unknown]
    lines = io.StringIO()
    table = csv.DictWriter(lines, ["ID", "Kernel Name", *metrics], quoting=csv.QUOTE_ALL)
    table.writeheader()
    table.writerow({"ID": "", "Kernel Name": ""} | {metric: "%" for metric in metrics})
    for number, (name, figures) in enumerate(kernels):
        table.writerow({"ID": str(number), "Kernel Name": name} | dict.fromkeys(metrics, "0.5") | figures)
    return f"==PROF== Connected to process 1\n{limits.LAUNCHES}{json.dumps(launches)}\n==PROF== Disconnected\n{lines.getvalue()}"


READ_FIGURES = {"ns": "158,464", "memory": "83.5", "registers": "168"}
READ = ("attend", {limits._METRICS[name]: figure for name, figure in READ_FIGURES.items()} | {limits._WAITS["wait"]: "1.75"})
MERGE = ("combine_kernel", {limits._METRICS["ns"]: "6000", limits._METRICS["registers"]: "64"})
COPY = ("void at::native::copy()", {})


def test_kernels_are_found_and_told_longest_wait_first() -> None:
    said = words({"int4:A": ["attend", "combine_kernel"], "int2:A": ["attend"]}, [READ, COPY, MERGE, READ])
    read, merge, other = limits.limits_of(said)
    assert (read.call, read.kernel, read.us, read.memory, read.registers) == ("int4:A", "attend", 158.464, 83.5, 168)
    assert (merge.call, merge.kernel, merge.us, other.call) == ("int4:A", "combine_kernel", 6.0, "int2:A")
    line = limits.table([read]).splitlines()[-1]
    assert line.split()[:4] == ["int4:A", "attend", "158.5", "84"] and "168  wait 1.8, " in line


def test_what_a_profiler_does_not_know_of_a_gpu() -> None:
    """Some waits; nothing else may be missing."""
    (read,) = limits.limits_of(words({"int4:A": ["attend"]}, [READ], [limits._WAITS["branch_resolve"]]))
    assert read.stalls.keys() == limits._WAITS.keys() - {"branch_resolve"}
    with pytest.raises(ValueError, match="the profiler has no dram__throughput"):
        limits.limits_of(words({"int4:A": ["attend"]}, [("attend", {})], [limits._METRICS["memory"]]))


@pytest.mark.parametrize(
    "said",
    [
        "",
        "==ERROR== ERR_NVGPUCTRPERM",
        words({"int4:A": ["attend", "combine_kernel"]}, [READ]),
        words({"int4:A": ["attend"]}, [READ, READ]),
        words({"int4:A": ["attend", "combine_kernel"]}, [MERGE, READ]),
    ],
)
def test_words_that_are_not_whole_are_refused(said: str) -> None:
    with pytest.raises(ValueError, match=r"said nothing|ERR_NVGPUCTRPERM|the calls launched"):
        limits.limits_of(said)


def test_one_setting_is_named() -> None:
    for name in limits.DEFAULT:
        limits.parsed(name)
    backend, setting = limits.parsed("int4:A-q8")
    assert (backend.mode, setting.name) == ("int4_per_token_head", "A-q8")
    for name, problem in {"int4:decode": "need one setting, got A, B", "int4": "none named", "int4:Z": "no such settings: Z"}.items():
        with pytest.raises(ValueError, match=problem):
            limits.parsed(name)


@pytest.mark.parametrize(("calls", "reason"), [("int4:Z", "no such settings"), ("int5:A", "int5"), (None, "no ncu|no CUDA")])
def test_what_cannot_be_run_ends_with_status_2(calls: str | None, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(limits, "cuda_tool", lambda name: None)
    assert limits.main([calls] if calls else []) == 2
    assert re.search(reason, capsys.readouterr().err)
