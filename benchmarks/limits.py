"""What limits a kernel, as NVIDIA's profiler has it: ``python benchmarks/limits.py [MODE:SETTING ...]``.

Each call of a mode in one of the benchmarks' settings (shapes.py) runs once under Nsight Compute (``ncu``), with a cold cache and the GPU's
own clocks, and each of its kernels becomes a line: its time alone, the shares of what the memory bus, the issue slots and the tensor cores
can do, and what a warp waits for between two instructions. Several calls share a process; lines come as each is done, and one that fails
costs no others.

Exit status: 0; 1 if some calls were not measured; 2 for a machine without CUDA or ncu, or a wrong command line.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import checkout

checkout.use()

import torch  # noqa: E402
from tabulate import tabulate  # noqa: E402

import precompile  # noqa: E402
import problems  # noqa: E402
import shapes  # noqa: E402
from kvq_core import KVQError, QuantKVBackend, get_backend  # noqa: E402
from kvq_core.environment import cuda_tool  # noqa: E402
from kvq_core.launch.offline import Device  # noqa: E402
from kvq_core.testing.launches import noted_launches  # noqa: E402

DEFAULT: Final = (
    *(f"{mode}:{setting}" for setting in ("A", "B", "C") for mode in ("none", "int8", "int4", "int2")),
    *("int8:b1-512", "int4:b1-512", "int4:ragged", "int2:ragged", "int4:A-q4", "int8:A-q8", "int4:A-q8", "int4:A-d96", "int2:A-d64"),
    *(f"{mode}:q8192" for mode in ("none", "int8", "fp8", "fp8_per_tensor", "int4", "int2")),
    *("none:w8192", "int4:w8192", "int2:w8192"),
)
"""The calls of which performance-figures.md says what limits them."""
AT_ONCE: Final = 8
"""Calls in a process, which takes some seconds to start."""
LAUNCHES: Final = "launches of the calls: "
"""Begins the line in which the profiled process says which kernels each call has launched, as JSON."""

_WAITS: Final = {
    wait: f"smsp__average_warps_issue_stalled_{wait}_per_issue_active.ratio"
    for wait in (
        *("long_scoreboard", "short_scoreboard", "wait", "barrier", "math_pipe_throttle", "mio_throttle", "lg_throttle", "no_instruction"),
        *("not_selected", "branch_resolve", "dispatch_stall", "gmma"),
    )
}
_METRICS: Final = {
    "ns": "gpu__time_duration.sum",
    "memory": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "tensor": "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    "warps": "smsp__warps_active.avg.per_cycle_active",
    "registers": "launch__registers_per_thread",
}


@dataclass(frozen=True)
class Limits:
    """One kernel. Shares in per cent of the peak; ``warps`` on a scheduler; ``stalls``: cycles that a warp waits for each instruction."""

    call: str
    kernel: str
    us: float
    memory: float
    issue: float
    tensor: float
    warps: float
    registers: int
    stalls: dict[str, float]


def profiled(calls: Sequence[str]) -> None:
    """Make each of ``calls`` with the profiler on, once it is warm."""
    launches = {}
    for name in calls:
        call = _call(name)
        with noted_launches() as launches[name]:
            call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
        del call
        torch.cuda.empty_cache()
    print(LAUNCHES + json.dumps(launches), flush=True)


def _call(name: str) -> Callable[[], object]:
    backend, setting = parsed(name)
    device = torch.device("cuda", torch.cuda.current_device())
    if isinstance(setting, shapes.Write):
        return problems.write_call(backend, setting, device)
    read = problems.read(backend, setting, device)
    return lambda: backend.unified_attention(**read)


def parsed(name: str) -> tuple[QuantKVBackend, shapes.Setting]:
    """The mode and the setting of ``MODE:SETTING``; ``ValueError`` for a setting that there is not, :class:`KVQError` for a mode."""
    mode, _, setting = name.partition(":")
    found = [one for _, settings in shapes.chosen([setting]) for one in settings]
    if len(found) != 1:
        raise ValueError(f"{name}: need one setting, got {', '.join(one.name for one in found)}")
    return get_backend(mode), found[0]


def limits_of(said: str) -> list[Limits]:
    """What the profiler and the process that it watched have said, kernel by kernel; ``ValueError`` if that is not whole."""
    lines = said.splitlines()
    told = next((line for line in lines if line.startswith(LAUNCHES)), None)
    head = next((at for at, line in enumerate(lines) if line.startswith('"ID"')), None)
    if told is None or head is None:
        raise ValueError(said.strip()[-1500:] or "the profiler said nothing")
    launched = [(call, kernel) for call, kernels in json.loads(told[len(LAUNCHES) :]).items() for kernel in kernels]
    # The row under the names has the units. Kernels that are not the mode's are copies of torch's.
    seen = [kernel for kernel in list(csv.DictReader(lines[head:]))[1:] if kernel["Kernel Name"] in {name for _, name in launched}]
    if [name for _, name in launched] != [kernel["Kernel Name"] for kernel in seen]:
        raise ValueError(f"the calls launched {launched}, of which the profiler has {[kernel['Kernel Name'] for kernel in seen]}")

    missing = set(_METRICS.values()) - seen[0].keys() if seen else ()
    if missing:
        raise ValueError(f"the profiler has no {', '.join(sorted(missing))}")

    def number(kernel: dict[str, str], metric: str) -> float:
        return float(kernel[metric].replace(",", ""))

    found = []
    for (call, name), kernel in zip(launched, seen, strict=True):
        figures = {fact: number(kernel, metric) for fact, metric in _METRICS.items()}
        # A profiler leaves out, without a word, what it does not know of a GPU.
        stalls = {stall: number(kernel, metric) for stall, metric in _WAITS.items() if metric in kernel}
        us, registers = figures.pop("ns") / 1e3, int(figures.pop("registers"))
        found.append(Limits(call, name, us, **figures, registers=registers, stalls=stalls))
    return found


def profile(calls: Sequence[str], ncu: str) -> list[Limits]:
    """The kernels of ``calls``, in one process; ``ValueError`` with what was said if it comes to nothing."""
    metrics = ",".join([*_METRICS.values(), *_WAITS.values()])
    options = ["--profile-from-start", "off", "--csv", "--page", "raw", "--print-units", "base", "--metrics", metrics]
    # A profiler that sets clocks sets them for everybody on the GPU.
    options += ["--clock-control", "none"]
    command = [ncu, *options, sys.executable, __file__, "--profiled", *calls]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    return limits_of(done.stdout if done.returncode == 0 else f"{done.stdout[-700:]}\n{done.stderr[-700:]}")


def table(found: Sequence[Limits]) -> str:
    """A line a kernel, with the three longest waits."""
    rows = []
    for one in found:
        waits = sorted(one.stalls.items(), key=lambda item: -item[1])[:3]
        words = ", ".join(f"{name} {cycles:.1f}" for name, cycles in waits)
        shares = [f"{share:.0f}" for share in (one.memory, one.issue, one.tensor)]
        rows.append([one.call, one.kernel, f"{one.us:.1f}", *shares, f"{one.warps:.1f}", one.registers, words])
    head = ["call", "kernel", "us", "% memory", "% issue", "% tensor", "warps", "registers", "cycles waited an instruction"]
    return tabulate(rows, head, disable_numparse=True, colalign=("left", "left", *["right"] * 6, "left"))


def compiled(calls: Sequence[str]) -> Iterator[str]:
    """Compile all kernels beside each other; yields what could not be."""
    here = Device.current()
    jobs = []
    for backend, setting in map(parsed, calls):
        jobs.append(precompile.Job(backend.mode, (setting,), precompile.choices_of(backend, setting, here), here))
    for job, fault in precompile.compile_all(jobs):
        if fault:
            yield f"{job.mode}:{job.settings[0].name}: {fault}"


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("calls", nargs="*", metavar="MODE:SETTING", help=f"default: {' '.join(DEFAULT)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="a file for all figures, too")
    parser.add_argument("--profiled", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    calls = options.calls or list(DEFAULT)
    try:
        for name in calls:
            parsed(name)
    except (ValueError, KVQError) as error:
        print(f"limits.py: {error}", file=sys.stderr)
        return 2
    ncu = cuda_tool("ncu")
    if not torch.cuda.is_available() or ncu is None:
        lacks = (
            "torch sees no CUDA GPU"
            if ncu
            else "no ncu in PATH, CUDA_HOME or /usr/local/cuda: need Nsight Compute, of NVIDIA's CUDA toolkit"
        )
        print(f"limits.py: {lacks}", file=sys.stderr)
        return 2
    if options.profiled:
        profiled(calls)
        return 0
    faults = list(compiled(calls))
    found: list[Limits] = []
    for first in range(0, len(calls), AT_ONCE):
        some = calls[first : first + AT_ONCE]
        try:
            fresh = profile(some, ncu)
        except ValueError as error:
            faults.append(f"{' '.join(some)}: {error}")
            continue
        found += fresh
        print(table(fresh), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n", encoding="utf-8")
    for fault in faults:
        print(f"not measured: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
