"""What an eager call costs the host: ``python benchmarks/bench_host.py [MODE ...]``.

Microseconds of Python for one layer's write and read, both in a small setting, so that the device is never what is waited for:

* ``dispatch``: the door and torch's dispatcher, with an op that does nothing;
* ``whole way``: a call with new facts: validated, planned, bundled, and launched by Triton;
* ``repeated``: a call with the facts of an earlier one (:mod:`kvq_core.repeat`), which is what layers and steps mostly make.

Without a GPU nothing is launched (:mod:`kvq_core.testing.dry_launch`); what is missing then is Triton's C launcher and the driver's share:
some 5 us a kernel, of which a write has one and a read one or two.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import checkout

checkout.use()

import torch  # noqa: E402
from tabulate import tabulate  # noqa: E402

import problems  # noqa: E402
from kvq_core import QuantKVBackend, get_backend, ops  # noqa: E402
from kvq_core.testing.dry_launch import launching_for  # noqa: E402
from shapes import Read, Write  # noqa: E402

WRITE, READ = Write("w32", 32, scattered=True), Read("b32-2048", (2048,) * 32)
GOAL_US = 80.0
"""For both calls together."""
CALLS, ROUNDS = 200, 15
Call = Callable[[], None]
STAGES: dict[str, Any] = {
    "dispatch": lambda: mock.patch.object(ops._Bound, "call", lambda self, verb, arguments: None),
    "whole way": lambda: mock.patch.object(ops, "launches_repeat_on", lambda device: False),
    "repeated": contextlib.nullcontext,
}


def microseconds(calls: Sequence[Call]) -> list[float]:
    """Median over rounds of the mean time that each of ``calls`` keeps the host. A round has all of them, so that a slow moment of the
    machine is nobody's alone."""
    rounds: list[list[float]] = []
    for _ in range(ROUNDS):
        times = []
        for call in calls:
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            times.append((time.perf_counter() - begin) / CALLS * 1e6)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        rounds.append(times)
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def doors(backend: QuantKVBackend, device: torch.device) -> dict[str, Call]:
    """One layer's two calls."""
    writing, reading = problems.write(backend, WRITE, device), problems.read(backend, READ, device)
    return {"write": lambda: backend.reshape_and_cache(**writing), "read": lambda: backend.unified_attention(**reading)}


def rows(backends: Sequence[QuantKVBackend], device: torch.device) -> Iterator[tuple[str, str, list[float]]]:
    """(mode, door, microseconds of each stage) of all modes, and the sum of a mode's doors."""
    calls = {(backend.mode, door): call for backend in backends for door, call in doors(backend, device).items()}
    stages = []
    for stage in STAGES.values():
        with stage():
            for call in calls.values():
                call()
            stages.append(microseconds(list(calls.values())))
    times = dict(zip(calls, map(list, zip(*stages, strict=True)), strict=True))
    for backend in backends:
        write, read = times[backend.mode, "write"], times[backend.mode, "read"]
        yield backend.mode, "write", write
        yield backend.mode, "read", read
        yield backend.mode, "both", [a + b for a, b in zip(write, read, strict=True)]


def profile(call: Call) -> None:
    """Print where the time of a call goes, by function."""

    def many() -> None:
        for _ in range(1000):
            call()

    call()
    profiler = cProfile.Profile()
    profiler.runcall(many)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="*", metavar="MODE", default=["none", "int8", "fp8", "int4", "int2"])
    parser.add_argument("--profile", choices=STAGES, help="print where the time of this stage goes instead")
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu")
    with contextlib.nullcontext() if has_gpu else launching_for("sm_90"):
        backends = [get_backend(mode) for mode in options.modes]
        if options.profile:
            for backend in backends:
                for call in doors(backend, device).values():
                    with STAGES[options.profile]():
                        profile(call)
            return
        table = list(rows(backends, device))
    print(torch.cuda.get_device_name() if has_gpu else "no GPU: nothing is launched")
    print(tabulate([(mode, door, *times) for mode, door, times in table], headers=["mode", "door", *STAGES], floatfmt=".1f"))
    slowest = max(times[-1] for _, door, times in table if door == "both")
    print(f"\nrepeated write + read: at most {slowest:.1f} us; the goal is {GOAL_US:.0f}")
    sys.exit(slowest > GOAL_US)


if __name__ == "__main__":
    main()
