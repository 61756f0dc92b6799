"""The fuzzer draws the same scenarios every time, of every kind, and its command says what fails and what died."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvq_core import get_backend
from kvq_core.testing import fuzz, scenarios, strategies
from kvq_core.testing.cases import LAYOUTS, ROWS
from kvq_core.testing.fuzz import main, parse, tasks_of
from kvq_core.testing.places import Place
from kvq_core.testing.scenarios import BAD_VALUES, PLANS, Scenario
from kvq_core.testing.strategies import DTYPES
from kvq_core.testing.suite import BackendTests


class TestedInt8(BackendTests):
    __test__ = False
    mode = "int8_per_token_head"


def scenario(place: str, number: int, seed: int = 0) -> Scenario:
    return TestedInt8().scenario(get_backend("int8"), Place(place), seed, number)


@pytest.mark.quick
def test_a_number_stands_for_a_scenario() -> None:
    assert scenario("interpret", 7) == scenario("interpret", 7)
    assert len({str(scenario("interpret", n, seed)) for n in range(4) for seed in range(3)}) == 12


@pytest.mark.quick
@pytest.mark.parametrize("least", [-5, 0, 2, 38])
def test_every_number_of_a_range_is_drawn(least: int) -> None:
    """Hypothesis before 6.170 finds none of 38 to 40 in any bytes."""
    assert {scenarios.drawn(strategies.between(least, least + 2), str(n)) for n in range(60)} == {least, least + 1, least + 2}


@pytest.mark.quick
def test_scenarios_of_a_group_share_their_kernels() -> None:
    group = [scenario("gpu", n) for n in range(16)]
    free = {"query_lens": (), "seq_lens": (), "mm_prefix": (), "spare_columns": 0, "shared": False}
    assert len({str(replace(s.case, **free)) for s in group}) == len({s.case.num_seqs for s in group}) == 1
    assert len({(s.longest, s.hint, s.plan, s.segments, s.padded) for s in group}) == 1
    assert len({s.case.seq_lens for s in group}) > 1
    assert scenario("gpu", 16).case != group[0].case


def test_scenarios_are_of_every_kind() -> None:
    many = [scenario("interpret", n) for n in range(150)]
    cases = [s.case for s in many]
    assert {c.layout for c in cases} == set(LAYOUTS) and {c.rows for c in cases} == set(ROWS) and {c.dtype for c in cases} == set(DTYPES)
    assert {s.plan for s in many} == set(PLANS) and {bad.value for s in many for bad in s.damage} == set(BAD_VALUES)
    assert {bad.of for s in many for bad in s.damage} == {"key", "value", "q"}
    lens = [n for c in cases for n in c.query_lens]
    assert 0 in lens and 1 in lens and max(lens) > 16 and 0 in [n for c in cases for n in c.seq_lens]
    for feature in ("window", "softcap", "sinks", "alibi", "alibi_sqrt", "qq_bias", "mm_prefix", "output", "head_size_v"):
        assert len({getattr(c, feature) for c in cases}) > 1, feature
    assert {s.padded for s in many} == {c.shared for c in cases} == {True, False} and any(s.lost for s in many)
    assert any(not s.padded and min(s.case.query_lens) == s.longest > 16 for s in many), "uniform prefill"


@pytest.mark.quick
def test_shared_blocks_are_shared() -> None:
    drawn = next(s for s in (scenario("interpret", n) for n in range(400)) if _shares(s))
    staged = scenarios.stage(drawn, get_backend("int8"), Place("eager").device)
    assert staged.built.block_table[0, 0] == staged.built.block_table[1, 0]
    assert not staged.stored[staged.built.first_key(1)] and bool(staged.stored[: staged.built.first_key(1)].all())


def _shares(s: Scenario) -> bool:
    return s.case.shared and s.lost is None and s.case.num_seqs > 1 and min(s.case.seq_lens[:2]) >= s.case.block_size


@pytest.mark.quick
def test_tasks_hold_every_number_once() -> None:
    tasks = tasks_of(parse(["--count", "50"]), ["a", "b", "c"], 4)
    numbers = [(task.mode, n) for task in tasks for n in task.numbers]
    assert len(numbers) == len(set(numbers)) == 50 and {mode for mode, _ in numbers} == {"a", "b", "c"}
    assert [task.mode for task in tasks[:3]] == ["a", "b", "c"]
    assert [(task.mode, task.numbers) for task in tasks_of(parse(["--only", "a:7", "b:9"]), ["a", "b"], 4)] == [("a", (7,)), ("b", (9,))]


@pytest.mark.quick
@pytest.mark.parametrize("argv", [["--count", "0"], ["--only", "int8"], ["--only", "int8:x"], ["--workers", "0"]])
def test_bad_arguments(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert argv[0] in capsys.readouterr().err


BROKEN = """
import os
import time
from kvq_core.testing import BackendTests

class TestBroken(BackendTests):
    mode = "int8_per_token_head"

    def assert_scenario(self, backend, place, scenario):
        fails, dies, hangs = (self.scenario(backend, place, 3, number) for number in (0, 2, 4))
        if scenario == fails:
            raise AssertionError("the very first")
        if scenario == dies:
            os._exit(7)
        if scenario == hangs:
            time.sleep(1000)
"""


def test_failures_deaths_and_hangs_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Number 0 fails, 2 ends its process, 4 hangs: each costs only itself, and another process goes on with 1, 3 and 5."""
    suite, kept = tmp_path / "broken.py", tmp_path / "kept.json"
    suite.write_text(BROKEN)
    monkeypatch.setattr(fuzz, "SILENCE", 15)
    command = ["--device", "cpu", "--modes", "int8", "--count", "6", "--workers", "1", "--seed", "3"]
    assert main([*command, "--suite", str(suite), "--json", str(kept)]) == 1
    printed = capsys.readouterr()
    said = printed.out + printed.err
    for number, why in (
        (0, "AssertionError: the very first"),
        (2, "not run: its process ended with status 7"),
        (4, "not run: no word for minutes"),
    ):
        assert f"FAILED int8_per_token_head:{number}: {why}" in said
        assert f"--device cpu --suite {suite} --seed 3 --only int8_per_token_head:{number}" in said
    assert "6 scenarios (int8_per_token_head 4), seed 3, interpret: 3 failures, " in printed.out
    told = json.loads(kept.read_text())
    assert told["done"] == {"int8_per_token_head": 4} and list(told["failures"]) == [f"int8_per_token_head:{n}" for n in (0, 2, 4)]


def test_the_time_may_be_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--modes", "int8", "--count", "4", "--workers", "1", "--minutes", "0"]) == 1
    assert "4 scenarios (int8_per_token_head 0), seed 0, interpret: 0 failures, 4 not run in 0 minutes" in capsys.readouterr().out
