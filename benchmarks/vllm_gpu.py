"""vLLM on a GPU machine without a package index: unpack it, check kvq in it, time it against vLLM's own backends.

    python benchmarks/vllm_bundle.py                               # where there is an index: makes .bundle/
    python benchmarks/vllm_gpu.py stage .bundle/*/*.tar            # on the GPU machine, once
    python benchmarks/vllm_gpu.py check FOLDER                     # real engines against transformers; logs and models in FOLDER
    python benchmarks/vllm_gpu.py run --limit 540                  # a table, and a line of JSON for each configuration
    python benchmarks/vllm_gpu.py run --offline 8192x1024          # requests a second

kvq is this checkout's. Configurations run one after the other, each in a process of its own, which imports while the one before it uses
the GPU. ``--configs`` is a list of ``kv_cache_dtype:backend``; ``--out`` gets logs and JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import lzma
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
HOME = Path.home() / ".kvq-vllm"
CONFIGS = (
    "auto:FLASH_ATTN",
    "int4_per_token_head:CUSTOM",
    "int8_per_token_head:CUSTOM",
    "fp8_per_token_head:CUSTOM",
    "int4_per_token_head/int2:CUSTOM",
    "int4_per_token_head:TRITON_ATTN",
    "int8_per_token_head:TRITON_ATTN",
    "fp8_per_token_head:TRITON_ATTN",
)


def stage(file: Path) -> None:
    """Unpack a file of the bundle to ``HOME``."""
    site = HOME / "site"
    site.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file) as tar, tempfile.TemporaryDirectory() as scratch:
        tar.extractall(scratch, filter="data")
        wheels = sorted(map(str, Path(scratch).glob("wheels/*.whl")))
        if wheels:
            pip = (sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--upgrade", "--target")
            subprocess.run([*pip, str(site), *wheels], check=True)
        for packed in Path(scratch).glob("*.tar.xz"):
            with tarfile.open(packed) as sources:
                sources.extractall(site, filter="data")
        for packed in Path(scratch).rglob("*.so.xz"):
            extension = (site / packed.relative_to(scratch)).with_suffix("")
            extension.parent.mkdir(parents=True, exist_ok=True)
            extension.write_bytes(lzma.decompress(packed.read_bytes()))


def announce() -> list[str]:
    """Make this checkout's packages found, entry points too, without installing them; their source folders."""
    sources = []
    for file in sorted(ROOT.glob("packages/*/pyproject.toml")):
        project = tomllib.loads(file.read_text())["project"]
        folder = HOME / "kvq" / f"{project['name'].replace('-', '_')}-0.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
        groups = project.get("entry-points", {})
        lines = [f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items()) for group, points in groups.items()]
        (folder / "entry_points.txt").write_text("\n".join(lines))
        sources.append(str(file.parent / "src"))
    return [*sources, str(HOME / "kvq"), str(HOME / "site")]


