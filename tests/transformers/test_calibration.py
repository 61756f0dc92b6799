"""Calibration of a Hugging Face model, in one pass: scales for fp8_per_tensor and smoothed keys; and smoothing by the first prompt."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from kvq_core.scales import LARGEST_CODE
from kvq_core.smoothing.calibration import FIRST_PREFILL, KeySmoothing
from kvq_transformers import KVQCache, calibrate, disable, enable
from kvq_transformers.naming import GENERATE
from transformers_families import eager_twin, exact_attention, make_model, prompts

pytestmark = pytest.mark.usefixtures("torch_path")
STEPS = [19, 9, 1, 1, 3]


@pytest.fixture
def recorded() -> Iterator[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
    """q, k and v of every call of the attention implementation ``recording``, [tokens, heads, size] of one row."""
    rows: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def attention(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        rows.append(tuple(x[0].transpose(0, 1) for x in (query, key, value)))  # type: ignore[arg-type]
        return exact_attention(module, query, key, value, *args, **kwargs)

    AttentionInterface.register("recording", attention)
    AttentionMaskInterface.register("recording", eager_mask)
    yield rows


@pytest.mark.parametrize(("family", "kind"), [("Llama", None), ("Gemma2", "mean"), ("GptOss", "balanced"), ("Lfm2", "balanced")])
def test_it_is_that_of_the_models_own_rows(family: str, kind: str | None, recorded: list[Any]) -> None:
    """In chunks shorter than the text, and than the window. Padding does not count."""
    model, ids, padding = make_model(family), prompts(1, 40)["input_ids"], torch.zeros(1, 9, dtype=torch.long)
    mask = torch.cat([padding, torch.ones_like(ids)], 1)
    padded = (ids,) if family == "Lfm2" else (torch.cat([padding, ids], 1), mask)  # a convolution reads padding
    found = calibrate(model, *padded, smoothing=kind, chunk=7)
    twin = eager_twin(model)
    twin.set_attn_implementation("recording")
    with torch.no_grad():
        twin(ids)
    layers = list(KVQCache(model.config, "none").modes)
    assert list(found.k_scale) == list(found.v_scale) == layers and len(recorded) == len(layers)
    assert (found.smoothing is None) == (kind is None)
    for layer, (q, k, v) in zip(layers, recorded, strict=True):
        stored = k
        if found.smoothing is not None:
            got, wanted = found.smoothing[layer], KeySmoothing.estimate(k, q if kind == "balanced" else None)
            torch.testing.assert_close(got.mean, wanted.mean, rtol=1e-3, atol=1e-4)
            stored = k - wanted.mean
            assert (got.balance is None) == (wanted.balance is None)
            if wanted.balance is not None:
                torch.testing.assert_close(got.balance, wanted.balance, rtol=1e-3, atol=1e-4)
                stored = stored / wanted.balance
        for scale, rows in ((found.k_scale[layer], stored), (found.v_scale[layer], v)):
            assert scale * LARGEST_CODE == pytest.approx(float(rows.abs().max()), rel=1e-3)


def test_scales_are_found_for_a_smoothing_that_is_there() -> None:
    model, ids = make_model("Llama"), prompts(2, 30)["input_ids"]
    first = calibrate(model, ids, smoothing="balanced")
    again = calibrate(model, ids, smoothing=first.smoothing)
    assert again.smoothing is first.smoothing
    assert again.k_scale == first.k_scale != calibrate(model, ids, smoothing=None).k_scale


def test_the_model_stays_as_it_was() -> None:
    """Whatever happens."""
    model, inputs = make_model("Llama"), prompts(1, 12)
    for implementation in (model.config._attn_implementation, "kvq"):
        if implementation == "kvq":
            enable(model, mode="int8")
        calibrate(model, **inputs)
        assert model.config._attn_implementation == implementation
        with pytest.raises(IndexError):
            calibrate(model, inputs["input_ids"] + 10_000)
        assert model.config._attn_implementation == implementation
    disable(model)


def test_scales_stay_when_pages_grow_and_are_copied() -> None:
    model = make_model("Llama", num_hidden_layers=3)
    inputs = prompts(1, 60)
    found = calibrate(model, **inputs, smoothing=None)
    modes = {"default": "fp8_per_tensor", 1: "int8"}
    cache = KVQCache(model.config, modes, k_scale=found.k_scale, v_scale=found.v_scale, block_size=8)
    for part in inputs["input_ids"].split(20, 1):
        model(part, **{GENERATE: cache})
    for one in (cache, copy.deepcopy(cache)):
        for layer in (0, 2):
            caches = one.layers[layer].pages.caches
            assert [float(caches.k_scale_cache), float(caches.v_scale_cache)] == [found.k_scale[layer], found.v_scale[layer]]
        assert one.layers[1].pages.caches.k_scale_cache.dim() == 3, "int8's own"


def test_enable_takes_scales() -> None:
    model, inputs = make_model("Llama"), prompts(1, 20)
    found = calibrate(model, **inputs)
    enable(model, mode="fp8_per_tensor", **vars(found))
    cache = model.generate(**inputs, max_new_tokens=3, return_dict_in_generate=True)[GENERATE]
    assert float(cache.layers[1].pages.caches.v_scale_cache) == found.v_scale[1]
    assert cache.smoothing.fingerprint == found.smoothing.fingerprint
    one = KVQCache(model.config, "fp8_per_tensor", v_scale=torch.tensor([0.25]))
    model(**inputs, **{GENERATE: one})
    assert [float(layer.pages.caches.v_scale_cache) for layer in one.layers] == [0.25, 0.25]


def test_padding_is_no_key(capacity: dict[str, Any]) -> None:
    model = make_model("Llama")
    means = []
    for padding in (0, 8):
        inputs = prompts(1, 12 + padding, (padding,))
        inputs["input_ids"][:, padding:] = torch.arange(3, 15)
        cache = KVQCache(model.config, "int4", smoothing=FIRST_PREFILL, **capacity)
        assert cache.smoothing is None
        positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        model(**inputs, position_ids=positions, **{GENERATE: cache})
        assert cache.smoothing is not None
        means.append(cache.smoothing)
    for layer in means[0]:
        torch.testing.assert_close(means[0][layer].mean, means[1][layer].mean, rtol=1e-3, atol=1e-4)


def test_a_first_text_with_nan_spoils_no_later_one(capacity: dict[str, Any]) -> None:
    model = make_model("Llama")
    cache = KVQCache(model.config, "int4", smoothing=FIRST_PREFILL, **capacity)
    embeddings = model.get_input_embeddings()(torch.arange(3, 15)[None])
    for bad in (float("nan"), float("inf")):
        model(inputs_embeds=embeddings * bad, **{GENERATE: cache})
        cache.reset()
        assert model(inputs_embeds=embeddings, **{GENERATE: cache}).logits.isfinite().all()


def test_what_one_cache_found_serves_the_next(capacity: dict[str, Any]) -> None:
    """And a copy has its own."""
    model = make_model("Llama")
    inputs = prompts(2, 15, (0, 4))
    first = KVQCache(model.config, "int4", smoothing=FIRST_PREFILL, **capacity)
    waiting = copy.deepcopy(first)
    wanted = model.generate(**inputs, **{GENERATE: first}, max_new_tokens=5, do_sample=False)
    assert waiting.smoothing is None and first.smoothing is not None
    given = KVQCache(model.config, "int4", smoothing=first.smoothing, **capacity)
    assert torch.equal(model.generate(**inputs, **{GENERATE: given}, max_new_tokens=5, do_sample=False), wanted)
    assert given.smoothing is not None and given.smoothing.fingerprint == first.smoothing.fingerprint
    fingerprint = first.smoothing.fingerprint
    copied = copy.deepcopy(first)
    assert copied.smoothing is not None and copied.smoothing.fingerprint == fingerprint
