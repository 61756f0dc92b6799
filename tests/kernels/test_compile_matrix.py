"""Every kernel builds for every GPU, within that GPU's shared memory, and costs no more there than the golden counts say.

Each target in a process of its own: this one interprets. By default every mode is built for one target, and others build some of the
modes; ``-m matrix`` builds the other targets, modes and tiles, which takes minutes. CI builds some modes for every target, so that each
mode is built for another NVIDIA target, too.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

import odd_heads
from kvq_core import get_backend
from kvq_core.launch.replay import triton_is_known
from kvq_core.plan import lookup
from kvq_core.plan.lookup import SWITCH
from kvq_core.testing.compile_matrix import CUDA_TARGETS, ORDERED, TARGETS, further_reads
from kvq_core.testing.golden_counts import GoldenCounts
from kvq_core.testing.table_choices import Problem

MODES = (
    "none",
    "int8_per_token_head",
    "fp8_per_token_head",
    "fp8_per_tensor",
    "int4_per_token_head",
    "int3_per_token_head",
    "int2_per_token_head",
)
KERNELS = {("decode", "write"), ("decode", "attend"), ("decode", "combine_kernel"), ("prefill", "attend")}
PLANNED = ("sm_90", "sm_100")
"""Targets that kvq ships a table of launch plans for: each tile there that can be chosen is built (``-m matrix``)."""
LIKE_ANOTHER = "gfx950"
"""A target with gfx942's instructions and more shared memory: no more modes are built for it than by default."""
LIKE_AMPERE = ("sm_86", "sm_89")
"""Targets with sm_80's instructions that take long to build for, for which nothing is built by default."""

GOLDEN = Path(__file__).parents[1] / "data" / "golden_counts.json"
MEASURE = ["-m", "kvq_core.testing.compile_matrix"]
WHOLE = "sm_90"
"""The target that every mode is always built for."""


def some_modes(target: str) -> tuple[str, ...]:
    """The modes that ``target`` is built for first: a fifth of them; AMD's, which take longest, two in all.

    Targets take turns in the order of their shared memory, so that each mode is built where there is least of it.
    """
    if target == WHOLE:
        return MODES
    peers = [name for name in TARGETS if name != WHOLE and TARGETS[name].backend == TARGETS[target].backend]
    peers.sort(key=lambda name: TARGETS[name].shared_limit)
    turns = len(peers) if target in CUDA_TARGETS else len(MODES)
    return MODES[peers.index(target) % turns :: turns]


@pytest.fixture(autouse=True)
def plans_are_kvq_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "")
    monkeypatch.setattr(lookup, "_TABLES", lookup._Tables())


@pytest.mark.parametrize("target", [pytest.param(name, marks=pytest.mark.matrix) if name in LIKE_AMPERE else name for name in TARGETS])
def test_every_kernel_builds(target: str) -> None:
    build(target, some_modes(target))


@pytest.mark.matrix
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("target", PLANNED)
def test_every_tile_of_the_tables_builds(target: str, mode: str) -> None:
    build(target, (mode,), further=True)


@pytest.mark.matrix
@pytest.mark.parametrize("target", [target for target in TARGETS if target not in (WHOLE, LIKE_ANOTHER)])
def test_every_kernel_of_the_other_modes_builds(target: str) -> None:
    build(target, tuple(mode for mode in MODES if mode not in some_modes(target)))


def test_rows_are_copied_by_wide_loads() -> None:
    """Of rows that do not start at multiples of 32 bytes, too: Triton by itself would load each lane alone, and wait for it."""
    for read, loads in json.loads(compiled(odd_heads.__file__, "--loads")).items():
        assert not {kind for kind in loads if kind.endswith(("b8", "b16"))}, (read, loads)
        assert sum(count for kind, count in loads.items() if kind.startswith("cp.async")) >= 16, (read, loads)
        if "interleaved" in read:
            assert loads["cp.async 8"] >= 16, f"keys' rows are better aligned than values', which follow the keys' scales: {loads}"


