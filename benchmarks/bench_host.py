"""What an eager call costs the host: ``python benchmarks/bench_host.py [MODE ...]``.

Microseconds of Python for one layer's write and read, both in a small setting, so that the device is never what is waited for:

* ``dispatch``: the door and torch's dispatcher, with an op that does nothing;
* ``whole way``: a call with new facts: validated, planned, bundled, and launched by Triton;
* ``watched``: a call with the facts of an earlier one (:mod:`kvq_core.call.replay_cache`), through torch's dispatcher;
* ``repeated``: the same without the dispatcher (:mod:`kvq_core.call.direct`), which is what layers and steps mostly make.

Medians over rounds; of ``repeated``, the quickest and the slowest round too. Virtual machines have been seen to run everything at half
their speed for seconds at a time: a loop of plain Python, timed in the same rounds, says whether this one did.

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
from kvq_core import QuantKVBackend, get_backend  # noqa: E402
from kvq_core.call import direct, ops  # noqa: E402
from kvq_core.testing.dry_launch import launching_for  # noqa: E402
from shapes import Read, Write  # noqa: E402

WRITE, READ = Write("w32", 32, scattered=True), Read("b32-2048", (2048,) * 32)
GOAL_US = 60.0
"""For both calls together, on a machine with a GPU: the exit status says whether it was met."""
CALLS, ROUNDS = 50, 60
"""Calls at a stretch, and how often each stretch comes: many short ones see the machine at all its speeds."""
Call = Callable[[], None]


@contextlib.contextmanager
def _watched(context: contextlib.AbstractContextManager[object]) -> Iterator[None]:
    """``context``, with calls that all go through torch's dispatcher."""
    with context, mock.patch.object(direct, "is_watched", lambda: True):
        yield


STAGES: dict[str, Any] = {
    "dispatch": lambda: _watched(mock.patch.object(ops._Bound, "call", lambda self, verb, arguments: None)),
    "whole way": lambda: mock.patch.object(ops, "replays_on", lambda device: False),
    "watched": lambda: _watched(contextlib.nullcontext()),
    "repeated": contextlib.nullcontext,
}


def plain_python() -> None:
    """A fixed piece of work, to tell the speed of the machine by."""
    total = 0
    for number in range(1000):
        total += number


def microseconds(calls: Sequence[Call]) -> list[dict[str, list[float]]]:
    """For each of ``calls``, by stage: the mean time in each round that a call keeps the host. A round has all of them, so that a slow
    moment of the machine is nobody's alone."""
    times: list[dict[str, list[float]]] = [{stage: [] for stage in STAGES} for _ in calls]
    for _ in range(ROUNDS):
        for stage, context in STAGES.items():
            with context():
                for call, stages in zip(calls, times, strict=True):
                    call()
                    begin = time.perf_counter()
                    for _ in range(CALLS):
                        call()
                    stages[stage].append((time.perf_counter() - begin) / CALLS * 1e6)
                    if torch.cuda.is_available():
                        torch.cuda.synchronize()
    return times


def doors(backend: QuantKVBackend, device: torch.device) -> dict[str, Call]:
    """One layer's two calls."""
    writing, reading = problems.write(backend, WRITE, device), problems.read(backend, READ, device)
    return {"write": lambda: backend.reshape_and_cache(**writing), "read": lambda: backend.unified_attention(**reading)}


def summary(stages: dict[str, list[float]]) -> list[float]:
    """The median of each stage, then the quickest and the slowest round of the last."""
    *_, repeated = stages.values()
    return [*map(statistics.median, stages.values()), min(repeated), max(repeated)]


def rows(backends: Sequence[QuantKVBackend], device: torch.device) -> Iterator[tuple[str, str, list[float]]]:
    """(mode, door, :func:`summary` of its microseconds) of all modes, and of the sum of a mode's doors; then of plain Python."""
    calls = {(backend.mode, door): call for backend in backends for door, call in doors(backend, device).items()}
    *measured, plain = microseconds([*calls.values(), plain_python])
    times = dict(zip(calls, measured, strict=True))
    for backend in backends:
        write, read = times[backend.mode, "write"], times[backend.mode, "read"]
        yield backend.mode, "write", summary(write)
        yield backend.mode, "read", summary(read)
        yield backend.mode, "both", summary({stage: [a + b for a, b in zip(write[stage], read[stage], strict=True)] for stage in STAGES})
    yield "plain Python", "", summary(plain)


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
    parser.add_argument("modes", nargs="*", metavar="MODE", default=["none", "int8", "fp8", "fp8_per_tensor", "int4", "int3", "int2"])
    parser.add_argument("--profile", choices=STAGES, help="print where the time of this stage goes instead")
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu")
    # As engines call.
    with torch.no_grad(), contextlib.nullcontext() if has_gpu else launching_for("sm_90"):
        backends = [get_backend(mode) for mode in options.modes]
        if options.profile:
            for backend in backends:
                for call in doors(backend, device).values():
                    with STAGES[options.profile]():
                        profile(call)
            return
        table = list(rows(backends, device))
    print(torch.cuda.get_device_name() if has_gpu else "no GPU: nothing is launched")
    headers = ["mode", "door", *STAGES, "quickest", "slowest"]
    print(tabulate([(mode, door, *times) for mode, door, times in table], headers=headers, floatfmt=".1f"))
    median, quickest, slowest = max(times[-3:] for _, door, times in table if door == "both")
    print(f"\nrepeated write + read: at most {median:.1f} us, {quickest:.1f} to {slowest:.1f} by the round; the goal is {GOAL_US:.0f}")
    sys.exit(has_gpu and median > GOAL_US)


if __name__ == "__main__":
    main()
