"""KVQCache with a residual window: the keys that a row reads exact, in models of each kind; and what is refused."""

import copy
import pickle
from typing import Any

import pytest
import torch

from kvq_core import ArgumentError
from kvq_core.testing import places
from kvq_transformers import KVQCache, enable
from kvq_transformers.fixed_window import FixedWindow
from kvq_transformers.naming import GENERATE
from transformers_families import compiled, logits_in_steps, make_config, make_model, prompts
from transformers_watch import Watch

STEPS = [19, 40, 1, 1, 3, 1]
"""A prompt, a chunk that is longer than the windows below, single tokens and drafts."""
WINDOWS: list[dict[str, Any]] = [
    {"residual_length": 8},
    {"sink_tokens": 4},
    {"residual_length": 16, "sink_tokens": 20},
    {"residual_length": 16, "sink_tokens": 20, "residual_mode": "int8"},
    {"residual_length": 8, "residual_mode": "int8"},
]


@pytest.fixture(autouse=True)
def torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    places.enter("eager", monkeypatch)
    plan = FixedWindow.plan

    def remembered(window: Any, *arguments: Any, **options: Any) -> Any:
        window.last = plan(window, *arguments, **options)
        return window.last

    monkeypatch.setattr(FixedWindow, "plan", remembered)


IN_FAMILIES = [("Llama", window) for window in WINDOWS]
IN_FAMILIES += [("Qwen3Next", WINDOWS[2]), ("Qwen3Next", WINDOWS[4]), ("Gemma2", WINDOWS[0]), ("Gemma2", WINDOWS[4])]


@pytest.mark.parametrize(("family", "window"), IN_FAMILIES, ids=str)
def test_attends_over_exact_and_packed_rows(family: str, window: dict[str, Any], capacity: dict[str, Any], watch: Watch) -> None:
    """Against float64 attention over just those rows, with padding in front of one row and within another."""
    model, inputs = make_model(family), prompts(2, sum(STEPS), (0, 5))
    for mode in ("int2", "int8"):
        watch.past, watch.calls, watch.worst = {}, 0, 0.0
        cache = KVQCache(model.config, mode, **window, **capacity)
        logits_in_steps(model, inputs, cache, STEPS)
        assert watch.calls == len(STEPS) * len(cache.modes)
        assert 0 < watch.worst <= 1, mode


@pytest.mark.parametrize("window", [WINDOWS[0], WINDOWS[1], WINDOWS[3]], ids=str)
@torch.no_grad()
def test_rows_that_moved_are_read_as_before(window: dict[str, Any], capacity: dict[str, Any]) -> None:
    """Reordered, copied, selected and cropped rows give what a cache does that was given their text alone."""
    order = [2, 0, 2] if capacity else [2, 0, 2, 1]
    model, ids = make_model("Llama"), prompts(3, 64)["input_ids"]

    def told(ids: torch.Tensor, rows: list[int]) -> torch.Tensor:
        cache = KVQCache(model.config, "int2", **window, **capacity)
        model(ids[:, :30], **{GENERATE: cache})
        for column in range(30, 40):
            model(ids[:, column : column + 1], **{GENERATE: cache})
        cache.reorder_cache(torch.tensor(rows)) if capacity else cache.batch_select_indices(torch.tensor(rows))
        cache = pickle.loads(pickle.dumps(copy.copy(cache)))
        model(ids[rows, 40:44], **{GENERATE: cache})
        cache.crop(-3)
        return model(ids[rows, 41:42], **{GENERATE: cache}).logits

    for row, found in zip(order, told(ids, order), strict=True):
        torch.testing.assert_close(found, told(ids[row : row + 1], [0])[0], rtol=1e-5, atol=1e-5)


def test_generates_what_exact_rows_give() -> None:
    """In windows longer than the text, int2 gives the scores of mode none: beams, several prompts, and another cache each time."""
    model, inputs = make_model("Llama"), prompts(2, 21, (0, 5))
    options = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}

    def scores(mode: str, **window: int) -> torch.Tensor:
        return torch.stack(enable(model, mode, **window).generate(**inputs, **options).logits)

    expected = scores("none")
    assert (scores("int2") - expected).abs().max() > 1e-2
    for _ in range(2):
        torch.testing.assert_close(scores("int2", residual_length=64), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_fixed_window_fills_again_after_a_long_roll_back() -> None:
    """What a later token has overwritten is read packed, the new tokens but those of the first block exact, and then all of the window."""
    model, ids = make_model("Llama"), prompts(1, 80)["input_ids"]
    cache = KVQCache(model.config, "int2", residual_length=16, max_cache_len=80)
    model(ids[:, :70], **{GENERATE: cache})
    cache.crop(-60)
    firsts = []
    for column in range(10, 50):
        model(ids[:, column : column + 1], **{GENERATE: cache})
        firsts.append(int(cache.layers[0].exact.last.key_stops[0]))
    assert firsts == [*range(11, 17), *[16] * 32, 32, 32]


def test_a_decode_step_compiles_as_one_graph() -> None:
    model, inputs = make_model("Llama", num_hidden_layers=1), prompts(2, 21, (0, 5))

    def tokens(mode: str, window: dict[str, Any], **given: Any) -> torch.Tensor:
        cache = KVQCache(model.config, mode, max_cache_len=64, **window)
        return model.generate(**inputs, max_new_tokens=6, do_sample=False, **given, **{GENERATE: cache})

    found = tokens("int2", {"residual_length": 64, "residual_mode": "int8"}, compile_config=compiled())
    assert torch.equal(found, tokens("int8", {}, disable_compile=True))


def test_bytes_count_exact_rows(capacity: dict[str, Any]) -> None:
    model, ids = make_model("Llama"), prompts(1, 30)["input_ids"]
    sizes = {}
    for length in (0, 16):
        cache = KVQCache(model.config, "int4", residual_length=length, **capacity)
        with torch.no_grad():
            model(ids, **{GENERATE: cache})
        sizes[length] = cache.nbytes
    heads, size, layers = model.config.num_key_value_heads, model.config.head_dim, model.config.num_hidden_layers
    assert sizes[16] - sizes[0] >= 16 * heads * size * 2 * 4 * layers


@pytest.mark.quick
@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("Llama", {"residual_length": -1}, "residual_length: got -1"),
        ("Llama", {"sink_tokens": 1.5}, "sink_tokens: got 1.5"),
        ("Llama", {"residual_mode": "int8"}, "residual_mode: got int8_per_token_head, need none: without"),
        ("Llama", {"residual_length": 8, "residual_mode": "fp8_per_tensor"}, "residual_mode: got fp8_per_tensor"),
        ("Gemma2", {"residual_length": 64, "sink_tokens": 4}, "sink_tokens: got 4 in a model with sliding windows"),
    ],
)
def test_refusals(family: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        KVQCache(make_config(family), "int4", **options)
