"""The endurance run, in small: a mode endures, a leak and a wrong token are noticed, and a mode that fails costs the others nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

import endurance
import nano_engine
from kvq_core import list_backends
from kvq_core.testing import places

OPTIONS = ["--requests", "8", "--sample", "4", "--num-blocks", "24", "--long", "0", "--chunk", "64", "--device", "cpu", "--jobs", "1"]


def test_a_run_is_green_and_a_mode_that_fails_is_told(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    execute = nano_engine.Engine.execute

    def failing(engine: nano_engine.Engine, work: Any) -> Any:
        if engine.backend.mode == "none" and engine.stats.steps > 3:
            raise RuntimeError("the device is gone")
        return execute(engine, work)

    monkeypatch.setattr(nano_engine.Engine, "execute", failing)
    assert endurance.main([*OPTIONS, "--modes", "none", "int4", "--json", str(tmp_path / "outcomes.json")]) == 1
    printed = capsys.readouterr().out
    assert all(said in printed for said in ("none: RuntimeError: the device is gone", "int4_per_token_head", "4 of 4"))
    assert "again: python examples/endurance.py --modes none" in printed
    kept = {one["mode"]: one for one in json.loads((tmp_path / "outcomes.json").read_text())}
    assert "the device is gone" in kept["none"]["error"] and kept["int4_per_token_head"]["added"] == 8


@pytest.mark.parametrize(("lost", "holders", "problem"), [(1, None, "blocks leaked"), (0, 1, "differ from")])
def test_defects_are_noticed(lost: int, holders: int | None, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is not given back; blocks that are given back while others hold them."""
    release = nano_engine.Engine.release

    def defective(engine: nano_engine.Engine, request: nano_engine.Request) -> None:
        for block in request.blocks:
            engine.holders[block] = holders or engine.holders[block]
        request.blocks = request.blocks[: len(request.blocks) - lost]
        release(engine, request)

    monkeypatch.setattr(nano_engine.Engine, "release", defective)
    plan = endurance.Plan(mode="none", device="cpu", requests=40, sample=16, num_blocks=60, block_size=16, chunk=64, long=0, seed=0)
    assert any(problem in line for line in endurance.endure(plan, lambda count: None).problems)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", sorted({entry.mode for entry in list_backends()}))
def test_every_mode_endures_on_a_gpu(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """With prompts past the length at which keys are split."""
    places.enter("gpu", monkeypatch)
    sizes = {"requests": 400, "sample": 60, "num_blocks": 192, "block_size": 16, "chunk": 256, "long": 20, "seed": 0}
    seen = endurance.endure(endurance.Plan(mode=mode, device="cuda", **sizes), lambda count: None)
    assert seen.problems == [] and min(seen.finished, seen.cancelled, seen.forks, seen.preemptions) > 0
