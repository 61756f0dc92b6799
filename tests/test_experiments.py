"""The experiments build, so that what the performance notes say of them can be run again."""

import os
import subprocess
import sys
from pathlib import Path

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    # As on a machine without a GPU, and where kernels are compiled.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(EXPERIMENTS / "prefill_by_groups.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)


def test_kernels_of_warp_groups_build() -> None:
    done = run("--compile", "none", "int4", "fp8")
    assert done.returncode == 0, done.stderr
    built = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [mode for mode, *_ in built] == ["none", "int4_per_token_head", "fp8_per_token_head"]
    for _, registers, spilled, _, products, shared in built:
        # Three groups of 128 threads, 65,536 registers; some bytes of a stack are not spills of the loops.
        assert int(registers) * 384 <= 65536 and int(spilled) <= 64
        assert int(products) >= 64 and int(shared) <= 227 * 1024


def test_without_a_gpu_it_says_what_it_needs() -> None:
    done = run("none")
    assert done.returncode == 2 and done.stderr.startswith("need a GPU of compute capability 9.0") and not done.stdout
    done = run("--compile", "int5")
    assert done.returncode == 2 and "int5" in done.stderr and "Traceback" not in done.stderr
