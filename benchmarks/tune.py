"""Launch plans measured on this GPU: ``python benchmarks/tune.py``, or ``kvq tune``.

For each class of problems that the settings of the benchmarks fall into, a bounded list of candidates is compiled by many processes, each
candidate is held against the correctness gate, and what is right is timed as the benchmarks time it. The present choice is kept unless
another wins by more than noise, twice. Prints a table for each class; writes a table of plans with every measurement.

Exit status: 0; 1 if a class could not be measured; 2 for a machine without CUDA or a wrong command line.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import checkout

checkout.use()

import torch  # noqa: E402
from tabulate import tabulate  # noqa: E402
from tqdm import tqdm  # noqa: E402

import attention  # noqa: E402
import bench_write  # noqa: E402
import gate  # noqa: E402
import modes  # noqa: E402
import precompile  # noqa: E402
import shapes  # noqa: E402
from kvq_core import KVQError, QuantKVBackend  # noqa: E402
from kvq_core.call import ops  # noqa: E402
from kvq_core.environment import installed, kernels_of, source_version  # noqa: E402
from kvq_core.errors import ArgumentError  # noqa: E402
from kvq_core.launch.offline import Device  # noqa: E402
from kvq_core.plan import KINDS, Choice, Entry, Run, Table, choose  # noqa: E402
from kvq_core.plan.candidates import candidates, class_of  # noqa: E402
from kvq_core.plan.lookup import SWITCH, own_file  # noqa: E402
from kvq_core.plan.selection import NOISE, Outcome, Trial, select  # noqa: E402
from kvq_core.plan.table import Range, Where  # noqa: E402
from rows import brief, release  # noqa: E402
from timing import Call, Timer  # noqa: E402

OK, UNMEASURED, CANNOT_RUN = 0, 1, 2
ASSUMED = Device("cuda", 90, 32, 132, "sm_90", overlaps=True)
"""What candidates are listed for where there is no GPU."""

SETTINGS: dict[str, tuple[shapes.Setting, ...]] = {
    "decode": (*shapes.DECODE, *shapes.VARIED),
    "prefill": shapes.PREFILL,
    "groups": (*shapes.PREFILL, *(setting for setting in shapes.VARIED if setting.query_len == 8)),
    "write": shapes.WRITE,
    "combine": shapes.DECODE,
}
"""What each kind of kernel is timed in; settings whose plans are looked up by facts of one class are judged together."""
QUICK: dict[str, tuple[shapes.Setting, ...]] = {
    "decode": shapes.HEADLINE[:2],
    "prefill": shapes.PREFILL[:1],
    "groups": shapes.PREFILL[:1],
    "write": shapes.WRITE,
    "combine": shapes.HEADLINE[:2],
}


@dataclass(frozen=True)
class Class:
    """Problems that are planned alike: those of ``settings`` in one mode. ``choices``: the candidates, the present choice first."""

    backend: QuantKVBackend
    kind: str
    where: Where
    settings: tuple[shapes.Setting, ...]
    choices: tuple[Choice, ...]

    def __str__(self) -> str:
        names = ", ".join(setting.name for setting in self.settings)
        return f"{self.backend.mode}, {self.kind} ({names}): {', '.join(map(_condition, self.where.items()))}"

    @property
    def gate(self) -> tuple[shapes.Read, ...]:
        return gate.shapes_of(self.settings)


def _condition(item: tuple[str, Any]) -> str:
    name, condition = item
    if not isinstance(condition, Range):
        return f"{name} {condition!r}"
    least, most = condition.least, condition.most
    return f"{name} {least} to {most}" if least and most else f"{name} from {least}" if least else f"{name} to {most}"


def classes(backend: QuantKVBackend, kind: str, device: Device, *, quick: bool) -> list[Class]:
    """The classes of the settings of ``kind``, in their order; none where the mode brings no such kernel."""
    if ("write" if kind == "write" else "read") not in kernels_of(backend):
        return []
    found: list[Class] = []
    for setting in (QUICK if quick else SETTINGS)[kind]:
        for facts in (facts for asked, facts in precompile.asked(backend, setting, device) if asked == kind):
            where, present = class_of(kind, facts), choose(device.arch, KINDS[kind], facts)
            tried = tuple(candidates(present, quick=quick))
            same = [i for i, known in enumerate(found) if (known.where, known.choices[0]) == (where, present)]
            if same:
                found[same[0]] = replace(found[same[0]], settings=(*found[same[0]].settings, setting))
            else:
                found.append(Class(backend, kind, where, (setting,), tried))
    return found


class Bench:
    """Judges and times the candidates of a class on the GPU."""

    def __init__(self, timer: Timer, device: Device, faults: dict[tuple[str, Choice], str], bar: tqdm[Any]) -> None:
        self.timer, self.device, self.faults, self.bar = timer, device, faults, bar

    def select(self, one: Class) -> Outcome:
        by_name = {setting.name: setting for setting in one.settings}
        return select(
            one.choices,
            list(by_name),
            lambda choice: self.fault(one, choice),
            lambda setting, choices: self.measure(one.backend, by_name[setting], choices),
        )

    def fault(self, one: Class, choice: Choice) -> str:
        """Why ``choice`` is out: it does not compile, or the gate is red with it; "" if it is not."""
        self.bar.set_description(f"gate, {one.backend.mode} {one.kind}")
        self.bar.update()
        known = self.faults.get((one.backend.mode, choice), "")
        if known:
            return known
        with self._planned(choice):
            verdicts = gate.check_all([gate.Check(one.backend, problem) for problem in one.gate], self.timer.device)
            return next((verdict.fault for verdict in verdicts if not verdict.green), "")

    def measure(self, backend: QuantKVBackend, setting: shapes.Setting, choices: Sequence[Choice]) -> list[float | str]:
        """Microseconds of each choice, or why there are none."""
        self.bar.set_description(f"{setting.name}, {backend.mode}")
        call: Call | None = None
        try:
            call = self._call(backend, setting)
            return [self._time(choice, call, setting.bytes(backend)) for choice in choices]
        except Exception as caught:  # no room for this setting: the others still count
            return [brief(caught)] * len(choices)
        finally:
            call = None
            release(self.timer.device)

    def _call(self, backend: QuantKVBackend, setting: shapes.Setting) -> Call:
        if isinstance(setting, shapes.Write):
            return bench_write.store(backend, setting, self.timer)
        return attention.attend(backend, setting, self.timer.device)

    def _time(self, choice: Choice, call: Call, working_set: int) -> float | str:
        with self._planned(choice):
            try:
                return self.timer.measure(call, working_set).device_us
            except Exception as caught:  # more shared memory than there is, say
                return brief(caught)

    def _planned(self, choice: Choice) -> Any:
        return ops.planning_with(precompile.only(self.device.arch, choice))


def compiled(found: Sequence[Class], device: Device, processes: int | None, bar: tqdm[Any]) -> dict[tuple[str, Choice], str]:
    """Compile all candidates; returns what is wrong with those that cannot be, by mode and choice."""
    jobs: list[list[precompile.Job]] = [[], []]
    for one in found:
        for i, choice in enumerate(one.choices):
            # The present choices first: candidates for other kinds need their kernels, too, and find them in the cache then.
            jobs[i > 0] += [precompile.Job(one.backend.mode, (*one.settings, *one.gate), (choice,), device)]
    bar.reset(total=sum(map(len, jobs)))
    bar.set_description("compiling")
    faults = {}
    for batch in jobs:
        for job, fault in precompile.compile_all(batch, processes):
            bar.update()
            if fault:
                faults[job.mode, job.choices[0]] = fault
    return faults


# -- what is printed and written --------------------------------------------------------------------------------------------


def in_words(choice: Choice, present: Choice) -> str:
    """The fields in which ``choice`` differs from the present one, or all of that."""
    usual = asdict(present)
    fields = {name: value for name, value in asdict(choice).items() if choice == present or value != usual[name]}
    return ", ".join(f"{name} {value}" for name, value in fields.items())


def listed(one: Class) -> str:
    """The candidates of a class, without figures."""
    present, *others = one.choices
    lines = [f"  present: {in_words(present, present)}", *(f"  {in_words(choice, present)}" for choice in others)]
    return "\n".join([f"{one}", *lines])


def report(one: Class, outcome: Outcome) -> str:
    """The candidates with their figures, the fastest first, and what is kept."""
    present = outcome.present
    usual = present.us if not present.fault else {}
    names = [setting.name for setting in one.settings]
    lines = []
    for trial in sorted(outcome.trials, key=lambda trial: trial.ratio(usual)) if usual else outcome.trials:
        ratio = f"{trial.ratio(usual):.3f}" if usual and not trial.fault else "-"
        times = [f"{trial.us[name]:.1f}" if name in trial.us else "-" for name in names]
        lines.append([in_words(trial.choice, present.choice), *times, ratio, _verdict(trial, outcome)])
    head = ["candidate", *(f"{name}, us" for name in names), "ratio", ""]
    align = ("left", *["right"] * (len(names) + 1), "left")
    return f"{one}\n\n{tabulate(lines, head, tablefmt='simple', disable_numparse=True, colalign=align)}\n"


def _verdict(trial: Trial, outcome: Outcome) -> str:
    if trial.fault:
        return f"out: {trial.fault}"
    words = ["present"] * (trial is outcome.present) + ["kept"] * (trial is outcome.kept)
    return ", ".join(words)


def written(path: Path, arch: str, outcomes: Sequence[tuple[Class, Outcome]], circumstances: Run) -> None:
    """Add what is kept to the table ``path``, in place of what it has for the same classes."""
    name = f"{circumstances.date} {circumstances.commit}"
    fresh: dict[str, list[Entry]] = {}
    for one, outcome in outcomes:
        measured = outcome.measurements(name, one.backend.mode)
        fresh.setdefault(one.kind, []).append(Entry(one.where, outcome.kept.choice, measured))
    path.parent.mkdir(parents=True, exist_ok=True)
    existing(path, arch).with_entries(fresh, {name: circumstances}).write(path)


def existing(path: Path, arch: str) -> Table:
    """The table that is to be added to: an empty one if there is none."""
    if not path.exists():
        return Table(arch, {})
    table = Table.read(path)
    if table.arch != arch:
        raise ArgumentError("--out", f"{path}, a table for {table.arch}", f"one for {arch}, that of this GPU, or another path")
    return table


def target(out: Path | None, arch: str) -> Path:
    """The file to write."""
    path = own_file(arch) if out is None else out / f"{arch}.json" if out.is_dir() else out
    if path is None:
        raise ArgumentError("--out", "nothing", f"a path, since {SWITCH} is empty: no table of one's own is in use")
    return path


# -- the command ------------------------------------------------------------------------------------------------------------


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tune.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", metavar="MODE", help="only these (with commas or spaces)")
    parser.add_argument("--kinds", metavar="A,B,...", default=",".join(KINDS), help=f"only these of {', '.join(KINDS)}")
    parser.add_argument("--quick", action="store_true", help="fewer settings; candidates that differ from the present choice in one way")
    parser.add_argument("--out", type=Path, metavar="PATH", help="the table to write or add to, or a folder")
    parser.add_argument("--dry-run", action="store_true", help="list the candidates, measure nothing")
    parser.add_argument("--processes", type=int, metavar="N", help="compile with so many")
    parser.add_argument("--name", default="tune.py", help=argparse.SUPPRESS)  # the command that errors are of
    return parser.parse_args(argv)


def kinds_of(text: str) -> list[str]:
    kinds = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in kinds if name not in KINDS]
    if unknown or not kinds:
        raise ArgumentError("--kinds", repr(text), f"some of {', '.join(KINDS)}")
    return [kind for kind in KINDS if kind in kinds]


def tune(found: Sequence[Class], device: Device, processes: int | None) -> Iterator[tuple[Class, Outcome]]:
    """The outcome of each class, printed when it is there."""
    timer = Timer(torch.device("cuda", torch.cuda.current_device()))
    with tqdm(total=0, file=sys.stderr, disable=not sys.stderr.isatty(), leave=False) as bar:
        begin = time.perf_counter()
        faults = compiled(found, device, processes, bar)
        count = sum(len(one.choices) for one in found)
        bar.write(f"{count} candidates compiled in {time.perf_counter() - begin:.0f} s, {len(faults)} of them in vain\n")
        bar.reset(total=count)
        bench = Bench(timer, device, faults, bar)
        for one in found:
            outcome = bench.select(one)
            bar.write(report(one, outcome))
            yield one, outcome


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    gpu = torch.cuda.is_available()
    if not gpu and not options.dry_run:
        print(
            f"Error: {options.name}: it times kernels on a CUDA GPU, and torch sees none here; see what it would try: --dry-run",
            file=sys.stderr,
        )
        return CANNOT_RUN
    begin = time.perf_counter()
    try:
        device = Device.current() if gpu else ASSUMED
        kinds = kinds_of(options.kinds)
        path = None if options.dry_run else target(options.out, device.arch)
        if path is not None:
            existing(path, device.arch)
        found = [
            one
            for backend in modes.backends_of(options.modes)
            for kind in kinds
            for one in classes(backend, kind, device, quick=options.quick)
        ]
    except (KVQError, OSError) as error:
        print(f"Error: {options.name}: {error}", file=sys.stderr)
        return CANNOT_RUN
    count = sum(len(one.choices) for one in found)
    if options.dry_run or path is None:
        where = torch.cuda.get_device_name() if gpu else f"no GPU here: listed as for {device.arch} with {device.num_sms} multiprocessors"
        print(f"{where}\n\n" + "\n\n".join(map(listed, found)) + f"\n\n{count} candidates in {len(found)} classes")
        return OK
    commit = source_version(checkout.ROOT)
    circumstances = Run(torch.cuda.get_device_name(), installed("triton") or "unknown", commit, date.today().isoformat())
    print(f"{circumstances.gpu} ({device.arch}), triton {circumstances.triton}, {circumstances.commit}: {count} candidates\n", flush=True)
    with torch.no_grad():
        outcomes = list(tune(found, device, options.processes))
    good = [(one, outcome) for one, outcome in outcomes if not outcome.present.fault]
    if good:
        written(path, device.arch, good, circumstances)
    print(summary(outcomes, path if good else None))
    print(f"{time.perf_counter() - begin:.0f} s")
    return OK if len(good) == len(outcomes) else UNMEASURED


def summary(outcomes: Sequence[tuple[Class, Outcome]], path: Path | None) -> str:
    """What has changed, and where that is written."""
    lines = []
    for one, outcome in outcomes:
        if outcome.present.fault:
            lines.append(f"not measured: {one}: {outcome.present.fault}")
        elif outcome.changed:
            ratio = outcome.kept.ratio(outcome.present.us)
            lines.append(
                f"changed: {one}: {in_words(outcome.kept.choice, outcome.present.choice)}; {ratio:.3f} of the present choice's time"
            )
    if not any(outcome.changed for _, outcome in outcomes):
        lines.append(f"no candidate wins by more than {NOISE:.0%}: the present choices are kept")
    return "\n".join([*lines, *([f"written: {path}"] if path else [])])


if __name__ == "__main__":
    # Kernels must be compiled, whoever started this.
    os.environ.pop("TRITON_INTERPRET", None)
    sys.exit(main())