def environment() -> dict[str, str]:
    """Of processes in which vLLM finds this checkout's kvq."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(announce()),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CACHE_ROOT": str(HOME / "cache"),
    }


def has_vllm() -> bool:
    """Whether those processes find vLLM. It is not imported, which takes half a minute."""
    ask = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    return subprocess.run([sys.executable, "-c", ask], env=environment(), cwd="/").returncode == 0


def run(configs: list[str], options: list[str], limit: float, out: Path) -> list[dict[str, Any]]:
    """Run the configurations, each on half of the cores; those that ``limit`` seconds leave no time for are left out."""
    started, results = time.monotonic(), []
    out.mkdir(parents=True, exist_ok=True)
    lock, cores = out / "turn", sorted(os.sched_getaffinity(0))
    halves = itertools.cycle((cores[: len(cores) // 2], cores[len(cores) // 2 :]))

    def start(config: str) -> tuple[str, subprocess.Popen[bytes]]:
        dtype, backend = config.split(":")
        command = [sys.executable, str(ROOT / "benchmarks" / "bench_vllm.py"), "--dtype", dtype, "--backend", backend]
        command += [*options, "--turn", str(lock)]
        half = next(halves)
        with log_of(config, out).open("wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment(), cwd="/", preexec_fn=lambda: os.sched_setaffinity(0, half)
            )
        return config, process

    waiting = list(configs)
    running: list[tuple[str, subprocess.Popen[bytes]]] = []
    while waiting or running:
        if time.monotonic() - started > limit:
            break
        # One on the GPU, and one that imports.
        while waiting and len(running) < 2:
            running.append(start(waiting.pop(0)))
            time.sleep(2)
        config, process = running[0]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(1.0, limit - (time.monotonic() - started)))
        if process.poll() is None:
            break
        running.pop(0)
        results.append(told(config, out))
    for config, process in running:
        process.kill()
        results.append(told(config, out))
    print(f"{time.monotonic() - started:.0f} s; not run: {', '.join(waiting) or 'none'}")
    return results


def log_of(config: str, out: Path) -> Path:
    """The log of a configuration."""
    return out / (re.sub(r"[^A-Za-z0-9_.]+", "-", config) + ".log")


def told(config: str, out: Path) -> dict[str, Any]:
    """What a configuration's log tells, printed as well: its JSON, or its runs so far and its last lines."""
    dtype, backend = config.split(":")
    lines = log_of(config, out).read_text(errors="replace").splitlines()
    found: dict[str, Any] = {"dtype": dtype, "backend": backend, "error": "cut off"}
    found["runs"] = [json.loads(line[4:]) for line in lines if line.startswith("RUN ")]
    for line in lines:
        if line.startswith("JSON "):
            found = json.loads(line[5:])
    print(json.dumps(found), flush=True)
    if "error" in found:
        print("\n".join(lines[-25:]), flush=True)
    return found


def table(results: list[dict[str, Any]]) -> str:
    """Tokens a second, each against bf16 (the first backend that has it) and against vLLM's cache of the same name."""
    rates = {(r["dtype"], r["backend"], x["batch"], x["context"]): x for r in results for x in r["runs"] if "tokens_s" in x}
    lines = ["| cache | backend | shape | ms a token | tokens/s | vs bf16 | vs vLLM's | prefill s | first token of 8192, ms |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    first = {(r["dtype"], r["backend"]): r.get("ttft_8192_ms", "") for r in results}
    for (dtype, backend, batch, context), x in rates.items():
        plain = next((y["tokens_s"] for (d, _, b, c), y in rates.items() if d == "auto" and (b, c) == (batch, context)), None)
        theirs = rates.get((dtype.partition("+")[0], "TRITON_ATTN", batch, context), {}).get("tokens_s")
        ratios = ["" if not base else f"{x['tokens_s'] / base:.2f}x" for base in (plain, theirs)]
        cells = [dtype, backend, f"{batch} x {context}", x["tpot_ms"], x["tokens_s"], *ratios, x["prefill_s"], first[dtype, backend]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    staging = commands.add_parser("stage")
    staging.add_argument("files", type=Path, nargs="+")
    running = commands.add_parser("run")
    running.add_argument("--configs", nargs="+", default=list(CONFIGS))
    running.add_argument("--shapes", default="64x8192,32x16384,8x65536", help="batch x context")
    running.add_argument("--offline", help="prompt x output tokens of many requests at once, instead of shapes")
    running.add_argument("--limit", type=float, default=540, help="seconds")
    running.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "benchmark-results")) / "vllm")
    commands.add_parser("check", help="tests/vllm/check_gpu.py, with its arguments", add_help=False)
    options, further = parser.parse_known_args()
    if further and options.command != "check":
        parser.error(f"unrecognized arguments: {' '.join(further)}")
    if options.command == "stage":
        for file in options.files:
            stage(file)
        return
    if options.command == "check":
        program = ROOT / "tests" / "vllm" / "check_gpu.py"
        raise SystemExit(subprocess.run([sys.executable, str(program), *further], env=environment()).returncode)
    if not has_vllm():
        sys.exit(
            f"Error: vllm_gpu.py run: vLLM: got none in {sys.executable} or {HOME / 'site'}, need one installed, or a bundle's:"
            " python benchmarks/vllm_gpu.py stage FILES"
        )
    out = options.out.absolute()
    asked = ["--offline", options.offline] if options.offline else ["--shapes", options.shapes]
    results = run(options.configs, asked, options.limit, out)
    if not options.offline:
        print(table(results))
    if all("error" in result for result in results):
        sys.exit("Error: vllm_gpu.py run: no configuration was measured; what each of them said stands above")


if __name__ == "__main__":
    main()
