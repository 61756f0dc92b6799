"""The worked example of an engine: what it decodes equals a plain dense model, whatever the batching, and it takes any mode."""

import ast
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nano_engine
from kvq_core import get_backend, list_backends, register_backend, unregister_backend
from kvq_core.evaluation.tiny_model import TinyModel, dense_attention, rotary_channels
from kvq_core.none import NoneBackend
from kvq_core.smoothing.calibration import KeySmoothing, ModelSmoothing
from kvq_core.smoothing.rotary import RotaryMean
from nano_engine import Engine, Request, Stats, encode

SCRIPT = Path(__file__).parents[2] / "examples" / "nano_engine.py"
PROMPTS = ["def f(x):", "a", "class Words:\n    one, two = 1, 2\n" * 2, "import os, sys", "# " + "x" * 61]
MODES = sorted({entry.mode for entry in list_backends()})
ALL_EXACT: dict[str, Any] = {"mode": "int2", "residual_length": 256, "sink_tokens": 4, "max_sequences": 5}
"""A window as long as the model's context: int2 shows up only where a row is not read from its exact copy."""


@pytest.fixture(scope="module")
def model(small_model: TinyModel) -> TinyModel:
    return small_model


def exact_engine(model: TinyModel, mode: str = "none", **options: Any) -> Engine:
    """Over float32 pages: mode ``none`` is equal to a dense model but for the order of sums."""
    return Engine(model, get_backend(mode), rows_dtype=torch.float32, **{"num_blocks": 64} | options)


def requests(count: int = 10) -> list[Request]:
    return [Request(encode(text), count + i) for i, text in enumerate(PROMPTS)]


def run(engine: Engine, todo: list[Request]) -> Stats:
    """Run to the end. After every step each block has as many holders as say so, and each request has blocks for what is computed."""
    for request in todo:
        engine.add(request)
    while engine.waiting or engine.running:
        engine.step()
        held = [block for request in engine.running for block in request.blocks]
        assert engine.holders == [held.count(block) for block in range(engine.num_blocks)]
        assert sorted({*held, *engine.free}) == list(range(engine.num_blocks)) and not {*held} & {*engine.free}
        assert all(len(r.blocks) * engine.block_size >= r.computed for r in engine.running)
    return engine.stats


@pytest.fixture(scope="module")
def alone(model: TinyModel) -> list[list[int]]:
    """What each request gets alone: the most likely token after all before it, by full recomputation, or one that ties with it."""
    todo = requests()
    for request in todo:
        run(exact_engine(model), [request])
        tokens = torch.tensor(request.tokens)
        with torch.inference_mode():
            logits = model(tokens, torch.arange(len(tokens)), dense_attention)[request.num_prompt - 1 : -1]
        chosen = logits.gather(1, tokens[request.num_prompt :, None])[:, 0]
        assert request.finished and len(request.output) == len(chosen)
        assert ((logits.amax(-1) - chosen) < 1e-3).all()
    return [request.output for request in todo]


def test_a_rotary_mean_is_given_back(model: TinyModel, alone: list[list[int]]) -> None:
    """In mode none: a position that is not the same for a write and a read would be off by the whole mean."""
    config = model.config
    pairs, rates = rotary_channels(config)
    rotary = RotaryMean.of_bias(20 * torch.randn(config.num_kv_heads, config.head_size), pairs, rates)
    one = KeySmoothing(torch.zeros(config.num_kv_heads, config.head_size), None, rotary)
    todo = requests()
    stats = run(exact_engine(model, chunk=7, num_blocks=30, smoothing=ModelSmoothing(dict.fromkeys(range(config.num_layers), one))), todo)
    assert stats.mixed_steps and [request.output for request in todo] == alone


@pytest.mark.parametrize("rows", [{}, ALL_EXACT], ids=["none", "all exact"])
@pytest.mark.parametrize(
    ("options", "happened"),
    [
        ({"chunk": 40}, lambda stats: stats.mixed_steps > 0 == stats.preemptions),  # prefill chunks beside decode rows
        ({"chunk": 1, "block_size": 8}, lambda stats: not stats.mixed_steps),
        ({"chunk": 64, "padded": True, "block_size": 8, "num_blocks": 13}, lambda stats: stats.preemptions > 0),  # block 0 in use
        ({"chunk": 1000, "block_size": 64}, lambda stats: stats.steps < 20),
        ({"num_blocks": 6}, lambda stats: stats.steps > 40),  # room for one at a time
    ],
)
def test_batching_does_not_change_a_token(
    model: TinyModel, alone: list[list[int]], options: dict[str, Any], happened: Callable[[Stats], bool], rows: dict[str, Any]
) -> None:
    todo = requests()
    stats = run(exact_engine(model, **options, **rows), todo)
    assert [request.output for request in todo] == alone and happened(stats), stats
    assert sum(request.preemptions for request in todo) == stats.preemptions


