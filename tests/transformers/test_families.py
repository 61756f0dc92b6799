"""KVQCache in tiny models of each family, against transformers' own eager attention over its own cache."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvq_core.smoothing.calibration import FIRST_PREFILL
from kvq_transformers import KVQCache, calibrate
from kvq_transformers.naming import GENERATE
from transformers_families import FAMILIES, eager_twin, exact_twin, fake_quantized_cache, logits_in_steps, make_model, prompts, worst

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
ONE_LAYER: list[tuple[str, str, str | None]] = [
    ("Phi3", "full_attention", "plain"),
    ("Gemma2", "sliding_attention", "plain"),
    ("GptOss", "full_attention", "plain"),
    ("Qwen3Next", "full_attention", "plain"),
    ("Qwen2", "full_attention", None),
    ("Gemma2", "full_attention", "mean"),
    ("GptOss", "sliding_attention", "balanced"),
]


@pytest.mark.parametrize(("family", "kind", "calibrated"), ONE_LAYER)
def test_every_mode_attends_over_what_it_stored(family: str, kind: str, calibrated: str | None, capacity: dict[str, Any]) -> None:
    """Plain, scaled and smoothed, under a softcap and sinks as well.

    The models have one layer, where nothing before it may round otherwise: both caches get the same rows, so that they hold the same codes.
    """
    model, mask = make_model(family, num_hidden_layers=1, layer_types=[kind]), INPUTS["attention_mask"]
    found: dict[str, Any] = {"smoothing": None}
    if calibrated != "plain":
        found = vars(calibrate(model, **INPUTS, smoothing=calibrated))
    twin = eager_twin(model)
    exact = logits_in_steps(exact_twin(model), INPUTS, DynamicCache(config=model.config), STEPS)
    rounding = worst(logits_in_steps(twin, INPUTS, DynamicCache(config=model.config), STEPS), exact, mask)
    for mode in QUANTIZED if calibrated == "plain" else ["fp8_per_tensor", "int4"]:
        options = found if mode == "fp8_per_tensor" else {"smoothing": found["smoothing"]}
        cache = KVQCache(model.config, mode, **capacity, **options)
        logits = logits_in_steps(model, INPUTS, cache, STEPS)
        expected = logits_in_steps(twin, INPUTS, fake_quantized_cache(twin.config, cache.modes, **options), STEPS)
        assert worst(logits, expected, mask) <= 4 * rounding, mode


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
