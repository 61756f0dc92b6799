"""kvq's kernels in real vLLM engines on a GPU: ``python tests/vllm/check_gpu.py FOLDER [NAME ...]``; logs are left in ``FOLDER``.

Most checks are those of ``check_engine.py``, in float32 against transformers on the CPU, here with CUDA graphs. The others hold an engine
against itself: log-probabilities must be the same to the last bit whatever else is in a batch, and after sleep. Each check is a process of
its own, since vLLM cannot capture graphs for a second engine in one process; all run at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

DECODE: Final = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
PIECES: Final = {"mode": 3, "cudagraph_mode": "FULL_AND_PIECEWISE"}
COMPILED: Final = {"mode": 3, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""vLLM's ways to compile (0: not at all) and to capture graphs."""
LATE: Final = re.compile(r"JIT compilation during inference: (attend|write|combine_kernel|combine_reads_kernel)\b")
"""What vLLM's monitor says of a kernel of kvq's that the warm-up did not know."""
TEXTS: Final = "texts.json"
"""What ``check_engine.py`` calls them."""
TIE: Final = 0.05
"""Log-probabilities so close are a tie: quantized caches move them as far when sums change order."""


def engine_case(folder: Path, name: str, options: dict[str, Any]) -> str:
    """A case of ``check_engine.py``, with further options. Kernels round as int8 does, so int8 has to be told from int4 here."""
    from check_engine import CARRIER, CASES, check

    case = CASES[name]
    if "speculative_config" in options:
        options = options | {"speculative_config": case.options["speculative_config"] | options["speculative_config"]}
    if "additional_config" in options:
        case = replace(case, kv_cache_dtype=CARRIER)
    control = "int4" if case.control in ("int8", "none") and case.modes != "int4" else case.control
    return check(name, replace(case, options={**case.options, **options}, control=control), folder)


def batch_invariant(folder: Path, name: str, options: dict[str, Any]) -> str:
    """Each prompt alone, and all of them together, prefilled whole, in bfloat16 as models are served."""
    from check_engine import CASES, engine_of, generate, prompts

    case = CASES[name]
    room = {"dtype": "bfloat16", "enable_prefix_caching": False, "num_gpu_blocks_override": None, "max_num_batched_tokens": 4096}
    engine = engine_of(case, case.model.make(folder), **room, **options)
    together = logprobs_of(generate(engine, prompts() * 2))
    alone = [logprobs_of(generate(engine, [prompt]))[0] for prompt in prompts()]
    if together != alone * 2:
        wrong = [(n, a, t) for n, (a, t) in enumerate(zip(alone * 2, together, strict=True)) if a != t]
        raise SystemExit(f"{name}: log-probabilities depend on what else is in the batch: {wrong}")
    return f"{len(together)} texts alone and together: the same log-probabilities to the last bit"


def sleep(folder: Path, name: str, options: dict[str, Any]) -> str:
    """The same before sleep, after it, and after the sleep that forgets the weights; with smoothed keys, which are kvq's own."""
    from check_engine import CASES, calibrated, engine_of, generate, prompts

    model = CASES[name].model.make(folder)
    smoothed = {"additional_config": {"kvq": {"smoothing": str(calibrated(model)[0])}}}
    engine = engine_of(CASES[name], model, enable_sleep_mode=True, num_gpu_blocks_override=None, **smoothed, **options)
    before = logprobs_of(generate(engine, prompts()))
    for level in (1, 2):
        engine.sleep(level)
        engine.wake_up()
        if level == 2:
            engine.collective_rpc("reload_weights")
        after = logprobs_of(generate(engine, prompts()))
        if after != before:
            raise SystemExit(f"log-probabilities changed in sleep of level {level}: {before} became {after}")
    return f"{len(before)} texts before and after sleep of level 1 and 2: the same log-probabilities to the last bit"


def logprobs_of(outputs: list[Any]) -> list[list[float]]:
    from check_engine import text_of

    return [text_of(output).logprobs for output in outputs]


@dataclass(frozen=True)
class Check:
    """``run`` with a case of ``check_engine.py`` and further options of vLLM's, in a process with these settings."""

    case: str
    graphs: dict[str, str | int] | None = field(default_factory=lambda: dict(DECODE))
    settings: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    run: Callable[[Path, str, dict[str, Any]], str] = engine_case

    def __call__(self, folder: Path) -> str:
        graphs = {} if self.graphs is None else {"compilation_config": self.graphs}
        return self.run(folder, self.case, self.options | graphs)


