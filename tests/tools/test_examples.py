"""The worked example of an engine: what it decodes equals a plain dense model, whatever the batching, and it takes any mode. The examples
beside it in small: the demo, the endurance run, and the tiny model's training and file."""

import io
import json
import math
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import demo
import endurance
import nano_engine
from command_line import MODES, row
from kvq_core import get_backend, register_backend
from kvq_core.evaluation import read_documents
from kvq_core.evaluation.tiny_model import TinyModel, dense_attention, load_model
from kvq_core.none import NoneBackend
from kvq_core.testing import places
from nano_engine import Engine, Request, Stats, encode
from tiny_model.corpus import is_held_out

FOLDER = Path(__file__).parents[2] / "examples" / "tiny_model"
PROMPTS = ["def f(x):", "a", "class Words:\n    one, two = 1, 2\n" * 2, "import os, sys", "# " + "x" * 61]
ALL_EXACT: dict[str, Any] = {"mode": "int2", "residual_length": 256, "sink_tokens": 4, "max_sequences": 3}
"""A window as long as the model's context: int2 shows up only where a row is not read from its exact copy."""
of_both_kinds = pytest.mark.parametrize("rows", [{}, ALL_EXACT], ids=["none", "all exact"])


def exact_engine(model: TinyModel, mode: str = "none", **options: Any) -> Engine:
    """Over float32 pages: mode ``none`` is equal to a dense model but for the order of sums."""
    return Engine(model, get_backend(mode), rows_dtype=torch.float32, **{"num_blocks": 64} | options)


def requests() -> list[Request]:
    return [Request(encode(text), 10 + i) for i, text in enumerate(PROMPTS)]


def run(engine: Engine, todo: list[Request]) -> Stats:
    """Run to the end. After every step each block has as many holders as say so, each request blocks for what is computed, and no more
    requests run, nor tokens are computed, than may."""
    for request in todo:
        engine.add(request)
    while engine.waiting or engine.running:
        work = engine.schedule()
        assert sum(count for _, count in work) <= engine.chunk
        if work:
            engine.advance(work)
        held = [block for request in engine.running for block in request.blocks]
        assert engine.holders == [held.count(block) for block in range(engine.num_blocks)]
        assert sorted({*held, *engine.free}) == list(range(engine.num_blocks)) and not {*held} & {*engine.free}
        assert all(len(r.blocks) * engine.block_size >= r.computed for r in engine.running) and len(engine.running) <= engine.max_sequences
    return engine.stats


@pytest.fixture(scope="module")
def alone(small_model: TinyModel) -> list[list[int]]:
    """What each request gets alone: the most likely token after all before it, by full recomputation, or one that ties with it."""
    for request in (todo := requests()):
        run(exact_engine(small_model), [request])
        tokens = torch.tensor(request.tokens)
        with torch.inference_mode():
            logits = small_model(tokens, torch.arange(len(tokens)), dense_attention)[request.num_prompt - 1 : -1]
        chosen = logits.gather(1, tokens[request.num_prompt :, None])[:, 0]
        assert request.finished and len(request.output) == len(chosen) and ((logits.amax(-1) - chosen) < 1e-3).all()
    return [request.output for request in todo]


@of_both_kinds
@pytest.mark.parametrize(
    ("options", "happened"),
    [
        ({"chunk": 40}, lambda stats: stats.mixed_steps > 0 == stats.preemptions),  # prefill chunks beside decode rows
        ({"chunk": 64, "padded": True, "block_size": 8, "num_blocks": 13}, lambda stats: stats.preemptions > 0),  # block 0 in use
        ({"num_blocks": 6}, lambda stats: stats.steps > 40),  # room for one at a time
    ],
)
def test_batching_does_not_change_a_token(
    small_model: TinyModel, alone: list[list[int]], rows: dict[str, Any], options: dict[str, Any], happened: Callable[[Stats], bool]
) -> None:
    todo = requests()
    stats = run(exact_engine(small_model, **rows, **options), todo)
    assert [request.output for request in todo] == alone and happened(stats), stats