@pytest.mark.parametrize("rows", [{}, ALL_EXACT], ids=["none", "all exact"])
def test_forks_share_full_blocks_and_go_on_alike(model: TinyModel, rows: dict[str, Any]) -> None:
    """Parent and greedy child end with the same tokens; what they share is given back by the last of them."""
    engine = exact_engine(model, num_blocks=20, block_size=8, **rows)
    parent = Request(encode("def function(argument):"), 16)
    engine.add(parent)
    waits = engine.fork(parent, 16)
    assert list(engine.waiting) == [parent, waits] and not waits.blocks, "of what is not computed nothing is shared"
    while len(parent.output) < 5:
        engine.step()
    child = engine.fork(parent, 11)
    assert (len(child.blocks), child.computed) == (3, 24) and child.blocks == parent.blocks[:3]
    assert [engine.holders[block] for block in parent.blocks] == [2, 2, 2, 1]
    run(engine, [])
    assert child.tokens == parent.tokens == waits.tokens
    assert sorted(engine.free) == list(range(20)) and not any(engine.holders)


WINDOWS: list[tuple[str, dict[str, Any]]] = [
    ("int4", {"residual_length": 16, "sink_tokens": 4}),
    ("int2", {"residual_length": 24, "sink_tokens": 16, "residual_mode": "int8"}),
]


@pytest.mark.parametrize(("mode", "window"), WINDOWS, ids=str)
def test_a_residual_window_reads_the_same_whatever_else_is_in_the_batch(model: TinyModel, mode: str, window: dict[str, Any]) -> None:
    """With prompts that come whole."""

    def decoded(groups: list[list[Request]], **options: Any) -> list[list[int]]:
        for group in groups:
            run(exact_engine(model, mode, chunk=1000, **options), group)
        return [request.output for group in groups for request in group]

    alone = decoded([[request] for request in requests()], **window, max_sequences=5)
    assert decoded([requests()], **window, max_sequences=5) == alone != decoded([requests()])


def test_no_more_requests_run_than_have_exact_rows(model: TinyModel) -> None:
    """Forks beyond them wait, and share nothing."""
    engine, forked, most = exact_engine(model, "int2", block_size=8, residual_length=16, max_sequences=2), [], 0
    for request in requests(6):
        engine.add(request)
    while engine.running or engine.waiting:
        engine.step()
        most = max(most, len(engine.running))
        if engine.running and len(forked) < 3:
            forked.append(engine.fork(engine.running[0], 4))
            assert len(engine.running) <= 2
    assert most == 2 and all(request.finished for request in forked)


def test_sampling_depends_on_the_request_alone(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(seeds: list[int]) -> list[list[int]]:
        todo = [Request(encode("x = "), 8, temperature=3.0, seed=seed) for seed in seeds]
        exact_engine(model).run(todo)
        return [r.output for r in todo]

    first, second, third = drawn([1, 2, 1])
    assert first == third == drawn([1])[0] and first != second
    # A separator ends a request.
    monkeypatch.setattr(nano_engine, "sample", lambda logits, request: 0 if len(request.output) == 3 else 65)
    request = Request(encode("x"), 50, temperature=1.0)
    exact_engine(model).run([request])
    assert request.output == [65, 65, 65, 0] and request.text == "AAA"


def test_given_scales_map_the_largest_value_to_half_the_largest_code(model: TinyModel) -> None:
    tokens, largest = encode("some text to measure"), []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        largest.extend(float(x.abs().max()) for x in (k, v))
        return dense_attention(layer, q, k, v)

    model(torch.tensor(tokens), torch.arange(len(tokens)), attend)
    scales = [scale for layer in nano_engine.given_scales(model, tokens) for scale in layer]
    assert [float(scale) * 224 for scale in scales] == pytest.approx(largest, rel=1e-4) and {scale.shape for scale in scales} == {(1,)}
    with pytest.raises(ValueError, match="calibration"):
        Engine(model, get_backend("fp8_per_tensor"))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("tokens", "count", "message"),
    [([], 5, "need at least 1"), ([1], 0, "need at least 1"), ([1] * 250, 7, "context of 256"), ([1] * 60, 5, "num_blocks")],
)
def test_requests_that_could_never_run_are_refused(model: TinyModel, tokens: list[int], count: int, message: str) -> None:
    engine, request = exact_engine(model, num_blocks=4), Request(tokens, count)
    with pytest.raises(ValueError, match=message):
        engine.add(request)
    with pytest.raises(ValueError, match="neither waits nor runs"):
        engine.cancel(request)
    assert not engine.waiting


