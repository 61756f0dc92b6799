"""The fuzzer draws the same scenarios every time, of every kind, and its command says what fails, what died and what was not run."""

import json
from pathlib import Path

import pytest

from kvq_core import get_backend
from kvq_core.testing import fuzz
from kvq_core.testing.cases import LAYOUTS, ROWS
from kvq_core.testing.fuzz import main
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


def test_scenarios_are_of_every_kind() -> None:
    many = [scenario("interpret", n) for n in range(100)]
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


BROKEN = """
import os
import time
from kvq_core.testing import BackendTests

class TestBroken(BackendTests):
    mode = "int8_per_token_head"

    def assert_scenario(self, backend, place, scenario):
        fails, dies, hangs = (self.scenario(backend, place, 3, number) for number in range(3))
        if scenario == fails:
            raise AssertionError("the very first")
        if scenario == dies:
            os._exit(7)
        if scenario == hangs:
            time.sleep(1000)
"""


def test_failures_deaths_and_hangs_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Number 0 fails, 1 ends its process, 2 hangs: each costs only itself, and another process goes on with 3. Then the time is up."""
    suite, kept = tmp_path / "broken.py", tmp_path / "kept.json"
    suite.write_text(BROKEN)
    monkeypatch.setattr(fuzz, "SILENCE", 10)
    command = ["--device", "cpu", "--modes", "int8", "--count", "4", "--workers", "1"]
    assert main([*command, "--seed", "3", "--suite", str(suite), "--json", str(kept)]) == 1
    printed = capsys.readouterr()
    whys = ("AssertionError: the very first", "not run: its process ended with status 7", "not run: no word for minutes")
    for number, why in enumerate(whys):
        assert f"FAILED int8_per_token_head:{number}: {why}" in printed.out + printed.err
        assert f"--device cpu --suite {suite} --seed 3 --only int8_per_token_head:{number}" in printed.out + printed.err
    assert "4 scenarios (int8_per_token_head 2), seed 3, interpret: 3 failures, " in printed.out
    told = json.loads(kept.read_text())
    assert told["done"] == {"int8_per_token_head": 2} and list(told["failures"]) == [f"int8_per_token_head:{n}" for n in range(3)]
    assert main([*command, "--minutes", "0"]) == 1
    assert "4 scenarios (int8_per_token_head 0), seed 0, interpret: 0 failures, 4 not run in 0 minutes" in capsys.readouterr().out


def test_a_suite_finds_what_lies_beside_it_or_ends_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "beside.py").write_text("from kvq_core.testing import BackendTests as Base\n")
    suite = tmp_path / "suite.py"
    suite.write_text("from beside import Base\nclass TestInt8(Base):\n    mode = 'int8_per_token_head'\n")
    command = ["--device", "cpu", "--modes", "int8", "--count", "1", "--suite", str(suite)]
    assert main(command) == 0
    (tmp_path / "beside.py").unlink()
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 2 and f"--suite {suite}: ModuleNotFoundError: No module named 'beside'" in capfd.readouterr().err
