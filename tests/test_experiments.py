"""The experiments build, so that what the performance notes say of them can be run again."""

import os
import subprocess
import sys
from pathlib import Path

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
PREFILL = "prefill_by_groups.py"


WITH_A_WINDOW = """
import prefill_by_groups as experiment
from kvq_core.offline import compiling_for
problems, backend, setting = experiment.problems, experiment.get_backend("none"), experiment.shapes.PREFILL[0]
caches = problems.pages(backend, setting, experiment.precompile.META)
table = problems.block_table(setting, experiment.precompile.META)
with compiling_for(experiment.ASSUMED), experiment.by_groups():
    backend.unified_attention(**problems.attention_arguments(setting, caches, table) | {"window_size": (99, 0)})
"""


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python, as on a machine without a GPU, and where kernels are compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", **variables}
    return subprocess.run([sys.executable, *arguments], cwd=EXPERIMENTS, capture_output=True, text=True, env=environment, timeout=600)


def test_kernels_of_warp_groups_build() -> None:
    done = run(PREFILL, "--compile", "none", "int4", "fp8")
    assert done.returncode == 0, done.stderr
    built = [line.split() for line in done.stdout.splitlines()[2:]]
    assert [mode for mode, *_ in built] == ["none", "int4_per_token_head", "fp8_per_token_head"]
    for _, registers, stack, _, products, shared in built:
        # Three groups of 128 threads, 65,536 registers; a loop that spills takes hundreds of bytes.
        assert int(registers) * 384 <= 65536 and int(stack) <= 64
        assert int(products) >= 64 and int(shared) <= 227 * 1024


def test_they_refuse_what_they_do_not_do() -> None:
    done = run("-c", WITH_A_WINDOW)
    assert done.returncode != 0 and "no window" in done.stderr


def test_what_cannot_be_run_says_what_it_needs() -> None:
    for done, need in (
        (run(PREFILL, "none"), "need a GPU of compute capability 9.0"),
        (run(PREFILL, "--compile", TRITON_INTERPRET="1"), "TRITON_INTERPRET=1 is set"),
        (run(PREFILL, "--compile", "int5"), "no installed package provides mode 'int5'"),
    ):
        assert done.returncode == 2 and done.stderr.startswith(need) and not done.stdout
