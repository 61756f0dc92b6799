"""The examples beside the engine, in small: the demo, the endurance run, and the tiny model's training and file."""

import json
import math
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import demo
import endurance
import nano_engine
from command_line import row
from kvq_core import list_backends, register_backend, unregister_backend
from kvq_core.evaluation import read_documents
from kvq_core.evaluation.tiny_model import load_model
from kvq_core.none import NoneBackend
from kvq_core.testing import places
from tiny_model.corpus import is_held_out

FOLDER = Path(__file__).parents[2] / "examples" / "tiny_model"
MODES = sorted({entry.mode for entry in list_backends()})


class Ruined(NoneBackend):
    mode = "ruined_test"

    def decode(self, codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        return super().decode(codes, scales) * float("nan")


def test_the_demo_has_a_line_for_every_mode_and_a_ruined_one_costs_the_others_nothing(
    small_weights: Path, tmp_path: Path, capsys: Any
) -> None:
    register_backend(Ruined)
    try:
        assert demo.main(["--quick", "--device", "cpu", "--out", str(tmp_path / "nested"), "--model", str(small_weights)]) == 1
    finally:
        unregister_backend(Ruined.mode)
    printed = capsys.readouterr()
    assert f"broken: {Ruined.mode}: " in printed.err and all(len(row(printed.out, mode)) >= 10 for mode in MODES)
    assert sorted(p.name for p in (tmp_path / "nested").iterdir()) == ["demo.json", "demo.png"]
    results = {r["mode"]: r for r in json.loads((tmp_path / "nested" / "demo.json").read_text())["results"]}
    none, int4, int2 = (results[mode] for mode in ("none", "int4_per_token_head", "int2_per_token_head"))
    assert none["difference"] == none["attention_error"] == 0 and none["top1_agreement"] == 1 and none["key_snr_db"] is None
    assert [one["bits_per_element"] for one in (none, int4, int2)] == [16, 4.5, 2.5]
    assert int4["value_snr_db"] > 17 > int2["key_snr_db"] > 8 and 0 < int4["attention_error"] < int2["attention_error"] < 0.6
    assert all(math.isfinite(results[mode]["bits_per_byte"]) and results[mode]["decode_tokens_per_second"] > 0 for mode in MODES)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "value"), [("modes", "int5"), ("device", "abacus"), ("model", "/no/such/weights"), ("out", "/dev/null/below")]
)
def test_bad_arguments_end_with_status_2_and_one_line(name: str, value: str, tmp_path: Path, capsys: Any) -> None:
    given = {"device": "cpu", "out": str(tmp_path)} | {name: value}
    with pytest.raises(SystemExit, match="2"):
        demo.main([part for option in given for part in (f"--{option}", given[option])])
    last = capsys.readouterr().err.splitlines()[-1]
    assert "error:" in last and value in last


def test_a_mode_that_endures_and_one_that_fails(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    execute = nano_engine.Engine.execute

    def failing(engine: nano_engine.Engine, work: Any) -> Any:
        if engine.backend.mode == "none" and engine.stats.steps > 3:
            raise RuntimeError("the device is gone")
        return execute(engine, work)

    monkeypatch.setattr(nano_engine.Engine, "execute", failing)
    sizes = {"requests": 8, "sample": 4, "num-blocks": 24, "long": 0, "chunk": 64, "jobs": 1}
    given = ["--device", "cpu", *(f"--{name}={size}" for name, size in sizes.items()), "--json", str(tmp_path / "outcomes.json")]
    assert endurance.main([*given, "--modes", "none", "int4"]) == 1
    printed = capsys.readouterr().out
    assert "none: RuntimeError: the device is gone" in printed and "again: python examples/endurance.py --modes none" in printed
    none, int4 = json.loads((tmp_path / "outcomes.json").read_text())
    assert "the device is gone" in none["error"] and (int4["added"], int4["compared"], int4["different"]) == (8, 4, 0)


@pytest.mark.parametrize(("lost", "holders", "problem"), [(1, None, "blocks leaked"), (0, 1, "differ from")])
def test_the_endurance_run_notices_defects(lost: int, holders: int | None, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_endures_on_a_gpu(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """With prompts past the length at which keys are split."""
    places.enter("gpu", monkeypatch)
    sizes = {"requests": 400, "sample": 60, "num_blocks": 192, "block_size": 16, "chunk": 256, "long": 20, "seed": 0}
    seen = endurance.endure(endurance.Plan(mode=mode, device="cuda", **sizes), lambda count: None)
    assert seen.problems == [] and min(seen.finished, seen.cancelled, seen.forks, seen.preemptions) > 0


def test_training_leaves_weights_that_are_read_back_and_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The held-out text comes from files that training does not read."""
    assert all(is_held_out(document.name) for document in read_documents(FOLDER / "heldout.txt"))
    given = ["--out", str(tmp_path), "--device", "cpu", "--no-compile", "--minutes", "5", "--max-steps", "2"]
    sizes = ["--batch", "1", "--length", "64", "--log-every", "1", "--eval-rows", "2"]
    monkeypatch.setattr(sys, "argv", ["train.py", *given, *sizes])
    runpy.run_path(str(FOLDER / "train.py"), run_name="__main__")
    facts, path = json.loads((tmp_path / "training.json").read_text()), tmp_path / "model.safetensors"
    assert facts["steps"] == 2 and 3 < facts["held_out_bits_per_byte"] < 9 and "PSF" in (tmp_path / "CARD.md").read_text()
    assert load_model(path).num_parameters == facts["parameters"]
