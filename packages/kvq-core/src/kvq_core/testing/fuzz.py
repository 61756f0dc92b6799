"""Fuzz modes with whole scenarios: ``python -m kvq_core.testing.fuzz [--modes MODE ...] [--count N] [--seed S] [--device cuda|cpu]``.

Each scenario is one write and one read, drawn from the seed, the mode and a number, and held to ``encode`` and to float64 attention
(:mod:`kvq_core.testing.fuzz_tests` says to what exactly). ``--device cpu`` runs the kernels in Triton's interpreter. Scenarios that share
compiled kernels run one after another, in ``--workers`` processes; one that dies or hangs takes one scenario along, the rest of its share
goes to another. A failure is printed with the scenario and the command that runs it alone; any failure, and any scenario that could not be
run (``--minutes`` limits the time), makes the exit status 1. ``--json`` keeps the counts and the failures in a file as they come.
Scenarios repeat themselves within a version of hypothesis.

``--suite FILE`` names a file with :class:`~kvq_core.testing.BackendTests` subclasses, whose own error bounds then hold for their modes
(this repository: ``tests/kernels/test_backends.py``); a mode without one is held to the defaults. A file that cannot be run ends the run
with exit status 2.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import runpy
import sys
import time
import warnings
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from kvq_core.testing.interpret.speedup import speed_up

if TYPE_CHECKING:
    from kvq_core.testing.suite import BackendTests

SILENCE = 240
"""Seconds without a word from a worker after which it is taken to hang."""


@dataclass(frozen=True)
class Run:
    """What every worker is told. ``suites``: files of test classes; ``place``: ``gpu`` or ``interpret``."""

    place: str
    seed: int
    suites: tuple[str, ...]
    shrink: bool = False


@dataclass(frozen=True)
class Task:
    """Scenarios ``numbers`` of a mode."""

    mode: str
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Report:
    """Scenario ``number`` is done (``failure``: how it failed). ``last``: this process takes no more."""

    number: int
    failure: str = ""
    last: bool = False


@dataclass
class Worker:
    """A process, what it has not done of its task, and when it was last heard of. ``up``: it is."""

    process: Any
    heard: float
    up: bool = False
    mode: str = ""
    left: list[int] = field(default_factory=list)


def classes_of(suites: tuple[str, ...]) -> list[type[BackendTests]]:
    """The test classes in the files ``suites``, which find modules beside them, as ``python FILE`` does."""
    from kvq_core.testing.suite import BackendTests

    found: list[type[BackendTests]] = []
    for file in suites:
        sys.path.insert(0, str(Path(file).resolve().parent))
        content = runpy.run_path(file, run_name=f"kvq_fuzzed_{Path(file).stem}")
        found += [each for each in content.values() if isinstance(each, type) and issubclass(each, BackendTests)]
    return found


def subject_of(mode: str, classes: Sequence[type[BackendTests]]) -> BackendTests:
    """That of ``mode`` among the test classes, else one with the default bounds."""
    from kvq_core.testing.suite import BackendTests

    named = (each for each in classes if getattr(each, "mode", None) == mode)
    return next(named, type("Fuzzed", (BackendTests,), {"mode": mode}))()


def settle(place: str) -> None:
    """Make this process's kernels run at ``place``; before anything imports triton."""
    if place == "interpret":
        os.environ["TRITON_INTERPRET"] = "1"
        speed_up()
    else:
        os.environ.pop("TRITON_INTERPRET", None)
    os.environ.pop("KVQ_DEBUG", None)
    # The interpreter computes with numpy, which speaks of every inf and NaN that the scenarios put there.
    warnings.filterwarnings("ignore", ".*encountered", RuntimeWarning)


def work(run: Run, pipe: Any) -> None:
    """The life of a worker process: scenarios until there are no more, or until the GPU refuses to go on."""
    settle(run.place)
    import torch

    from kvq_core.testing.places import Place

    torch.set_num_threads(1)
    place = Place(run.place)
    try:
        classes = classes_of(run.suites)
    except Exception as error:  # whatever a file of somebody else's raises
        pipe.send(f"--suite {' '.join(run.suites)}: {type(error).__name__}: {error}")
        return
    pipe.send(None)
    for task in iter(pipe.recv, None):
        subject = subject_of(task.mode, classes)
        for number in task.numbers:
            failure = try_scenario(subject, place, run, number)
            lost = bool(failure) and not alive(place)
            pipe.send(Report(number, failure, lost))
            if lost:
                return