@of_both_kinds
def test_forks_share_full_blocks_and_go_on_alike(small_model: TinyModel, rows: dict[str, Any]) -> None:
    """Parent and greedy child end with the same tokens; what they share is given back by the last of them."""
    engine = exact_engine(small_model, num_blocks=20, block_size=8, **rows)
    engine.add(parent := Request(encode("def function(argument):"), 16))
    waits = engine.fork(parent, 16)
    assert list(engine.waiting) == [parent, waits] and not waits.blocks, "of what is not computed nothing is shared"
    while len(parent.output) < 5:
        engine.step()
    child = engine.fork(parent, 11)
    assert child.computed == 24 and child.blocks == parent.blocks[:3]
    run(engine, [])
    assert child.tokens == parent.tokens == waits.tokens and sorted(engine.free) == list(range(20))


def test_given_scales_map_the_largest_value_to_half_the_largest_code(small_model: TinyModel) -> None:
    tokens, largest = encode("some text to measure"), []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        largest.extend(float(x.abs().max()) for x in (k, v))
        return dense_attention(layer, q, k, v)

    small_model(torch.tensor(tokens), torch.arange(len(tokens)), attend)
    scales = [float(scale) for layer in nano_engine.given_scales(small_model, tokens) for scale in layer]
    assert [scale * 224 for scale in scales] == pytest.approx(largest, rel=1e-4)


@pytest.mark.quick
@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6, 1e300])
def test_any_temperature_draws_a_token(temperature: float) -> None:
    logits = torch.tensor([-3e4, 2.0, 7.5, -1.0], dtype=torch.float16)
    drawn = {nano_engine.sample(logits, Request([1], 4, temperature, seed)) for seed in range(40)}
    assert drawn == {2} if temperature < 1 else drawn == {0, 1, 2, 3}


