"""The worked example of an engine: what it decodes equals a plain dense model, whatever the batching, and it takes any mode.

These tests take the torch path on CPU even under TRITON_INTERPRET=1: kernels have suites of their own.
"""

import ast
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import nano_engine
from kvq_core import get_backend, list_backends, register_backend, unregister_backend
from kvq_core.evaluation.tiny_model import TinyModel, dense_attention
from kvq_core.none import NoneBackend
from nano_engine import Engine, Request, encode

ROOT = Path(__file__).parents[2]

PROMPTS = ["def f(x):", "a", "class Words:\n    one, two = 1, 2\n" * 2, "import os, sys", "# " + "x" * 61]
MODES = sorted({entry.mode for entry in list_backends()})


@pytest.fixture(autouse=True)
def torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture(scope="module")
def model(small_model: TinyModel) -> TinyModel:
    return small_model


@pytest.fixture(scope="module")
def weights(small_weights: Path) -> Path:
    return small_weights


def exact_engine(model: TinyModel, **options: int) -> Engine:
    """Mode ``none`` over float32 pages: equal to a dense model but for the order of sums."""
    return Engine(model, get_backend("none"), rows_dtype=torch.float32, **options)


def requests(count: int = 12) -> list[Request]:
    return [Request(encode(text), count + i) for i, text in enumerate(PROMPTS)]


def assert_greedy(model: TinyModel, request: Request) -> None:
    """Each generated token is the most likely one after all before it, by full recomputation, or ties with it."""
    tokens = torch.tensor(request.tokens)
    with torch.inference_mode():
        logits = model(tokens, torch.arange(len(tokens)), dense_attention)[request.num_prompt - 1 : -1]
    chosen = logits.gather(1, tokens[request.num_prompt :, None])[:, 0]
    assert request.finished and len(request.output) == len(chosen)
    assert ((logits.amax(-1) - chosen) < 1e-3).all()


def test_greedy_decoding_equals_dense_recomputation(model: TinyModel) -> None:
    todo = requests()
    stats = exact_engine(model, chunk=40, num_blocks=64).run(todo)
    assert stats.preemptions == 0 and stats.mixed_steps > 0, "the batch must have mixed prefill chunks with decode rows"
    for request in todo:
        assert_greedy(model, request)


@pytest.mark.parametrize(("chunk", "block_size"), [(1, 8), (7, 16), (1000, 64)])
def test_batching_does_not_change_a_token(model: TinyModel, chunk: int, block_size: int) -> None:
    together, alone = requests(), requests()
    exact_engine(model, chunk=chunk, block_size=block_size, num_blocks=64).run(together)
    for request in alone:
        exact_engine(model, chunk=256, num_blocks=16).run([request])
    assert [r.output for r in together] == [r.output for r in alone]


def test_preempted_requests_start_over_and_end_the_same(model: TinyModel) -> None:
    roomy, tight = requests(20), requests(20)
    exact_engine(model, num_blocks=64, block_size=8).run(roomy)
    engine = exact_engine(model, num_blocks=13, block_size=8, chunk=64)
    stats = engine.run(tight)
    assert stats.preemptions > 0 and sum(r.preemptions for r in tight) == stats.preemptions
    assert [r.output for r in tight] == [r.output for r in roomy]
    assert sorted(engine.free) == list(range(13)) and not engine.running and not engine.waiting


def test_requests_queue_when_the_pages_hold_one_at_a_time(model: TinyModel) -> None:
    todo = requests()
    stats = exact_engine(model, num_blocks=6, block_size=16).run(todo)
    for request in todo:
        assert_greedy(model, request)
    assert stats.steps > 40


def test_no_two_requests_ever_share_a_block(model: TinyModel) -> None:
    engine = exact_engine(model, num_blocks=14, block_size=8, chunk=50)
    for request in requests(20):
        engine.add(request)
    while engine.waiting or engine.running:
        engine.step()
        used = [block for request in engine.running for block in request.blocks]
        assert sorted(used + engine.free) == list(range(14))
        assert all(len(r.blocks) * 8 >= r.computed for r in engine.running)


def test_forks_share_full_blocks_and_go_on_alike(model: TinyModel) -> None:
    """Parent and greedy child end with the same tokens; what they share is given back by the last of them."""
    engine = exact_engine(model, num_blocks=20, block_size=8)
    parent = Request(encode("def function(argument):"), 16)
    engine.add(parent)
    while len(parent.output) < 5:
        engine.step()
    child = engine.fork(parent, 11)
    assert (len(child.blocks), child.computed) == (3, 24) and child.blocks == parent.blocks[:3]
    assert [engine.holders[block] for block in parent.blocks] == [2, 2, 2, 1]
    while engine.running:
        engine.step()
        live = [block for request in engine.running for block in request.blocks]
        assert all(engine.holders[block] == live.count(block) for block in range(20))
    assert child.tokens == parent.tokens
    assert sorted(engine.free) == list(range(20)) and not any(engine.holders)