def try_scenario(subject: BackendTests, place: Any, run: Run, number: int) -> str:
    """How scenario ``number`` fails; empty if it does not."""
    from kvq_core.testing.scenarios import smallest

    backend, scenario = subject.make_backend(), None
    try:
        scenario = subject.scenario(backend, place, run.seed, number)
        subject.assert_scenario(backend, place, scenario)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}\n  {scenario or 'no scenario'}"
        if run.shrink and scenario is not None:
            found = smallest(*subject.draws(backend, place, run.seed, number), lambda s: subject.assert_scenario(backend, place, s))
            failure += f"\n  the smallest alike: {found}"
        return failure
    return ""


def alive(place: Any) -> bool:
    """Whether the GPU still takes work from this process."""
    import torch

    try:
        if place.name == "gpu":
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


class Workers:
    """Processes that take tasks. One that dies, hangs, or loses the GPU to an illegal access is replaced, and what it had not done but
    for the scenario it was at is a task again. ``file``: where the counts and failures are kept.

    Each has a pipe of its own, so that what it said before it died is read, and nobody waits for a lock that it held.
    """

    def __init__(self, run: Run, tasks: list[Task], count: int, file: Path | None = None) -> None:
        self.run, self.file = run, file
        self.tasks = deque(tasks)
        self.workers: dict[Any, Worker] = {}
        self.failures: dict[str, str] = {}
        self.done: Counter[str] = Counter()
        for _ in range(min(count, len(tasks))):
            self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=work, args=(self.run, there), daemon=True)
        process.start()
        # The only other end is the process's own, so that reading ends when it does.
        there.close()
        self.workers[here] = Worker(process, time.monotonic())

    def watch(self, bar: Any, minutes: float = math.inf) -> None:
        """Collect reports until every task is done or lost, or the time is up."""
        end = time.monotonic() + 60 * minutes
        while (self.tasks or any(worker.left for worker in self.workers.values())) and time.monotonic() < end:
            for pipe in wait(list(self.workers), timeout=1):
                self.hear(pipe, bar)
            for pipe, worker in list(self.workers.items()):
                if worker.left and time.monotonic() - worker.heard > SILENCE:
                    worker.process.kill()
                    self.bury(pipe, "no word for minutes", bar)
        for worker in self.workers.values():
            worker.process.kill()
        self.keep()

    def hear(self, pipe: Any, bar: Any) -> None:
        """Take one report, or notice that there will be none."""
        worker = self.workers[pipe]
        worker.heard = time.monotonic()
        try:
            report = pipe.recv()
        except (EOFError, ConnectionError):
            worker.process.join()
            self.bury(pipe, f"its process ended with status {worker.process.exitcode}", bar)
            return
        worker.up = True
        if isinstance(report, str):
            print(report, file=sys.stderr)
            raise SystemExit(2)
        if report is not None:
            worker.left.remove(report.number)
            self.done[worker.mode] += 1
            if report.failure:
                self.fail(worker.mode, report.number, report.failure, bar)
            bar.update()
            if report.last:
                self.bury(pipe, "", bar)
                return
        if not worker.left and self.tasks:
            task = self.tasks.popleft()
            worker.mode, worker.left = task.mode, list(task.numbers)
            # One that has just died is noticed when it is heard next.
            with contextlib.suppress(ConnectionError):
                pipe.send(task)

    def bury(self, pipe: Any, why: str, bar: Any) -> None:
        """Forget a worker, and have another take its place. ``why`` it could not finish the scenario it was at; empty: it did."""
        worker = self.workers.pop(pipe)
        pipe.close()
        if not worker.up:
            raise SystemExit(f"a worker was of no use: {why}")
        if why and worker.left:
            self.fail(worker.mode, worker.left.pop(0), f"not run: {why}", bar)
            bar.update()
        if worker.left:
            self.tasks.append(Task(worker.mode, tuple(worker.left)))
        if self.tasks:
            self.start()

    def keep(self) -> None:
        """Write the file."""
        if self.file is not None:
            content = {"seed": self.run.seed, "place": self.run.place, "done": dict(self.done), "failures": self.failures}
            self.file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def fail(self, mode: str, number: int, failure: str, bar: Any) -> None:
        name = f"{mode}:{number}"
        self.failures[name] = failure
        suites = "".join(f" --suite {file}" for file in self.run.suites)
        device = "cuda" if self.run.place == "gpu" else "cpu"
        again = f"python -m kvq_core.testing.fuzz --device {device}{suites} --seed {self.run.seed} --only {name}"
        bar.write(f"FAILED {name}: {failure}\n  again: {again}")
        self.keep()


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kvq_core.testing.fuzz", description="Fuzz modes with whole scenarios.")
    parser.add_argument("--modes", nargs="+", metavar="MODE", help="default: all that are installed")
    parser.add_argument("--count", type=int, default=240, metavar="N", help="scenarios in all, in equal parts for the modes (default: 240)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other scenarios (default: 0)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cpu: Triton's interpreter (default: cuda if there is a GPU)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), metavar="N", help="processes (default: one for each core)")
    parser.add_argument("--suite", action="append", default=[], metavar="FILE", help="test classes whose error bounds hold")
    parser.add_argument("--only", nargs="+", default=[], metavar="MODE:NUMBER", help="these scenarios alone")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop then, and say what was not run")
    parser.add_argument("--json", type=Path, metavar="PATH", help="a file for the counts and the failures")
    parser.add_argument("--shrink", action="store_true", help="look for the smallest scenario of the same kernels that fails, too")
    chosen = parser.parse_args(argv)
    if chosen.count < 1 or chosen.workers < 1:
        parser.error(f"--count and --workers: got {chosen.count} and {chosen.workers}, need at least 1")
    for name in chosen.only:
        if not name.rpartition(":")[2].isdigit() or not name.rpartition(":")[0]:
            parser.error(f"--only: got {name}, need MODE:NUMBER, as a failure is printed")
    return chosen


def tasks_of(chosen: argparse.Namespace, modes: list[str], together: int) -> list[Task]:
    """The scenarios asked for, those with the same kernels in one task; the modes take turns."""
    if chosen.only:
        named = [(mode, int(number)) for mode, _, number in (name.rpartition(":") for name in chosen.only)]
        return [Task(mode, (number,)) for mode, number in named]
    parts = [chosen.count * (i + 1) // len(modes) - chosen.count * i // len(modes) for i in range(len(modes))]
    groups = [
        (first, Task(mode, tuple(range(first, min(first + together, part)))))
        for mode, part in zip(modes, parts, strict=True)
        for first in range(0, part, together)
    ]
    return [task for _, task in sorted(groups, key=lambda group: group[0])]


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    chosen = parse(argv)
    import torch

    from kvq_core.errors import KVQError
    from kvq_core.registry import get_backend, list_backends
    from kvq_core.testing.places import Place

    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("--device cuda: torch sees no GPU here", file=sys.stderr)
        return 2
    gpu = torch.cuda.is_available() if chosen.device is None else chosen.device == "cuda"
    place = Place("gpu" if gpu else "interpret")
    named = [name.rpartition(":")[0] for name in chosen.only] or chosen.modes or [found.mode for found in list_backends()]
    try:
        modes = list(dict.fromkeys(get_backend(name).mode for name in named))
    except KVQError as problem:
        print(problem, file=sys.stderr)
        return 2
    run = Run(place.name, chosen.seed, tuple(chosen.suite), chosen.shrink)
    tasks = tasks_of(chosen, modes, place.same_kernels if gpu else 4)
    total, started = sum(len(task.numbers) for task in tasks), time.monotonic()
    # Where there is no terminal, a line now and then.
    pace = 0.1 if sys.stderr.isatty() else 15.0
    with tqdm(total=total, unit=" scenarios", smoothing=0, mininterval=pace) as bar:
        workers = Workers(run, tasks, chosen.workers, chosen.json)
        workers.watch(bar, chosen.minutes)
    by_mode = ", ".join(f"{mode} {workers.done[mode]}" for mode in modes)
    seconds = time.monotonic() - started
    told = workers.done.total() + sum(failure.startswith("not run") for failure in workers.failures.values())
    late = f", {total - told} not run in {chosen.minutes:g} minutes" if told < total else ""
    print(f"{total} scenarios ({by_mode}), seed {chosen.seed}, {place.name}: {len(workers.failures)} failures{late}, {seconds:.0f} s")
    return 1 if workers.failures or late else 0


if __name__ == "__main__":
    sys.exit(main())
