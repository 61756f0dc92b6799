"""The whole table, from one command: ``python benchmarks/run.py``.

Decode, prefill and write of every installed mode, in the same run as ``none``, FlashAttention 3's kernels (those of an installed vLLM),
FlashInfer's and TurboMind's (an installed lmdeploy's, also over 8 and 4 bits). Nothing is timed before every mode has passed the
correctness gate. Prints the tables; writes ``benchmarks.json``, setting by setting, so that a run that is cut off leaves what it has, and
``benchmarks.png``.

Exit status: 0; 1 if a row ended in an error; 2 for a machine without CUDA or a wrong command line; 3 if the gate is red.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import checkout

checkout.use()

import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

import bench_decode  # noqa: E402
import bench_prefill  # noqa: E402
import bench_write  # noqa: E402
import flashinfer_kernels  # noqa: E402
import gate  # noqa: E402
import modes  # noqa: E402
import peers  # noqa: E402
import precompile  # noqa: E402
import report  # noqa: E402
import shapes  # noqa: E402
from kvq_core import KVQError, QuantKVBackend  # noqa: E402
from kvq_core.environment import installed, nvidia_driver, source_version  # noqa: E402
from kvq_core.errors import ArgumentError  # noqa: E402
from kvq_core.launch.offline import Device  # noqa: E402
from rows import DeviceLostError, Row  # noqa: E402
from timing import Timer  # noqa: E402

OK, ROW_ERROR, CANNOT_RUN, GATE_RED = 0, 1, 2, 3
_RUN: dict[str, Callable[..., Iterator[Row]]] = {"decode": bench_decode.run, "prefill": bench_prefill.run, "write": bench_write.run}
Plan = tuple[tuple[str, tuple[shapes.Setting, ...]], ...]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only decode in settings A, B and C; not beside --settings")
    parser.add_argument("--modes", nargs="+", metavar="MODE", help="only these (with commas or spaces); none is always among them")
    parser.add_argument("--settings", metavar="A,B,...", help="only these, or all of decode, prefill, write or more; see shapes.py")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"), metavar="DIR", help="for the JSON and the PNG")
    parser.add_argument("--compare", type=Path, metavar="OLD.json", help="show the difference to an earlier run")
    parser.add_argument("--no-peers", action="store_true", help="leave others' kernels and the plain copy out")
    parser.add_argument("--name", default="run.py", help=argparse.SUPPRESS)  # the command that errors are of
    return parser.parse_args(argv)


def plan_of(options: argparse.Namespace) -> Plan:
    if options.settings is not None:
        if options.quick:
            raise ArgumentError("--quick", f"--settings {options.settings} beside it", "one or the other")
        return shapes.chosen([name.strip() for name in options.settings.split(",") if name.strip()])
    return shapes.QUICK if options.quick else shapes.DEFAULT


def machine(device: torch.device, timer: Timer) -> dict[str, Any]:
    """What the figures were measured on and with; ``hbm`` in bytes a second, a pure read's, is what 100 % means."""
    return {
        "gpu": torch.cuda.get_device_name(device),
        "driver": nvidia_driver() or "unknown",
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "triton": installed("triton"),
        "flashinfer": installed("flashinfer-python"),
        "lmdeploy": installed("lmdeploy"),
        "commit": source_version(checkout.ROOT),
        "hbm": timer.read_bandwidth(),
        "floor_us": timer.floor(),
    }


def header(facts: dict[str, Any]) -> str:
    """The facts, and how to read the figures."""
    named = ("driver", "python", "torch", "triton", "flashinfer", "lmdeploy", "commit")
    versions = ", ".join(f"{name} {facts[name] or 'not installed'}" for name in named)
    return "\n".join(
        (
            f"{facts['gpu']}: {versions}",
            f"100 % HBM = {facts['hbm'] / 1e12:.2f} TB/s, a pure read measured here",
            f"us: median CUDA-graph replay, cold cache, {facts['floor_us']:.1f} us of it the replay of an empty kernel; "
            "host us: one eager call of the door",
        )
    )


def compile_kernels(jobs: Sequence[precompile.Job], flashinfer: Sequence[shapes.Setting], bar: tqdm[Any]) -> None:
    """All kernels that the gate and the rows need, at once, and FlashInfer's for ``flashinfer``. What does not compile shows there."""
    bar.reset(total=len(jobs))
    bar.set_description("compiling")
    builder = multiprocessing.get_context("spawn").Process(target=flashinfer_kernels.build, args=(flashinfer, torch.cuda.current_device()))
    if flashinfer:
        builder.start()
    for _ in precompile.compile_all(jobs):
        bar.update()
    if flashinfer:
        builder.join()