def compiled(*command: str) -> str:
    """What a process prints that compiles kernels."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(target: str, modes: tuple[str, ...], *, further: bool = False) -> None:
    """Build the kernels of ``modes`` for ``target``, those of the cases or the further tiles that a table can choose, and look at them."""
    said = compiled(*MEASURE, *modes, "--target", target, "--json", *(("--no-cases", "--every-tile") if further else ("--no-every-tile",)))
    built = [json.loads(line) for line in said.splitlines()]
    for mode in modes:
        # No tensor core multiplies float32 in full precision.
        reads = reads_of_tables(mode, target) if further else {}
        in_float32 = {name for name, problem in reads.items() if problem.made.case.dtype == torch.float32}
        of_mode = [one for one in built if one["mode"] == mode]
        assert {(one["case"], one["kernel"]) for one in of_mode} == (further_kernels(mode, target) if further else kernels_of_cases(mode))
        for one in of_mode:
            assert one["target"] == target and one["registers"] > 0 and one["instructions"] > 50, one
            assert one["shared"] <= TARGETS[target].shared_limit, f"cannot be launched: {one}"
            if target.startswith("sm_") and one["kernel"] == "attend" and one["case"] not in in_float32:
                assert one["products"] > 0, f"no tensor-core products: {one}"
                assert one["hot"]["keys"] > 1, f"no pipelined loop: {one}"
            assert one["kernel"] != "write" or one["spilled"] == 0, one
            assert one["merged_exponents"] == 0, f"huge scores lose their maximum: {one}"
            assert one["unordered_arrivals"] == 0, f"a thread speaks for others that are not done: {one}"
            assert one["reused_mbarriers"] == 0, f"something else lies where an mbarrier is: {one}"
    # Here, since compiling is what takes time.
    if target in CUDA_TARGETS:
        compare_with_golden(target, built, modes, further=further)


def kernels_of_cases(mode: str) -> set[tuple[str, str]]:
    """The cases and kernels that are built for every target."""
    ordered = {(case, kernel) for case in ORDERED for kernel in ("write", "attend", "combine_kernel")}
    return KERNELS | (ordered if get_backend(mode).order_multiple else set())


@functools.cache
def reads_of_tables(mode: str, target: str) -> dict[str, Problem]:
    """The further reads that are built for every tile of ``target``'s table."""
    return further_reads(get_backend(mode), TARGETS[target].device(target)) if target in PLANNED else {}


def further_kernels(mode: str, target: str) -> set[tuple[str, str]]:
    """The cases and kernels that are built for every tile of ``target``'s table, beside :data:`KERNELS`."""
    writes = {("few", "write"), ("many", "write")} if target in PLANNED else set()
    reads = reads_of_tables(mode, target)
    staged = {(read, "stage_kernel") for read in reads if "staged" in read}
    return {(read, "attend") for read in reads} | staged | writes


def compare_with_golden(target: str, built: list[dict[str, Any]], modes: tuple[str, ...], *, further: bool = False) -> None:
    golden, cases = GoldenCounts.read(GOLDEN).for_target(target), {*(case for case, _ in KERNELS), *ORDERED}
    named = {kernel: kernel.split() for kernel in golden.kernels}
    chosen = {kernel for kernel, (mode, _, case, _) in named.items() if mode in modes and (case in cases) != further}
    golden = GoldenCounts(golden.triton, {kernel: golden.kernels[kernel] for kernel in chosen})
    if golden.triton != triton.__version__:
        pytest.skip(f"all kernels build; not compared: the golden counts are of Triton {golden.triton}, this is {triton.__version__}")
    worse = "\n".join(golden.regressions(GoldenCounts.of(built, triton.__version__)))
    again = f"python {' '.join([*MEASURE, *MODES])} --golden {GOLDEN.relative_to(Path(__file__).parents[2])}"
    assert not worse, f"{worse}\nIf that is meant: {again}"


def test_the_golden_counts_cover_every_kernel() -> None:
    wanted = {
        f"{mode} {target} {case} {kernel}"
        for mode in MODES
        for target in CUDA_TARGETS
        for case, kernel in kernels_of_cases(mode) | further_kernels(mode, target)
    }
    counted = {kernel for kernel in GoldenCounts.read(GOLDEN).kernels if triton_is_known() or " groups-" not in kernel}
    assert counted == wanted


@pytest.mark.quick
def test_a_costlier_kernel_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden, kernel = GoldenCounts.read(GOLDEN), "int4_per_token_head sm_90 decode attend"
    row = golden.kernels[kernel]

    def changed(**by: int) -> GoldenCounts:
        return GoldenCounts(golden.triton, {**golden.kernels, kernel: {name: count + by.get(name, 0) for name, count in row.items()}})

    allowed = row["instructions"] * 2 // 100
    per_key = ("instructions", "conversions", "roundings", "byte_loads", "barriers", "local")
    for name in ("registers", "spilled", *per_key):
        more = allowed + 1 if name == "instructions" else 1
        (line,) = golden.regressions(changed(**{name: more}))
        assert line.startswith(f"{kernel}: {name} {row[name]} -> {row[name] + more}")
        assert changed(**{name: more}).regressions(golden) == []
    twice = changed(**{name: row[name] for name in (*per_key, "keys")})
    assert golden.regressions(twice) == golden.regressions(changed(instructions=allowed)) == []
    fewer = GoldenCounts(golden.triton, {name: row for name, row in golden.kernels.items() if name != kernel})
    assert golden.regressions(fewer) == [f"{kernel}: in the file, but not built"]
    assert fewer.regressions(golden) == [f"{kernel}: not in the file"]
    golden.write(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == GOLDEN.read_text()
    # The gate of the builds; counts of another compiler are not compared.
    monkeypatch.setattr(triton, "__version__", golden.triton)
    with pytest.raises(AssertionError, match=r"(?s)in the file, but not built.*--golden tests/data/golden_counts.json"):
        compare_with_golden("sm_90", [], MODES)
    monkeypatch.setattr(triton, "__version__", "3.5.0")
    with pytest.raises(pytest.skip.Exception, match=f"of Triton {golden.triton}, this is 3.5.0"):
        compare_with_golden("sm_90", [], MODES)
