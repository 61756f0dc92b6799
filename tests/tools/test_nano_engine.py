"""The worked example of an engine: what it decodes equals a plain dense model, whatever the batching, and it takes any mode."""

import ast
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
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


def requests(count: int = 20) -> list[Request]:
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
        ({"chunk": 7, "padded": True}, lambda stats: stats.mixed_steps > 0),
        ({"chunk": 64, "padded": True, "block_size": 8, "num_blocks": 13}, lambda stats: stats.preemptions > 0),  # block 0 in use
        ({"chunk": 1000, "block_size": 64}, lambda stats: stats.steps < 40),
        ({"chunk": 64, "block_size": 8, "num_blocks": 13}, lambda stats: stats.preemptions > 0),
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


def as_llama(model: TinyModel) -> Any:
    """The same model of transformers."""
    transformers, c = pytest.importorskip("transformers"), model.config
    config = transformers.LlamaConfig(
        vocab_size=c.vocab,
        hidden_size=c.dim,
        intermediate_size=c.hidden,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_query_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_size,
        max_position_embeddings=c.max_len,
        rms_norm_eps=1e-5,
    )
    weights = {"model.embed_tokens": model.embed.weight, "model.norm": model.norm.weight, "lm_head": model.head.weight}
    for i, layer in enumerate(model.layers):
        parts = c.num_query_heads * c.head_size, *[c.num_kv_heads * c.head_size] * 2
        qkv = zip(("q_proj", "k_proj", "v_proj"), layer.qkv.weight.split(parts), strict=True)
        weights |= {f"model.layers.{i}.self_attn.{name}": weight for name, weight in qkv}
        gate, up = layer.gate_up.weight.chunk(2)
        weights |= {
            f"model.layers.{i}.self_attn.o_proj": layer.out.weight,
            f"model.layers.{i}.mlp.gate_proj": gate,
            f"model.layers.{i}.mlp.up_proj": up,
            f"model.layers.{i}.mlp.down_proj": layer.down.weight,
            f"model.layers.{i}.input_layernorm": layer.norm_attention.weight,
            f"model.layers.{i}.post_attention_layernorm": layer.norm_mlp.weight,
        }
    twin = transformers.LlamaForCausalLM(config).eval()
    twin.load_state_dict({f"{name}.weight": weight for name, weight in weights.items()})
    return twin


WINDOWS: list[tuple[str, dict[str, Any]]] = [
    ("int4", {"residual_length": 16, "sink_tokens": 4}),
    ("int2", {"residual_length": 8}),
    ("int2", {"residual_length": 24, "sink_tokens": 16, "residual_mode": "int8"}),
]


@pytest.mark.parametrize(("mode", "window"), WINDOWS, ids=str)
@torch.no_grad()
def test_a_residual_window_reads_what_that_of_transformers_does(model: TinyModel, mode: str, window: dict[str, Any]) -> None:
    """With prompts that come whole, whatever else is in the batch."""
    twin = as_llama(model)
    import kvq_transformers

    def generated(request: Request) -> list[int]:
        cache = kvq_transformers.KVQCache(twin, mode, **window)
        new, found = request.tokens, []
        while len(found) < request.max_new_tokens and found[-1:] != [nano_engine.SEPARATOR]:
            new = [int(twin(torch.tensor([new]), past_key_values=cache).logits[0, -1].argmax())]
            found += new
        return found

    def decoded(groups: list[list[Request]], **window: Any) -> list[list[int]]:
        for group in groups:
            run(exact_engine(model, mode, chunk=1000, **window), group)
        return [request.output for group in groups for request in group]

    window["max_sequences"] = 5
    together = decoded([requests()], **window)
    assert together == decoded([requests()], **window) == decoded([[request] for request in requests()], **window)
    del window["max_sequences"]
    assert together == [generated(request) for request in requests()]
    assert together != decoded([requests()])


@pytest.mark.parametrize(("mode", "window"), WINDOWS, ids=str)
def test_a_preempted_request_goes_on_from_its_tokens_alone(model: TinyModel, mode: str, window: dict[str, Any]) -> None:
    """As a prompt of as many tokens does, of which no exact row is left from before."""
    begun: dict[Request, int] = {}

    class Watched(Engine):
        def _preempt(self, request: Request) -> None:
            begun[request] = len(request.tokens)
            super()._preempt(request)

    options: dict[str, Any] = {"rows_dtype": torch.float32, "chunk": 1000, "block_size": 8, "max_sequences": 5, **window}
    run(Watched(model, get_backend(mode), num_blocks=16, **options), requests())
    assert any(length > request.num_prompt for request, length in begun.items())
    for request, length in begun.items():
        anew = Request(request.tokens[:length], request.max_new_tokens - (length - request.num_prompt))
        run(Engine(model, get_backend(mode), num_blocks=40, **options), [anew])
        assert anew.tokens == request.tokens


def test_no_more_requests_run_than_have_exact_rows(model: TinyModel) -> None:
    """Forks beyond them wait, and share nothing."""
    engine = exact_engine(model, "int2", block_size=8, residual_length=16, max_sequences=2)
    for request in requests(12):
        engine.add(request)
    most, forked = 0, []
    while engine.running or engine.waiting:
        engine.step()
        most = max(most, len(engine.running))
        if engine.running and len(forked) < 3:
            forked.append(engine.fork(engine.running[0], 4))
            assert len(engine.running) <= 2
    assert most == 2 and all(request.finished for request in forked)