def test_a_third_party_mode_continues_any_bytes(small_weights: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prompt.txt").write_bytes(b"ab\xff")
    given = ["--max-new-tokens", "3", "--model", str(small_weights), "--device", "cpu", "--kv-cache-dtype", "third_party_test"]
    window = ["--residual-length", "16", "--sink-tokens", "4", "--residual-mode", "int8", "--max-sequences", "2"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\n"))
    register_backend(type("ThirdParty", (NoneBackend,), {"mode": "third_party_test"}))
    assert nano_engine.main([*given, *window, "--prompt-file", str(tmp_path / "prompt.txt")]) == 0
    assert capsys.readouterr().out.startswith("ab\ufffd")
    assert nano_engine.main([*given, "--max-new-tokens", "1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("one") and "\ntwo" in out and out.count("-" * 80) == 2


@pytest.mark.quick
@pytest.mark.parametrize(
    ("program", "given", "message"),
    [
        (nano_engine, "--kv-cache-dtype int5", "no installed package provides mode 'int5'"),
        (nano_engine, "--prompt-file /no/such/file", "/no/such/file"),
        (nano_engine, "--model /no/such/weights", "/no/such/weights"),
        (nano_engine, "--device abacus", "--device: got 'abacus'"),
        (nano_engine, "--block-size 12", "block_size: got 12"),
        (nano_engine, "--chunk 0", "chunk: got 0"),
        (nano_engine, "--residual-mode int8", "residual_mode: got int8_per_token_head, need none: without residual_length"),
        (nano_engine, "--num-blocks 2", "num_blocks: got 2"),
        (nano_engine, "--max-new-tokens 4000", "context of 256"),
        (nano_engine, "--temperature -1", "--temperature"),
        (demo, "--modes int5", "no installed package provides mode 'int5'"),
        (demo, "--device abacus", "--device: got 'abacus'"),
        (demo, "--model /no/such/weights", "/no/such/weights"),
        (demo, "--out /dev/null/below", "/dev/null/below"),
    ],
)
def test_bad_arguments_end_with_status_2_and_one_line(
    program: ModuleType, given: str, message: str, small_weights: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    usual = ["--model", str(small_weights), "--device", "cpu", *(["x"] if program is nano_engine else [])]
    with pytest.raises(SystemExit, match="2"):
        program.main([*usual, *given.split()])
    last = capsys.readouterr().err.splitlines()[-1]
    assert "error:" in last and message in last


class Ruined(NoneBackend):
    mode = "ruined_test"

    def decode(self, codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        return super().decode(codes, scales) * float("nan")


def test_the_demo_has_a_line_for_every_mode_and_a_ruined_one_costs_the_others_nothing(
    small_weights: Path, tmp_path: Path, capsys: Any
) -> None:
    register_backend(Ruined)
    assert demo.main(["--quick", "--device", "cpu", "--out", str(tmp_path / "nested"), "--model", str(small_weights)]) == 1
    printed = capsys.readouterr()
    assert f"broken: {Ruined.mode}: " in printed.err and all(len(row(printed.out, mode)) >= 10 for mode in MODES)
    assert sorted(p.name for p in (tmp_path / "nested").iterdir()) == ["demo.json", "demo.png"]
    results = {r["mode"]: r for r in json.loads((tmp_path / "nested" / "demo.json").read_text())["results"]}
    none, int4, int2 = (results[mode] for mode in ("none", "int4_per_token_head", "int2_per_token_head"))
    assert none["difference"] == none["attention_error"] == 0 and none["top1_agreement"] == 1 and none["key_snr_db"] is None
    assert [one["bits_per_element"] for one in (none, int4, int2)] == [16, 4.5, 2.5]
    assert int4["value_snr_db"] > 17 > int2["key_snr_db"] > 8 and 0 < int4["attention_error"] < int2["attention_error"] < 0.6
    assert all(math.isfinite(results[mode]["bits_per_byte"]) and results[mode]["decode_tokens_per_second"] > 0 for mode in MODES)


def test_an_endurance_run_tells_a_mode_that_endures_from_others(capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One whose device fails; one whose blocks are given back while others hold them."""
    execute, release = Engine.execute, Engine.release
    for mode in ("failing", "releasing"):
        register_backend(type(mode, (NoneBackend,), {"mode": mode}))

    def failing(engine: Engine, work: Any) -> Any:
        if engine.backend.mode == "failing" and engine.stats.steps > 3:
            raise RuntimeError("the device is gone")
        return execute(engine, work)

    def releasing(engine: Engine, request: Request) -> None:
        for block in request.blocks if engine.backend.mode == "releasing" else []:
            engine.holders[block] = 1
        release(engine, request)

    monkeypatch.setattr(Engine, "execute", failing)
    monkeypatch.setattr(Engine, "release", releasing)
    given = "--device cpu --requests 30 --sample 16 --num-blocks 24 --long 0 --chunk 64 --modes none failing releasing"
    assert endurance.main([*given.split(), "--json", str(tmp_path / "outcomes.json")]) == 1
    printed = capsys.readouterr().out
    for problem in ("failing: RuntimeError: the device is gone", " blocks leaked", "requests differ from what they are alone"):
        assert problem in printed
    assert all(("again: python examples/endurance.py --modes " + mode in printed) == (mode != "none") for mode in ("none", "failing"))
    none, failed, _ = json.loads((tmp_path / "outcomes.json").read_text())
    assert "the device is gone" in failed["error"] and (none["added"], none["compared"], none["different"]) == (30, 16, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_endures_on_a_gpu(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """With prompts past the length at which keys are split."""
    places.enter("gpu", monkeypatch)
    plan = endurance.Plan(mode, requests=400, sample=60, num_blocks=192, block_size=16, chunk=256, long=20, device="cuda", seed=0)
    seen = endurance.endure(plan, lambda count: None)
    assert seen.problems == [] and min(seen.finished, seen.cancelled, seen.forks, seen.preemptions) > 0


def test_training_leaves_weights_that_are_read_back_and_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The held-out text comes from files that training does not read."""
    assert all(is_held_out(document.name) for document in read_documents(FOLDER / "heldout.txt"))
    given = "--device cpu --no-compile --minutes 5 --max-steps 2 --batch 1 --length 64 --log-every 1 --eval-rows 2"
    monkeypatch.setattr(sys, "argv", ["train.py", "--out", str(tmp_path), *given.split()])
    runpy.run_path(str(FOLDER / "train.py"), run_name="__main__")
    facts, path = json.loads((tmp_path / "training.json").read_text()), tmp_path / "model.safetensors"
    assert facts["steps"] == 2 and 3 < facts["held_out_bits_per_byte"] < 9 and "PSF" in (tmp_path / "CARD.md").read_text()
    assert load_model(path).num_parameters == facts["parameters"]
