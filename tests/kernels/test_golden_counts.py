"""The comparison with the golden counts fails when a kernel comes to cost more, and says what of."""

from pathlib import Path

import pytest

from kvq_core.testing.golden_counts import GoldenCounts

pytestmark = pytest.mark.quick

FILE = Path(__file__).parents[1] / "data" / "golden_counts.json"
KERNEL = "int4_per_token_head sm_90 decode attend"


def changed(golden: GoldenCounts, **by: int) -> GoldenCounts:
    """``golden`` with counts of one kernel changed by so much."""
    row = golden.kernels[KERNEL]
    new = {name: count + by.get(name, 0) for name, count in row.items()}
    return GoldenCounts(golden.triton, {**golden.kernels, KERNEL: new})


@pytest.fixture
def golden() -> GoldenCounts:
    return GoldenCounts.read(FILE)


@pytest.mark.parametrize("name", ["registers", "spilled", "conversions", "roundings", "byte_loads", "barriers", "local"])
def test_one_more_fails_and_one_fewer_passes(golden: GoldenCounts, name: str) -> None:
    more = changed(golden, **{name: 1})
    (line,) = golden.regressions(more)
    assert line.startswith(f"{KERNEL}: {name} {golden.kernels[KERNEL][name]} -> {more.kernels[KERNEL][name]}")
    assert more.regressions(golden) == []


def test_instructions_may_grow_by_two_per_cent(golden: GoldenCounts) -> None:
    allowed = golden.kernels[KERNEL]["instructions"] * 2 // 100
    assert golden.regressions(changed(golden, instructions=allowed)) == []
    (line,) = golden.regressions(changed(golden, instructions=allowed + 1))
    assert "instructions" in line


def test_counts_of_a_loop_are_compared_per_key(golden: GoldenCounts) -> None:
    row = golden.kernels[KERNEL]
    per_key = ("instructions", "conversions", "roundings", "byte_loads", "barriers", "local", "keys")
    twice = changed(golden, **{name: row[name] for name in per_key})
    assert golden.regressions(golden) == golden.regressions(twice) == twice.regressions(golden) == []
    assert len(golden.regressions(changed(golden, warps=row["warps"]))) == sum(row[name] > 0 for name in per_key[:-1])


def test_kernels_of_only_one_side_are_named(golden: GoldenCounts) -> None:
    fewer = GoldenCounts(golden.triton, {name: row for name, row in golden.kernels.items() if name != KERNEL})
    assert golden.regressions(fewer) == [f"{KERNEL}: in the file, but not built"]
    assert fewer.regressions(golden) == [f"{KERNEL}: not in the file"]


def test_the_file_is_what_writing_it_gives(golden: GoldenCounts, tmp_path: Path) -> None:
    golden.write(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == FILE.read_text()
    lines = FILE.read_text().splitlines()
    assert len(lines) == len(golden.kernels) + 2 and lines[1:-1] == sorted(lines[1:-1])


def test_builds_without_hot_counts_are_left_out() -> None:
    facts = {"mode": "none", "case": "decode", "kernel": "write", "registers": 40, "spilled": 0, "shared": 512}
    hot = {"instructions": 300, "conversions": 0, "keys": 1, "warps": 1}
    golden = GoldenCounts.of([{**facts, "target": "sm_90", "hot": hot}, {**facts, "target": "gfx942", "hot": None}], "3.7.1")
    assert golden.kernels == {"none sm_90 decode write": {"registers": 40, "spilled": 0, **hot}}
    assert golden.for_target("sm_80").kernels == {}
