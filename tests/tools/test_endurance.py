"""The endurance run, in small: it holds in every mode, and says so when something leaks or a request is not what it is alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import endurance
import nano_engine
from kvq_core import list_backends
from kvq_core.testing import places

MODES = sorted({entry.mode for entry in list_backends()})
OPTIONS = ["--requests", "8", "--sample", "4", "--num-blocks", "24", "--long", "0", "--chunk", "64", "--device", "cpu"]
SMALL: dict[str, Any] = {"requests": 32, "sample": 16, "num_blocks": 20, "block_size": 16, "chunk": 64, "long": 0, "seed": 0}


def endured(mode: str, device: str = "cpu", **changes: Any) -> endurance.Outcome:
    return endurance.endure(endurance.Plan(mode=mode, device=device, **SMALL | changes), lambda count: None)


def test_a_mode_endures() -> None:
    seen = endured("fp8_per_tensor")
    assert seen.problems == []
    assert min(seen.finished, seen.cancelled, seen.forks, seen.preemptions) > 0, "nothing of that kind was tested"
    assert seen.compared == 16 and seen.finished + seen.cancelled == 32


def leaks(engine: nano_engine.Engine, request: nano_engine.Request) -> None:
    request.blocks = request.blocks[:-1]


def gives_away_what_others_hold(engine: nano_engine.Engine, request: nano_engine.Request) -> None:
    for block in request.blocks:
        engine.holders[block] = 1


@pytest.mark.parametrize(("defect", "problem"), [(leaks, "blocks leaked"), (gives_away_what_others_hold, "differ from")])
def test_defects_are_noticed(monkeypatch: pytest.MonkeyPatch, defect: Callable[..., Any], problem: str) -> None:
    release = nano_engine.Engine.release
    monkeypatch.setattr(nano_engine.Engine, "release", lambda *given: (defect(*given), release(*given)))
    assert any(problem in line for line in endured("none", num_blocks=60, requests=40).problems)


def test_a_mode_in_a_process_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert endurance.main(["--requests", "4", "--sample", "2", *OPTIONS[4:], "--jobs", "2", "--modes", "none"]) == 0
    printed = capsys.readouterr().out
    assert "2 of 2" in printed and "every block free" in printed


def test_a_mode_that_fails_costs_the_others_nothing(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is told with what failed and how to have it again, and the file has both."""
    execute = nano_engine.Engine.execute

    def failing(engine: nano_engine.Engine, work: Any) -> Any:
        if engine.backend.mode == "none" and engine.stats.steps > 3:
            raise RuntimeError("the device is gone")
        return execute(engine, work)

    monkeypatch.setattr(nano_engine.Engine, "execute", failing)
    assert endurance.main([*OPTIONS, "--jobs", "1", "--modes", "none", "int4", "--json", str(tmp_path / "outcomes.json")]) == 1
    printed = capsys.readouterr().out
    assert all(said in printed for said in ("none: RuntimeError: the device is gone", "int4_per_token_head", "4 of 4"))
    again = f"again: python examples/endurance.py --modes none {' '.join(OPTIONS[:6])} --block-size 16 --chunk 64 --long 0 --seed 0"
    assert again in printed
    kept = {one["mode"]: one for one in json.loads((tmp_path / "outcomes.json").read_text())}
    assert "the device is gone" in kept["none"]["error"] and kept["int4_per_token_head"]["added"] == 8


def test_the_time_may_be_up() -> None:
    seen = endured("int8_per_token_head", requests=100_000, minutes=0.004)
    assert 0 < seen.added < 100_000 and seen.finished + seen.cancelled == seen.added and seen.leaked_blocks == seen.different == 0
    assert seen.problems == [f"int8_per_token_head: {100_000 - seen.added} requests had not arrived when the time was up"]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--requests", "0"], "--requests: got 0"),
        (["--modes", "int5"], "int5"),
        (["--num-blocks", "100"], "--num-blocks: got 100, need 175"),
        (["--device", "abacus"], "abacus"),
    ],
)
def test_bad_arguments_end_with_status_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        endurance.main(["--device", "cpu", *arguments])
    assert stop.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_endures_on_a_gpu(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """With prompts past the length at which keys are split."""
    places.enter("gpu", monkeypatch)
    seen = endured(mode, "cuda", requests=400, sample=60, num_blocks=192, chunk=256, long=20)
    assert seen.problems == [] and min(seen.finished, seen.cancelled, seen.forks, seen.preemptions) > 0
