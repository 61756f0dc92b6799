"""The worked example of an engine: what it decodes equals a plain dense model, whatever the batching, and it takes any mode."""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nano_engine
from kvq_core import get_backend, register_backend, unregister_backend
from kvq_core.evaluation.tiny_model import TinyModel, dense_attention
from kvq_core.none import NoneBackend
from nano_engine import Engine, Request, Stats, encode

PROMPTS = ["def f(x):", "a", "class Words:\n    one, two = 1, 2\n" * 2, "import os, sys", "# " + "x" * 61]
ALL_EXACT: dict[str, Any] = {"mode": "int2", "residual_length": 256, "sink_tokens": 4, "max_sequences": 5}
"""A window as long as the model's context: int2 shows up only where a row is not read from its exact copy."""


def exact_engine(model: TinyModel, mode: str = "none", **options: Any) -> Engine:
    """Over float32 pages: mode ``none`` is equal to a dense model but for the order of sums."""
    return Engine(model, get_backend(mode), rows_dtype=torch.float32, **{"num_blocks": 64} | options)


def requests(count: int = 10) -> list[Request]:
    return [Request(encode(text), count + i) for i, text in enumerate(PROMPTS)]


def run(engine: Engine, todo: list[Request]) -> Stats:
    """Run to the end. After every step each block has as many holders as say so, each request blocks for what is computed, and no more
    requests run than may."""
    for request in todo:
        engine.add(request)
    while engine.waiting or engine.running:
        engine.step()
        held = [block for request in engine.running for block in request.blocks]
        assert engine.holders == [held.count(block) for block in range(engine.num_blocks)]
        assert sorted({*held, *engine.free}) == list(range(engine.num_blocks)) and not {*held} & {*engine.free}
        assert all(len(r.blocks) * engine.block_size >= r.computed for r in engine.running) and len(engine.running) <= engine.max_sequences
    return engine.stats


@pytest.fixture(scope="module")
def alone(small_model: TinyModel) -> list[list[int]]:
    """What each request gets alone: the most likely token after all before it, by full recomputation, or one that ties with it."""
    todo = requests()
    for request in todo:
        run(exact_engine(small_model), [request])
        tokens = torch.tensor(request.tokens)
        with torch.inference_mode():
            logits = small_model(tokens, torch.arange(len(tokens)), dense_attention)[request.num_prompt - 1 : -1]
        chosen = logits.gather(1, tokens[request.num_prompt :, None])[:, 0]
        assert request.finished and len(request.output) == len(chosen)
        assert ((logits.amax(-1) - chosen) < 1e-3).all()
    return [request.output for request in todo]


@pytest.mark.parametrize(
    ("options", "happened"),
    [
        ({"chunk": 40}, lambda stats: stats.mixed_steps > 0 == stats.preemptions),  # prefill chunks beside decode rows
        ({"chunk": 64, "padded": True, "block_size": 8, "num_blocks": 13}, lambda stats: stats.preemptions > 0),  # block 0 in use
        ({"num_blocks": 6}, lambda stats: stats.steps > 40),  # room for one at a time
        (ALL_EXACT | {"chunk": 40}, lambda stats: stats.mixed_steps > 0 == stats.preemptions),
        (ALL_EXACT | {"chunk": 64, "padded": True, "block_size": 8, "num_blocks": 13}, lambda stats: stats.preemptions > 0),
    ],
)
def test_batching_does_not_change_a_token(
    small_model: TinyModel, alone: list[list[int]], options: dict[str, Any], happened: Callable[[Stats], bool]
) -> None:
    todo = requests()
    stats = run(exact_engine(small_model, **options), todo)
    assert [request.output for request in todo] == alone and happened(stats), stats