@pytest.mark.quick
def test_a_fork_of_what_is_not_computed_waits(model: TinyModel) -> None:
    engine = exact_engine(model, num_blocks=20, block_size=8)
    parent = Request(encode("abc"), 4)
    engine.add(parent)
    child = engine.fork(parent, 4)
    assert list(engine.waiting) == [parent, child] and not child.blocks
    engine.run([])
    assert child.tokens == parent.tokens


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
    engine.run([])
    assert second.finished and not first.finished and not third.output
    assert sorted(engine.free) == list(range(20))


@pytest.mark.parametrize("chunk", [8, 64])
def test_padding_changes_no_token(model: TinyModel, chunk: int) -> None:
    plain, padded = requests(), requests()
    exact_engine(model, chunk=chunk, num_blocks=64).run(plain)
    exact_engine(model, chunk=chunk, num_blocks=64, padded=True).run(padded)
    assert [r.output for r in padded] == [r.output for r in plain]


def test_sampling_depends_on_the_request_alone(model: TinyModel) -> None:
    def drawn(seeds: list[int]) -> list[list[int]]:
        todo = [Request(encode("x = "), 16, temperature=3.0, seed=seed) for seed in seeds]
        exact_engine(model).run(todo)
        return [r.output for r in todo]

    first, second, third = drawn([1, 2, 1])
    assert first == third == drawn([1])[0] and first != second


def test_a_separator_ends_a_request(model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert any(cache.key.view(torch.uint8).any() for cache in engine.caches)


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


@pytest.mark.parametrize("options", [{"num_blocks": 0}, {"block_size": 12}, {"chunk": 0}])
def test_sizes_that_cannot_work_are_refused(model: TinyModel, options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        exact_engine(model, **options)


def test_a_mode_with_given_scales_needs_text_to_take_them_from(model: TinyModel) -> None:
    @register_backend
    class Given(NoneBackend):
        mode = "given_scales_test"
        reads_scales = True

    try:
        with pytest.raises(ValueError, match="calibration"):
            Engine(model, get_backend("given_scales_test"))
    finally:
        unregister_backend("given_scales_test")


# -- the command --------------------------------------------------------------------------------------------------------


@pytest.fixture
def third_party() -> Iterator[str]:
    class ThirdParty(NoneBackend):
        mode = "third_party_test"

    register_backend(ThirdParty)
    yield ThirdParty.mode
    unregister_backend(ThirdParty.mode)


def test_a_third_party_mode_is_listed_and_runs(third_party: str, weights: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        nano_engine.main(["--help"])
    listed = capsys.readouterr().out
    assert all(mode in listed.replace("\n", " ") for mode in [*MODES, third_party])
    assert (
        nano_engine.main(["a", "b", "--kv-cache-dtype", third_party, "--max-new-tokens", "3", "--model", str(weights), "--device", "cpu"])
        == 0
    )
    assert third_party in capsys.readouterr().err


@pytest.mark.quick
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--kv-cache-dtype", "int5"], "no installed package provides mode 'int5'"),
        (["--prompt-file", "/no/such/file"], "/no/such/file"),
        (["x", "--model", "/no/such/weights"], "/no/such/weights"),
        (["x", "--device", "abacus"], "--device: got 'abacus'"),
        (["x", "--block-size", "12"], "block_size: got 12"),
        (["x", "--num-blocks", "2"], "num_blocks: got 2"),
        (["x", "--max-new-tokens", "4000"], "context"),
        (["x", "--temperature", "-1"], "--temperature"),
        (["x", "--num-blocks", str(2**50)], ""),
        ([], "prompts: got none"),
    ],
)
def test_bad_arguments_end_with_status_2_and_one_line(
    arguments: list[str], message: str, weights: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    given = arguments if "--model" in arguments else [*arguments, "--model", str(weights)]
    with pytest.raises(SystemExit) as stop:
        nano_engine.main(given if "--device" in given else [*given, "--device", "cpu"])
    assert stop.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "error:" in last and message in last


def test_a_prompt_file_of_any_bytes_is_continued(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompt.txt").write_bytes(b"ab\xff")
    arguments = ["--prompt-file", str(tmp_path / "prompt.txt"), "--max-new-tokens", "3", "--model", str(weights), "--device", "cpu"]
    assert nano_engine.main(arguments) == 0
    assert capsys.readouterr().out.startswith("ab\ufffd")


def test_prompts_come_from_standard_input_in_a_real_process(weights: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "examples" / "nano_engine.py"),
        "--model",
        str(weights),
        "--max-new-tokens",
        "4",
        "--device",
        "cpu",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, input="one\n\ntwo\n", capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("one") and "\ntwo" in done.stdout and done.stdout.count("-" * 80) == 2


@pytest.mark.quick
def test_the_engine_knows_no_mode_and_no_model_library() -> None:
    tree = ast.parse((ROOT / "examples" / "nano_engine.py").read_text())
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
