"""Every kernel under NVIDIA's compute-sanitizer, and delayed: ``python -m kvq_core.testing.sanitize [MODE ...] [--tool TOOL]``.

For each tool and mode a process runs a slice of small problems (:mod:`kvq_core.testing.sanitizer_slice`) under the tool, with torch's
caching allocator off, so that every tensor ends where its memory does. ``memcheck`` finds accesses outside an allocation, ``racecheck``
hazards in shared memory, ``initcheck`` reads of memory that nothing has written. The kernels are compiled before, by a run without a tool,
which must give the right results, too.

``delays`` is no tool of NVIDIA's: warps sleep at random around their synchronization (:mod:`kvq_core.testing.delays`), drawn again for each
of ``--seeds``, and results must have the bits of the run without. It is for what ``racecheck`` does not track: asynchronous products and
copies.

Prints errors by tool, mode and kernel. Exit status: 0 clean, 1 errors or a slice that failed, 2 nothing could be run (and why).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tabulate import tabulate
from tqdm import tqdm

from kvq_core.environment import cuda_tool
from kvq_core.testing.sanitizer_slice import REPORT

TOOLS = ("memcheck", "racecheck", "initcheck")
DELAYS = "delays"
FOUND = 86
"""Exit status of a slice in which the tool found errors."""
ELSEWHERE = "(elsewhere)"
"""Where errors are counted that the tool names no kernel for."""

_THREADS = "2"  # of torch, on the CPU
_LIMIT = 540  # seconds a slice may take under a tool
_WORDS = 20  # kinds of errors of a slice that are shown
_HEAD = re.compile(r"^=+ (?:Error: |Warning: )?(?:Invalid|Uninitialized|Misaligned|Race|Potential|Barrier|Address|Out-of-range|Stack)\b")
_KERNEL = re.compile(r"\b(?:at|in) (?:0x[0-9a-f]+ in )?(?P<name>[A-Za-z_]\w*)(?=\+0x|\(|:|\s*$)")
_SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (?P<count>\d+)")


@dataclass(frozen=True)
class Outcome:
    """One slice: ``launches`` and ``errors`` by kernel, the tool's first words on each kind, and a digest of the results; ``trouble`` says
    what kept it from being judged."""

    tool: str
    mode: str
    launches: dict[str, int]
    errors: dict[str, int]
    words: tuple[str, ...] = ()
    trouble: str = ""
    results: str = ""
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        return not self.trouble and not any(self.errors.values())


def errors_of(said: str) -> tuple[dict[str, int], bool]:
    """(errors by kernel in what a tool said, whether it said how many there are)."""
    counts: Counter[str] = Counter()
    lines = said.splitlines()
    for at, line in enumerate(lines):
        if _HEAD.match(line):
            # The kernel is in the same line or in the next one.
            named = next((m["name"] for m in map(_KERNEL.search, lines[at : at + 2]) if m), ELSEWHERE)
            counts[named] += 1
    totals = [int(m["count"]) for m in map(_SUMMARY.match, lines) if m]
    if sum(totals) > counts.total():
        counts[ELSEWHERE] += sum(totals) - counts.total()
    return dict(counts), bool(totals)


def words_of(said: str) -> tuple[str, ...]:
    """Each kind of error that a tool speaks of, with the line that follows, once."""
    lines = [line.strip("= ") for line in said.splitlines()]
    heads = [at for at, line in enumerate(said.splitlines()) if _HEAD.match(line)]
    return tuple(dict.fromkeys("; ".join(lines[at : at + 2]) for at in heads))


def judge(tool: str, mode: str, status: int, said: str) -> Outcome:
    """The outcome of a slice that ended with ``status`` (None: at its limit) and said ``said``."""
    errors, counted = errors_of(said)
    report = next((json.loads(line[len(REPORT) :]) for line in said.splitlines() if line.startswith(REPORT)), None)
    trouble = ""
    if report is None or status not in (0, FOUND):
        trouble = f"the slice ended with status {status}: {said.strip()[-1500:] or 'it said nothing'}"
    elif tool in TOOLS and not counted:
        trouble = f"{tool} gave no summary: {said.strip()[-1500:]}"
    elif status == FOUND and not any(errors.values()):
        errors = {ELSEWHERE: 1}
    report = report or {"launches": {}, "results": ""}
    return Outcome(tool, mode, report["launches"], errors, words_of(said), trouble, report["results"])


def run_slice(tool: str, mode: str, sanitizer: str = "") -> Outcome:
    """Run the slice of ``mode`` under ``tool`` ("": without one; "delays SEED")."""
    command = [sys.executable, "-m", "kvq_core.testing.sanitizer_slice", mode]
    if tool.startswith(DELAYS):
        command += ["--delays", tool.removeprefix(DELAYS).strip()]
    elif tool:
        command.append("--short")
        options = ["--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "application-only", "--print-limit", "1000"]
        options += ["--report-api-errors", "no"] if tool == "memcheck" else []
        command = [sanitizer, *options, *command]
    environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "KVQ_DEBUG")}
    environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    # Of torch's thousands of kernels only those that run are loaded, and patched by the tool.
    environment["CUDA_MODULE_LOADING"] = "LAZY"
    # Slices run side by side, and each would take every core for its small references.
    environment.setdefault("OMP_NUM_THREADS", _THREADS)
    begin = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment, timeout=_LIMIT)
    except subprocess.TimeoutExpired as late:
        # Bytes, though text was asked for (cpython issue 87597).
        said = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else late.stdout or ""
        return Outcome(tool, mode, {}, {}, (), f"not done after {_LIMIT} s: {said.strip()[-500:] or 'it said nothing'}", seconds=_LIMIT)
    return replace(judge(tool, mode, done.returncode, done.stdout + done.stderr), seconds=time.monotonic() - begin)


def compare(tool: str, mode: str, sanitizer: str, undisturbed: Outcome) -> Outcome:
    """Run the slice of ``mode`` under ``tool``. Delayed, its results must be bit for bit those of the slice that nothing disturbed."""
    found = run_slice(tool, mode, sanitizer)
    if found.trouble or not tool.startswith(DELAYS) or found.results == undisturbed.results:
        return found
    return replace(found, errors={ELSEWHERE: 1}, words=("results depend on the timing of warps",))


def outcomes(tools: list[str], modes: list[str], sanitizer: str, jobs: int) -> Iterator[Outcome]:
    """First every mode without a tool, then, for those that ran, every tool. A line for each when it is done."""
    with ThreadPoolExecutor(jobs) as pool, tqdm(total=len(modes) * (1 + len(tools)), unit=" slices", disable=None) as bar:

        def told(pending: list[Future[Outcome]]) -> Iterator[Outcome]:
            for done in as_completed(pending):
                bar.update()
                bar.write(in_words(done.result()))
                sys.stdout.flush()
                yield done.result()

        undisturbed = {}
        for outcome in told([pool.submit(run_slice, "", mode) for mode in modes]):
            if outcome.trouble:
                yield outcome
            else:
                undisturbed[outcome.mode] = outcome
        yield from told([pool.submit(compare, tool, mode, sanitizer, undisturbed[mode]) for mode in undisturbed for tool in tools])


def in_words(one: Outcome) -> str:
    """An outcome in a line, and what runs it alone if it is not clean."""
    again = f"; again: python -m kvq_core.testing.sanitize {one.mode}" + (f" --tool {one.tool}" if one.tool else "")
    # Seeds are counted from 0.
    again = re.sub(rf"{DELAYS} (\d+)$", lambda m: f"{DELAYS} --seeds {int(m[1]) + 1}", again)
    launches, errors = sum(one.launches.values()), sum(one.errors.values())
    verdict = "not judged" if one.trouble else f"{launches} launches, {errors} errors"
    return f"{one.tool or 'without a tool'}, {one.mode}: {verdict}, {one.seconds:.0f} s{'' if one.clean else again}"


def table(judged: list[Outcome]) -> str:
    """Tool x mode x kernel -> launches and errors."""
    rows = []
    for one in sorted(judged, key=lambda o: (o.tool, o.mode)):
        kernels = dict.fromkeys((*one.launches, *one.errors))
        rows += [[one.tool or "none", one.mode, name, one.launches.get(name, ""), one.errors.get(name, 0)] for name in kernels]
        if one.trouble:
            rows.append([one.tool or "none", one.mode, "", "", "not judged"])
    return tabulate(rows, ["tool", "mode", "kernel", "launches", "errors"])


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m kvq_core.testing.sanitize", description="Run every kernel under compute-sanitizer, and delayed."
    )
    parser.add_argument("modes", nargs="*", metavar="MODE", help="default: all that are installed")
    parser.add_argument("--tool", choices=(*TOOLS, DELAYS, "all"), default="all")
    parser.add_argument("--seeds", type=int, default=4, metavar="N", help="of delays (default: 4)")
    parser.add_argument("--jobs", type=int, default=6, metavar="N", help="slices at a time (default: 6)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="a file for the outcomes, one by one")
    chosen = parser.parse_args(argv)
    import torch

    from kvq_core.registry import get_backend, list_backends

    tools = [f"{DELAYS} {seed}" for seed in range(max(1, chosen.seeds))] if chosen.tool in (DELAYS, "all") else []
    tools += TOOLS if chosen.tool == "all" else [chosen.tool] * (chosen.tool != DELAYS)
    sanitizer = cuda_tool("compute-sanitizer")
    if sanitizer is None and chosen.tool != DELAYS:
        need = "need compute-sanitizer, which comes with NVIDIA's CUDA toolkit: put it in PATH, or set CUDA_HOME"
        print(f"no compute-sanitizer in PATH, CUDA_HOME/bin, CUDA_PATH/bin or /usr/local/cuda/bin: {need}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available() or torch.version.hip is not None:
        print("torch sees no NVIDIA GPU here: need one to run kernels on", file=sys.stderr)
        return 2
    started = time.monotonic()
    modes = list(dict.fromkeys(get_backend(name).mode for name in chosen.modes or [found.mode for found in list_backends()]))
    judged: list[Outcome] = []
    for outcome in outcomes(tools, modes, sanitizer or "", max(1, chosen.jobs)):
        judged.append(outcome)
        if chosen.json is not None:
            chosen.json.write_text(json.dumps([asdict(one) for one in judged], indent=1) + "\n", encoding="utf-8")
    print(table(judged))
    for one in judged:
        for words in one.words[:_WORDS]:
            print(f"{one.tool}, {one.mode}: {words}")
    for one in judged:
        if one.trouble:
            print(f"\n{one.tool or 'without a tool'}, {one.mode}: {one.trouble}", file=sys.stderr)
    errors = sum(sum(one.errors.values()) for one in judged)
    launches = sum(sum(one.launches.values()) for one in judged)
    failed = sum(not one.clean for one in judged)
    print(f"{len(judged)} slices, {launches} launches: {errors} errors, {failed} slices not clean, {time.monotonic() - started:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