@pytest.mark.parametrize("rows", [{}, ALL_EXACT], ids=["none", "all exact"])
def test_forks_share_full_blocks_and_go_on_alike(small_model: TinyModel, rows: dict[str, Any]) -> None:
    """Parent and greedy child end with the same tokens; what they share is given back by the last of them."""
    engine = exact_engine(small_model, num_blocks=20, block_size=8, **rows)
    parent = Request(encode("def function(argument):"), 16)
    engine.add(parent)
    waits = engine.fork(parent, 16)
    assert list(engine.waiting) == [parent, waits] and not waits.blocks, "of what is not computed nothing is shared"
    while len(parent.output) < 5:
        engine.step()
    child = engine.fork(parent, 11)
    assert child.computed == 24 and child.blocks == parent.blocks[:3]
    run(engine, [])
    assert child.tokens == parent.tokens == waits.tokens and sorted(engine.free) == list(range(20))


def test_a_residual_window_reads_the_same_whatever_else_is_in_the_batch(small_model: TinyModel) -> None:
    """With prompts that come whole; no more requests run than there are exact rows for."""
    window = {"residual_length": 24, "sink_tokens": 16, "residual_mode": "int8", "max_sequences": 2}

    def decoded(groups: list[list[Request]], **options: Any) -> list[list[int]]:
        for group in groups:
            run(exact_engine(small_model, "int2", chunk=1000, **options), group)
        return [request.output for group in groups for request in group]

    alone = decoded([[request] for request in requests()], **window)
    assert decoded([requests()], **window) == alone != decoded([requests()])


def test_given_scales_map_the_largest_value_to_half_the_largest_code(small_model: TinyModel) -> None:
    tokens, largest = encode("some text to measure"), []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        largest.extend(float(x.abs().max()) for x in (k, v))
        return dense_attention(layer, q, k, v)

    small_model(torch.tensor(tokens), torch.arange(len(tokens)), attend)
    scales = [float(scale) for layer in nano_engine.given_scales(small_model, tokens) for scale in layer]
    assert [scale * 224 for scale in scales] == pytest.approx(largest, rel=1e-4)


class ThirdParty(NoneBackend):
    mode = "third_party_test"


def test_a_third_party_mode_continues_any_bytes(small_weights: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prompt.txt").write_bytes(b"ab\xff")
    given = ["--max-new-tokens", "3", "--model", str(small_weights), "--device", "cpu", "--kv-cache-dtype", ThirdParty.mode]
    window = ["--residual-length", "16", "--sink-tokens", "4", "--residual-mode", "int8", "--max-sequences", "2"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\n"))
    register_backend(ThirdParty)
    try:
        assert nano_engine.main([*given, *window, "--prompt-file", str(tmp_path / "prompt.txt")]) == 0
        assert capsys.readouterr().out.startswith("ab\ufffd")
        assert nano_engine.main(given) == 0
    finally:
        unregister_backend(ThirdParty.mode)
    out = capsys.readouterr().out
    assert out.startswith("one") and "\ntwo" in out and out.count("-" * 80) == 2


@pytest.mark.quick
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-cache-dtype", "int5"], "no installed package provides mode 'int5'"),
        (["--prompt-file", "/no/such/file"], "/no/such/file"),
        (["--model", "/no/such/weights"], "/no/such/weights"),
        (["--device", "abacus"], "--device: got 'abacus'"),
        (["--block-size", "12"], "block_size: got 12"),
        (["--chunk", "0"], "chunk: got 0"),
        (["--residual-mode", "int8"], "residual_mode: got int8_per_token_head, need none: without residual_length"),
        (["--num-blocks", "2"], "num_blocks: got 2"),
        (["--max-new-tokens", "4000"], "context of 256"),
        (["--temperature", "-1"], "--temperature"),
    ],
)
def test_bad_arguments_end_with_status_2_and_one_line(arguments: list[str], message: str, small_weights: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        nano_engine.main(["x", "--model", str(small_weights), "--device", "cpu", *arguments])
    last = capsys.readouterr().err.splitlines()[-1]
    assert "error:" in last and message in last


@pytest.mark.quick
@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6, 1e300])
def test_any_temperature_draws_a_token(temperature: float) -> None:
    logits = torch.tensor([-3e4, 2.0, 7.5, -1.0], dtype=torch.float16)
    drawn = {nano_engine.sample(logits, Request([1], 4, temperature, seed)) for seed in range(40)}
    assert drawn == {2} if temperature < 1 else drawn == {0, 1, 2, 3}
