"""KVQCache in tiny models of each family, against transformers' own eager attention over its own cache."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, DynamicCache

import transformers_watch
from kvq_core import QuantKVBackend
from kvq_core.smoothing.calibration import FIRST_PREFILL
from kvq_transformers import KVQCache, calibrate
from kvq_transformers.attention import register
from kvq_transformers.naming import GENERATE
from transformers_families import CAPACITIES, FAMILIES, eager_twin, exact_twin, logits_in_steps, make_model, prompts, worst
from transformers_watch import Encode, Watch, through_mode

pytestmark = pytest.mark.usefixtures("torch_path")
QUANTIZED = ["int8", "fp8", "fp8_per_tensor", "int4", "int2"]
# A prompt, a chunk of one, drafts: as generate, chunked prefill and speculative decoding feed a model. Row 1 has 5 columns of padding.
STEPS = [19, 9, 1, 1, 3]
PADDING = (0, 5)
LENGTH = sum(STEPS)


@pytest.mark.parametrize("family", FAMILIES)
def test_unquantized_logits_are_as_good_as_eager_ones(family: str, capacity: dict[str, Any]) -> None:
    """Also with smoothed keys, through RoPE, a softcap and sinks: a mean that is added back to scores costs a rounding of it."""
    model, inputs = make_model(family), prompts(2, LENGTH, PADDING)
    exact = logits_in_steps(exact_twin(model), inputs, DynamicCache(config=model.config), STEPS)
    eager = logits_in_steps(eager_twin(model), inputs, DynamicCache(config=model.config), STEPS)
    mask, smoothed = inputs["attention_mask"], family in ("Llama", "Qwen2", "Gemma2", "GptOss")
    balanced = calibrate(model, **inputs, smoothing="balanced").smoothing if smoothed else None
    for smoothing, times in ((None, 2), (FIRST_PREFILL, 4), (balanced, 4))[: 3 if smoothed else 1]:
        found = logits_in_steps(model, inputs, KVQCache(model.config, "none", smoothing=smoothing, **capacity), STEPS)
        assert worst(found, exact, mask) <= times * worst(eager, exact, mask)


KINDS = [(family, kind) for family in FAMILIES for kind in ("plain", "balanced")] + [("Llama", "mean"), ("Gemma2", "mean"), ("Qwen2", None)]


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_every_mode_attends_over_what_it_stored(family: str, kind: str | None, capacity: dict[str, Any], watch: Watch) -> None:
    """Plain, scaled and smoothed: attention sees the keys and values that were written, to rounding, under a softcap and sinks as well."""
    model, inputs = make_model(family), prompts(2, LENGTH, PADDING)
    found: dict[str, Any] = {"smoothing": None}
    if kind != "plain":
        register()  # calibrate attends over pages of its own
        found = vars(calibrate(model, **inputs, smoothing=kind))
        AttentionInterface.register("kvq", watch.attention)
    for mode in QUANTIZED if kind == "plain" else ["fp8_per_tensor", "int4"]:
        watch.past, watch.calls, watch.worst = {}, 0, 0.0
        options = found if mode == "fp8_per_tensor" else {"smoothing": found["smoothing"]}
        cache = KVQCache(model.config, mode, **capacity, **options)
        logits_in_steps(model, inputs, cache, STEPS)
        assert watch.calls == len(STEPS) * len(cache.modes)
        assert 0 < watch.worst <= 1, mode


def test_one_scale_that_is_a_64th_off_would_be_seen(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered of the prompt has one row of one head stretched, as if kvq had stored another scale for it."""

    def stretched(half: str) -> Callable[..., torch.Tensor]:
        def through(backend: QuantKVBackend, encode: Encode, rows: torch.Tensor, scale: float | None) -> torch.Tensor:
            stored = through_mode(backend, encode, rows, scale)
            if rows.shape[2] == STEPS[0] and encode == {"key": backend.encode, "value": backend.encode_value}[half]:
                stored[0, 1, 12] *= 1 + 2.0**-6
            return stored

        return through

    model, inputs = make_model("Gemma2"), prompts(2, LENGTH, PADDING)
    for mode in ("int8", "fp8_per_tensor", "int2"):
        for half in ("key", "value"):
            watch.past, watch.worst = {}, 0.0
            monkeypatch.setattr(transformers_watch, "through_mode", stretched(half))
            logits_in_steps(model, inputs, KVQCache(model.config, mode), STEPS)
            assert watch.worst > 1, (mode, half)


@pytest.mark.parametrize("family", ["GptOss", "Lfm2", "Qwen3Next"])
def test_greedy_tokens_are_those_of_eager_attention(family: str, capacity: dict[str, Any]) -> None:
    model, inputs = make_model(family), prompts(2, 21, PADDING)
    options = {"max_new_tokens": 10, "do_sample": False}
    expected = eager_twin(model).generate(**inputs, **options)
    found = model.generate(**inputs, **options, **{GENERATE: KVQCache(model.config, "none", **capacity)})
    assert torch.equal(found, expected)


def test_bfloat16_is_as_good_as_eager() -> None:
    model, inputs = make_model("Llama", torch.bfloat16), prompts(2, LENGTH, PADDING)
    exact = logits_in_steps(exact_twin(model), inputs, DynamicCache(config=model.config), STEPS)
    eager = logits_in_steps(eager_twin(model), inputs, DynamicCache(config=model.config), STEPS)
    mask = inputs["attention_mask"]
    for capacity in CAPACITIES.values():
        found = logits_in_steps(model, inputs, KVQCache(model.config, "none", **capacity), STEPS)
        assert worst(found, exact, mask) <= 1.5 * worst(eager, exact, mask)


@pytest.mark.parametrize("head_dim", [112, 192])
def test_head_sizes_of_no_family_above(head_dim: int, watch: Watch) -> None:
    model, inputs = make_model("Llama", head_dim=head_dim), prompts(1, LENGTH)
    for mode in QUANTIZED:
        watch.past, watch.worst = {}, 0.0
        logits_in_steps(model, inputs, KVQCache(model.config, mode), STEPS)
        assert 0 < watch.worst <= 1, mode


def test_layers_in_modes_of_their_own(watch: Watch) -> None:
    model, inputs = make_model("Llama", num_hidden_layers=4), prompts(2, LENGTH, PADDING)
    cache = KVQCache(model.config, {"default": "int4", 0: "none", -1: "none", 2: "int2"})
    logits_in_steps(model, inputs, cache, STEPS)
    assert cache.modes == {0: "none", 1: "int4_per_token_head", 2: "int2_per_token_head", 3: "none"}
    assert 0 < watch.worst <= 1
    heads, size = 2, 64
    assert cache.bytes_per_token == heads * 2 * (4 * size * 2 + (size // 2 + 4) + (size // 4 + 4))
