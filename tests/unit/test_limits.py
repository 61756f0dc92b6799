"""What is made of a profiler's words, without one."""

import json
from collections.abc import Sequence

import pytest

import limits

pytestmark = pytest.mark.quick


def words(launches: dict[str, list[str]], kernels: list[tuple[str, dict[str, str]]], unknown: Sequence[str] = ()) -> str:
    """What Nsight Compute prints of ``kernels``, each with its figures, after what the watched process says."""
    metrics = [metric for metric in (*limits._METRICS.values(), *limits._WAITS.values()) if metric not in unknown]
    rows = [["ID", "Kernel Name", *metrics], ["", "", *("%" for _ in metrics)]]
    rows += [[str(i), name, *(figures.get(metric, "0.5") for metric in metrics)] for i, (name, figures) in enumerate(kernels)]
    table = "\n".join(",".join(f'"{cell}"' for cell in row) for row in rows)
    return f"==PROF== Connected to process 1\n{limits.LAUNCHES}{json.dumps(launches)}\n==PROF== Disconnected\n{table}\n"


READ_FIGURES = {"ns": "158,464", "memory": "83.5", "registers": "168"}
READ = ("attend", {limits._METRICS[name]: figure for name, figure in READ_FIGURES.items()} | {limits._WAITS["wait"]: "1.75"})
COMBINE = ("combine_kernel", {limits._METRICS["ns"]: "6000", limits._METRICS["registers"]: "64"})
COPY = ("void at::native::copy()", {})


def test_kernels_are_found_and_told_longest_wait_first() -> None:
    said = words({"int4:A": ["attend", "combine_kernel"], "int2:A": ["attend"]}, [READ, COPY, COMBINE, READ])
    read, combine, other = limits.limits_of(said)
    assert (read.call, read.kernel, read.us, read.memory, read.registers) == ("int4:A", "attend", 158.464, 83.5, 168)
    assert (combine.call, combine.kernel, combine.us, other.call) == ("int4:A", "combine_kernel", 6.0, "int2:A")
    line = limits.table([read]).splitlines()[-1]
    assert line.split()[:4] == ["int4:A", "attend", "158.5", "84"] and "168  wait 1.8, " in line


@pytest.mark.parametrize(
    "said",
    [
        "",
        "==ERROR== ERR_NVGPUCTRPERM",
        words({"int4:A": ["attend", "combine_kernel"]}, [READ]),
        words({"int4:A": ["attend", "combine_kernel"]}, [COMBINE, READ]),
        words({"int4:A": ["attend"]}, [("attend", {})], [limits._METRICS["memory"]]),
    ],
)
def test_words_that_are_not_whole_are_refused(said: str) -> None:
    with pytest.raises(ValueError, match=r"said nothing|ERR_NVGPUCTRPERM|the calls launched|the profiler has no dram__throughput"):
        limits.limits_of(said)