SMOOTHED: Final = "smoothed keys"
BIASED: Final = "key biases"
NORMS: Final = "norms of queries and keys"
WINDOWS: Final = {"num_gpu_blocks_override": 64, "additional_config": {"kvq": {"mode": "int4"}}}
"""Windows have pages of their own, which take more of them. vLLM 0.26 counts those of ``int4_per_token_head`` as large as int8's, and then
fails: int4 has to be in pages of int8's name there."""
DRAFTS: Final = {"speculative_config": {"method": "ngram_gpu"}}
"""Proposed by what needs no further package, and has to be compiled."""
V1: Final = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
CHECKS: Final[dict[str, Check]] = {
    **{name: Check(name) for name in ("none", "int8", "fp8", "int4", "int2", SMOOTHED, BIASED, NORMS)},
    "a skipped layer": Check("a skipped layer", options={"num_gpu_blocks_override": 9}),  # of 64 tokens, to hold as many bytes as float32's
    "int3": Check("int3"),
    "int4, no graphs": Check("int4", graphs=None),
    **{f"{name}, runner V1": Check(name, settings=V1) for name in ("int8", "int4", SMOOTHED)},
    **{f"{name}, graphs in pieces": Check(name, PIECES) for name in ("int8", "int4", BIASED, NORMS)},
    "int4, graphs in pieces, runner V1": Check("int4", PIECES, V1),
    "residual window": Check("residual window"),
    "residual window and sinks": Check("residual window and sinks"),
    "residual window and sinks, graphs in pieces": Check("residual window and sinks, in chunks", PIECES),
    "residual window and sinks, runner V1": Check("residual window and sinks", settings=V1),
    "ALiBi": Check("ALiBi"),
    "windows": Check("windows", options={"num_gpu_blocks_override": 64}),
    **{name: Check(name, options=WINDOWS) for name in ("softcap", "sinks")},
    **{name: Check(name, COMPILED, options=DRAFTS) for name in ("1 draft", "3 drafts", "7 drafts")},
    **{
        f"{name}, batch invariant": Check(name, settings={"VLLM_BATCH_INVARIANT": "1"}, run=batch_invariant)
        for name in ("int8", "int4", "int2")
    },
    "sleep": Check(SMOOTHED, run=sleep),
}
RANKS: Final[dict[str, Check]] = {
    f"{name}, {ranks} rank{'s' * (ranks > 1)}": Check(name, options={"tensor_parallel_size": ranks, "disable_custom_all_reduce": True})
    for name in (SMOOTHED, "int8", "fp8")
    for ranks in (1, 2)
}
"""For two GPUs. ``fp8`` has fewer kv heads than there are ranks."""


SERVER: Final = "server, over HTTP"
"""``check_server.py``."""


def place_of(folder: Path, name: str) -> Path:
    """Where a check leaves its files."""
    return folder / re.sub(r"[^A-Za-z0-9]+", "-", name)


def same_tokens(folder: Path, names: list[str]) -> bool:
    """Print how many texts of two ranks have the tokens of one rank's, for the checks that ran as both.

    Ranks add in another order, so a text may part where two tokens are equally likely: it must have none but such tokens. The check
    itself has held the log-probabilities of both against the reference.
    """
    same = True
    for name in names:
        alone = name.replace("2 ranks", "1 rank")
        if name == alone or alone not in names:
            continue
        one, two = (json.loads((place_of(folder, each) / TEXTS).read_text()) for each in (alone, name))
        parted = [n for n, (a, b) in enumerate(zip(one, two, strict=True)) if a["tokens"] != b["tokens"]]
        print(f"--- {name}: {len(one) - len(parted)} of {len(one)} texts have the tokens of one rank")
        for n in parted:
            at = next(i for i, (a, b) in enumerate(zip(one[n]["tokens"], two[n]["tokens"], strict=True)) if a != b)
            gap = abs(one[n]["logprobs"][at] - two[n]["logprobs"][at])
            print(f"    text {n} parts at token {at}, log-probabilities {gap:.1e} apart")
            same &= gap <= TIE
    return same


def run_all(names: list[str], folder: Path, limit: float) -> bool:
    """Run the checks side by side, print what they say, and tell whether all passed."""
    folder.mkdir(parents=True, exist_ok=True)
    cores = sorted(os.sched_getaffinity(0))
    share = max(2, len(cores) // len(names))
    running: list[tuple[str, Path, subprocess.Popen[bytes]]] = []
    for name in names:
        place = place_of(folder, name)
        program = (
            [str(Path(__file__).with_name("check_server.py")), str(place)] if name == SERVER else [__file__, "--one", str(place), name]
        )
        settings = (CHECKS | RANKS)[name].settings if name != SERVER else {}
        log = place.with_suffix(".log")
        with log.open("wb") as file:
            process = subprocess.Popen([sys.executable, *program], stdout=file, stderr=file, env=os.environ | settings, cwd="/")
        # Each has its share of the cores, and compiles its kernels in as many processes.
        first = share * len(running) % len(cores)
        os.sched_setaffinity(process.pid, set(cores[first : first + share]))
        running.append((name, log, process))
    deadline, passed = time.monotonic() + limit, True
    for name, log, process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(1.0, deadline - time.monotonic()))
        process.kill()
        code, lines = process.wait(), log.read_text(errors="replace").splitlines()
        fine = code == 0 and not any(map(LATE.search, lines))
        said = [line for line in lines if line.startswith("CHECK ") or "jit_monitor" in line]
        print(f"--- {name}: {'passed' if fine else 'FAILED'}", *said, *([] if fine else lines[-25:]), sep="\n", flush=True)
        passed &= fine
    return passed and same_tokens(folder, names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help=f"of {'; '.join((*CHECKS, SERVER, *RANKS))}")
    parser.add_argument("--ranks", action="store_true", help="those of two GPUs")
    parser.add_argument("--limit", type=float, default=540, help="seconds")
    parser.add_argument("--one", action="store_true", help="in this process")
    asked = parser.parse_intermixed_args()
    if asked.one:
        print(f"CHECK {(CHECKS | RANKS)[asked.names[0]](asked.folder)}", flush=True)
        return
    names = asked.names or (list(RANKS) if asked.ranks else [*CHECKS, SERVER])
    if unknown := sorted({*names} - {*CHECKS, *RANKS, SERVER}):
        parser.error(f"names: got {', '.join(map(repr, unknown))}, need some of {', '.join(map(repr, (*CHECKS, SERVER, *RANKS)))}")
    raise SystemExit(0 if run_all(names, asked.folder, asked.limit) else 1)


if __name__ == "__main__":
    main()
