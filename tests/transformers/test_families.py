"""KVQCache in tiny models of each family, against transformers' own eager attention over its own cache."""

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
from transformers_families import FAMILIES, eager_twin, exact_twin, logits_in_steps, make_model, prompts, worst
from transformers_watch import Encode, Watch, through_mode

pytestmark = pytest.mark.usefixtures("torch_path")
# A prompt, a chunk of one, drafts: as generate, chunked prefill and speculative decoding feed a model. Row 1 has 5 columns of padding.
STEPS = [19, 9, 1, 1, 3]
INPUTS = prompts(2, sum(STEPS), (0, 5))
IN_DTYPES = [(family, torch.float32) for family in FAMILIES] + [("Llama", torch.bfloat16)]


@pytest.mark.parametrize(("family", "dtype"), IN_DTYPES, ids=str)
def test_unquantized_logits_are_as_good_as_eager_ones(family: str, dtype: torch.dtype, capacity: dict[str, Any]) -> None:
    """Also with smoothed keys, through RoPE, a softcap and sinks: a mean that is added back to scores costs a rounding of it."""
    model, mask = make_model(family, dtype), INPUTS["attention_mask"]
    exact = logits_in_steps(exact_twin(model), INPUTS, DynamicCache(config=model.config), STEPS)
    eager = logits_in_steps(eager_twin(model), INPUTS, DynamicCache(config=model.config), STEPS)
    smoothed = dtype == torch.float32 and family in ("Llama", "Gemma2", "GptOss")
    balanced = calibrate(model, **INPUTS, smoothing="balanced").smoothing if smoothed else None
    allowed = ((None, 2 if dtype == torch.float32 else 1.5), (FIRST_PREFILL, 4), (balanced, 4))
    for smoothing, times in allowed if smoothed else allowed[:1]:
        found = logits_in_steps(model, INPUTS, KVQCache(model.config, "none", smoothing=smoothing, **capacity), STEPS)
        assert worst(found, exact, mask) <= times * worst(eager, exact, mask)


QUANTIZED = ["int8", "fp8", "fp8_per_tensor", "int4", "int2"]
WATCHED = [(family, "plain") for family in ("Phi3", "Gemma2", "GptOss", "Qwen3Next")]
WATCHED += [("Qwen2", None), ("Gemma2", "mean"), ("GptOss", "balanced"), ("Lfm2", "balanced")]


@pytest.mark.parametrize(("family", "kind"), WATCHED)
def test_every_mode_attends_over_what_it_stored(family: str, kind: str | None, capacity: dict[str, Any], watch: Watch) -> None:
    """Plain, scaled and smoothed: attention sees the keys and values that were written, to rounding, under a softcap and sinks as well."""
    model = make_model(family)
    found: dict[str, Any] = {"smoothing": None}
    if kind != "plain":
        register()  # calibrate attends over pages of its own
        found = vars(calibrate(model, **INPUTS, smoothing=kind))
        AttentionInterface.register("kvq", watch.attention)
    for mode in QUANTIZED if kind == "plain" else ["fp8_per_tensor", "int4"]:
        watch.past, watch.calls, watch.worst = {}, 0, 0.0
        options = found if mode == "fp8_per_tensor" else {"smoothing": found["smoothing"]}
        cache = KVQCache(model.config, mode, **capacity, **options)
        logits_in_steps(model, INPUTS, cache, STEPS)
        assert watch.calls == len(STEPS) * len(cache.modes)
        assert 0 < watch.worst <= 1, mode


@pytest.mark.parametrize("half", ["key", "value"])
def test_one_scale_that_is_a_64th_off_would_be_seen(half: str, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered of the prompt has one row of one head stretched, as if kvq had stored another scale for it."""

    def stretched(backend: QuantKVBackend, encode: Encode, rows: torch.Tensor, scale: float | None) -> torch.Tensor:
        stored = through_mode(backend, encode, rows, scale)
        if rows.shape[2] == STEPS[0] and encode == {"key": backend.encode, "value": backend.encode_value}[half]:
            stored[0, 1, 12] *= 1 + 2.0**-6
        return stored

    model = make_model("Gemma2")
    monkeypatch.setattr(transformers_watch, "through_mode", stretched)
    for mode in ("int8", "fp8_per_tensor", "int2"):
        watch.past, watch.worst = {}, 0.0
        logits_in_steps(model, INPUTS, KVQCache(model.config, mode), STEPS)
        assert watch.worst > 1, mode


def test_layers_in_modes_of_their_own(watch: Watch) -> None:
    model = make_model("Llama", num_hidden_layers=4)
    cache = KVQCache(model.config, {"default": "int4", 0: "none", -1: "none", 2: "int2"})
    logits_in_steps(model, INPUTS, cache, STEPS)
    assert cache.modes == {0: "none", 1: "int4_per_token_head", 2: "int2_per_token_head", 3: "none"}
    assert 0 < watch.worst <= 1
    heads, size = 2, 64
    assert cache.bytes_per_token == heads * 2 * (4 * size * 2 + (size // 2 + 4) + (size // 4 + 4))


@pytest.mark.parametrize(("family", "dtype"), [("Llama", torch.bfloat16), ("GptOss", torch.float16)])
@torch.no_grad()
def test_autocast(dtype: torch.dtype, family: str, capacity: dict[str, Any]) -> None:
    """Inside autocast and after it, a cache is as good as transformers' own."""
    # All experts at once: which of them a router takes may hang on the last bit.
    model = make_model(family, **({"num_experts_per_tok": 2} if family == "GptOss" else {}))
    ids, twin = prompts(1, 21)["input_ids"], eager_twin(model)
    exact, errors = twin(ids).logits, []
    for one, cache in ((twin, DynamicCache(config=model.config)), (model, KVQCache(model.config, "none", **capacity))):
        with torch.autocast("cpu", dtype):
            found = [one(ids[:, :18], **{GENERATE: cache}).logits, one(ids[:, 18:19], **{GENERATE: cache}).logits]
        found.append(one(ids[:, 19:], **{GENERATE: cache}).logits)
        errors.append((torch.cat(found, 1).float() - exact).square().mean().sqrt())
    assert errors[1] <= 1.5 * errors[0]