@pytest.mark.quick
def test_cancelled_requests_give_their_blocks_back(model: TinyModel) -> None:
    engine = exact_engine(model, num_blocks=20, block_size=8)
    first, second, third = (Request(encode(text), 8) for text in ("one", "two", "three"))
    for request in (first, second):
        engine.add(request)
    engine.step()
    engine.add(third)
    for request in (first, third):
        engine.cancel(request)
    with pytest.raises(ValueError, match="neither waits nor runs"):
        engine.cancel(first)
    run(engine, [])
    assert second.finished and not first.finished and not third.output and len(engine.free) == 20


def test_sampling_depends_on_the_request_alone(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(seeds: list[int]) -> list[list[int]]:
        todo = [Request(encode("x = "), 16, temperature=3.0, seed=seed) for seed in seeds]
        exact_engine(model).run(todo)
        return [r.output for r in todo]

    first, second, third = drawn([1, 2, 1])
    assert first == third == drawn([1])[0] and first != second
    # A separator ends a request.
    monkeypatch.setattr(nano_engine, "sample", lambda logits, request: 0 if len(request.output) == 3 else 65)
    request = Request(encode("x"), 50, temperature=1.0)
    exact_engine(model).run([request])
    assert request.output == [65, 65, 65, 0] and request.text == "AAA"


@pytest.mark.parametrize("mode", MODES)
def test_every_installed_mode_decodes_out_of_its_own_pages(model: TinyModel, mode: str) -> None:
    backend = get_backend(mode)
    engine = Engine(model, backend, num_blocks=40, calibration=encode("calibration text"))
    todo = requests(6)
    engine.run(todo)
    assert all(r.finished for r in todo)
    row = backend.packed_head_size(model.config.head_size) * backend.cache_dtype(torch.bfloat16).itemsize + 4 * backend.needs_scale_caches
    assert engine.bytes_per_token == pytest.approx(2 * model.config.num_layers * model.config.num_kv_heads * row, rel=0.05)
    assert any(cache.key_cache.view(torch.uint8).any() for cache in engine.caches)


def test_given_scales_map_the_largest_value_to_half_the_largest_code(model: TinyModel) -> None:
    tokens = encode("some text to measure")
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.append((k, v))
        return dense_attention(layer, q, k, v)

    model(torch.tensor(tokens), torch.arange(len(tokens)), attend)
    for scales, rows in zip(nano_engine.given_scales(model, tokens), seen, strict=True):
        for scale, x in zip(scales, rows, strict=True):
            assert scale.shape == (1,) and float(scale) * 224 == pytest.approx(float(x.abs().max()), rel=1e-4)
    with pytest.raises(ValueError, match="calibration"):
        Engine(model, get_backend("fp8_per_tensor"))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("tokens", "count", "message"),
    [([], 5, "need at least 1"), ([1], 0, "need at least 1"), ([1] * 250, 7, "context of 256"), ([1] * 60, 5, "num_blocks")],
)
def test_requests_that_could_never_run_are_refused(model: TinyModel, tokens: list[int], count: int, message: str) -> None:
    engine = exact_engine(model, num_blocks=4)
    with pytest.raises(ValueError, match=message):
        engine.add(Request(tokens, count))
    assert not engine.waiting


# -- the command --------------------------------------------------------------------------------------------------------


@pytest.fixture
def third_party() -> Iterator[str]:
    class ThirdParty(NoneBackend):
        mode = "third_party_test"

    register_backend(ThirdParty)
    yield ThirdParty.mode
    unregister_backend(ThirdParty.mode)


def test_a_third_party_mode_is_listed_and_continues_a_file_of_any_bytes(
    third_party: str, small_weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        nano_engine.main(["--help"])
    listed = capsys.readouterr().out.replace("\n", " ")
    assert all(mode in listed for mode in [*MODES, third_party])
    (tmp_path / "prompt.txt").write_bytes(b"ab\xff")
    given = ["--prompt-file", str(tmp_path / "prompt.txt"), "--max-new-tokens", "3", "--model", str(small_weights), "--device", "cpu"]
    given += ["--residual-length", "16", "--sink-tokens", "4", "--residual-mode", "int8", "--max-sequences", "2"]
    assert nano_engine.main([*given, "--kv-cache-dtype", third_party]) == 0
    printed = capsys.readouterr()
    assert third_party in printed.err and printed.out.startswith("ab\ufffd")


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
        (["x", "--max-sequences", "0"], "max_sequences: got 0"),
        (["x", "--residual-length", "-1"], "residual_length: got -1"),
        (["x", "--sink-tokens", "4", "--residual-mode", "fp8_per_tensor"], "residual_mode: got fp8_per_tensor"),
        (["x", "--residual-mode", "int8"], "residual_mode: got int8_per_token_head, need none: without residual_length"),
        (["x", "--num-blocks", "2"], "num_blocks: got 2"),
        (["x", "--num-blocks", "0"], "num_blocks: got 0"),
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


def test_prompts_come_from_standard_input_in_a_real_process(small_weights: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--model", str(small_weights), "--max-new-tokens", "4", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, input="one\n\ntwo\n", capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("one") and "\ntwo" in done.stdout and done.stdout.count("-" * 80) == 2


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