def test_a_third_party_mode_is_listed_and_continues_any_bytes(small_weights: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    class ThirdParty(NoneBackend):
        mode = "third_party_test"

    register_backend(ThirdParty)
    try:
        with pytest.raises(SystemExit, match="0"):
            nano_engine.main(["--help"])
        listed = capsys.readouterr().out.replace("\n", " ")
        assert all(mode in listed for mode in [*MODES, ThirdParty.mode])
        (tmp_path / "prompt.txt").write_bytes(b"ab\xff")
        given = ["--max-new-tokens", "3", "--model", str(small_weights), "--device", "cpu", "--kv-cache-dtype", ThirdParty.mode]
        window = ["--residual-length", "16", "--sink-tokens", "4", "--residual-mode", "int8", "--max-sequences", "2"]
        assert nano_engine.main([*given, *window, "--prompt-file", str(tmp_path / "prompt.txt")]) == 0
        printed = capsys.readouterr()
        assert ThirdParty.mode in printed.err and printed.out.startswith("ab\ufffd")
        monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\n"))
        assert nano_engine.main(given) == 0
        out = capsys.readouterr().out
        assert out.startswith("one") and "\ntwo" in out and out.count("-" * 80) == 2
    finally:
        unregister_backend(ThirdParty.mode)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--kv-cache-dtype", "int5"], "no installed package provides mode 'int5'"),
        (["--prompt-file", "/no/such/file"], "/no/such/file"),
        (["x", "--model", "/no/such/weights"], "/no/such/weights"),
        (["x", "--device", "abacus"], "--device: got 'abacus'"),
        (["x", "--block-size", "12"], "block_size: got 12"),
        (["x", "--chunk", "0"], "chunk: got 0"),
        (["x", "--residual-mode", "int8"], "residual_mode: got int8_per_token_head, need none: without residual_length"),
        (["x", "--num-blocks", "2"], "num_blocks: got 2"),
        (["x", "--max-new-tokens", "4000"], "context"),
        (["x", "--temperature", "-1"], "--temperature"),
        (["x", "--num-blocks", str(2**50)], ""),
        ([], "prompts: got none"),
    ],
)
def test_bad_arguments_end_with_status_2_and_one_line(
    arguments: list[str], message: str, small_weights: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with pytest.raises(SystemExit) as stop:
        nano_engine.main(["--model", str(small_weights), "--device", "cpu", *arguments])
    assert stop.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "error:" in last and message in last


@pytest.mark.quick
def test_the_engine_knows_no_mode_and_no_model_library() -> None:
    tree = ast.parse(SCRIPT.read_text())
    roots = {alias.name.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    roots |= {(node.module or "").partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert roots - set(sys.stdlib_module_names) == {"torch", "kvq_core"}


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_kernels_on_a_gpu_follow_the_cpu_path(model: TinyModel, mode: str) -> None:
    """Hidden rows of one chunked prefill, float32 model, bf16 rows: GPU kernels against torch on CPU."""
    tokens, hidden = encode("def f(x):\n    return x\n" * 4), []
    for device in ("cpu", "cuda"):
        engine = Engine(model.to(device), get_backend(mode), num_blocks=8, calibration=tokens)
        request = Request(list(tokens), 1)
        engine.reserve(request, len(tokens))
        parts = [engine.execute([(request, min(32, request.pending))]).cpu() for _ in range(-(-len(tokens) // 32))]
        hidden.append(torch.cat(parts))
    model.to("cpu")
    error = (hidden[0] - hidden[1]).norm() / hidden[0].norm()
    assert error < 0.03, f"relative error {error:.4f}"