def gate_is_green(checks: Sequence[gate.Check], device: torch.device, bar: tqdm[Any]) -> bool:
    """Check every mode; print each fault and one line in the end."""
    bar.reset(total=len(checks))
    verdicts = []
    for verdict in gate.check_all(checks, device):
        bar.set_description(f"gate, {verdict.mode}")
        bar.update()
        verdicts.append(verdict)
    red = [v for v in verdicts if not v.green]
    for v in red:
        bar.write(f"RED  {v.mode}, {v.problem}: {v.fault}")
    worst = max((v.read_error for v in verdicts if v.green), default=0.0)
    if red:
        bar.write(f"correctness gate: {len(red)} of {len(verdicts)} checks are red; no speed is reported", file=sys.stderr)
    else:
        bar.write(f"correctness gate: green, {len(verdicts)} checks, worst relative error of a read {worst:.1e}\n")
    return not red


def measure(
    backends: Sequence[QuantKVBackend], plan: Plan, timer: Timer, *, with_peers: bool, bar: tqdm[Any], keep: Callable[[Sequence[Row]], None]
) -> list[Row]:
    """Every row of the plan, or those up to a fault that loses the device; ``keep`` gets all that there are after each setting."""
    every = [(op, setting) for op, settings in plan for setting in settings]
    bar.reset(total=len(every) * len(backends) + (sum(len(peers.beside(*one)) for one in every) if with_peers else 0))
    found: list[Row] = []
    for op, setting in every:
        try:
            for row in _RUN[op](backends, (setting,), timer, with_peers=with_peers):
                bar.set_description(f"{op} {row.setting}, {row.mode}")
                bar.update()
                found.append(row)
        except DeviceLostError as lost:
            found.append(lost.row)
            fault = f"{op} {lost.row.setting}, {lost.row.mode}: {lost}"
            bar.write(f"{fault}; no kernel runs on this device any more, what was to follow is left out", file=sys.stderr)
            break
        finally:
            keep(found)
    return found


def write_json(facts: dict[str, Any], rows: Sequence[Row], path: Path) -> None:
    """The facts and the rows; what is there already stays whole until the new file is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".part")
    fresh.write_text(json.dumps(report.as_json(facts, rows, facts["hbm"]), indent=1) + "\n")
    fresh.replace(path)


def show(plan: Plan, facts: dict[str, Any], rows: Sequence[Row], out: Path) -> None:
    """Print the tables, write the PNG."""
    lines = report.lines(rows, facts["hbm"])
    for op, settings in plan:
        if not any(row.op == op for row in rows):
            continue
        print(f"{op}\n" + "\n".join(f"  {setting}" for setting in settings) + f"\n\n{report.table(op, lines)}\n")
    written = [str(out / "benchmarks.json")]
    try:
        report.plot(lines, f"kvq {facts['commit']} on {facts['gpu']}", out / "benchmarks.png")
        written.append(str(out / "benchmarks.png"))
    except ImportError:
        print("no plot: matplotlib is not installed", file=sys.stderr)
    print(f"written: {', '.join(written)}")


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    try:
        plan = plan_of(options)
        # The widest first, as the tables of the documentation have them.
        backends = sorted(modes.backends_of(options.modes, "none"), key=lambda backend: -shapes.stored_bytes(backend, 128))
        old = report.load(options.compare) if options.compare else None
    except (ValueError, KVQError) as error:
        print(f"Error: {options.name}: {error}", file=sys.stderr)
        return CANNOT_RUN
    if not torch.cuda.is_available():
        print(f"Error: {options.name}: the benchmarks time kernels on a CUDA GPU, and torch sees none on this machine", file=sys.stderr)
        return CANNOT_RUN
    begin = time.perf_counter()
    device = torch.device("cuda", torch.cuda.current_device())
    timer = Timer(device)
    facts = machine(device, timer)
    print(header(facts), flush=True)
    with tqdm(total=0, file=sys.stderr, disable=not sys.stderr.isatty(), leave=False) as bar, torch.no_grad():
        settings = [setting for _, of_one in plan for setting in of_one]
        here = Device.current() if device.type == "cuda" else None
        checks = gate.checks_of(backends, settings, here)
        if here is not None:
            jobs = [precompile.Job(backend.mode, (setting,), (), here) for backend in backends for setting in settings]
            flashinfer = [] if options.no_peers else [setting for setting in settings if flashinfer_kernels.serves(setting)]
            compile_kernels([*jobs, *gate.jobs_of(checks, here)], flashinfer, bar)
            bar.write(f"compiled in {time.perf_counter() - begin:.0f} s")
        if not gate_is_green(checks, device, bar):
            return GATE_RED

        def keep(rows: Sequence[Row]) -> None:
            facts["seconds"] = round(time.perf_counter() - begin, 1)
            write_json(facts, rows, options.out / "benchmarks.json")

        rows = measure(backends, plan, timer, with_peers=not options.no_peers, bar=bar, keep=keep)
    show(plan, facts, rows, options.out)
    if old is not None:
        print("\n" + report.changes_table(old, facts, report.compare(old, rows)))
    print(f"{facts['seconds']:.0f} s")
    return ROW_ERROR if any(row.error for row in rows) else OK


if __name__ == "__main__":
    sys.exit(main())
