"""Calibration of a Hugging Face model: scales for fp8_per_tensor and smoothed keys, found in one pass and used by every mode."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import eager_mask

from kvq_core import ArgumentError
from kvq_core.scales import LARGEST_CODE
from kvq_core.smoothing.calibration import FIRST_PREFILL, KeySmoothing, ModelSmoothing
from kvq_transformers import KVQCache, calibrate, disable, enable
from kvq_transformers.naming import GENERATE
from transformers_families import eager_twin, exact_attention, exact_twin, logits_in_steps, make_model, prompts, worst

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


@pytest.mark.parametrize(
    ("family", "kind"), [("Llama", None), ("Gemma2", "mean"), ("Qwen2", "balanced"), ("GptOss", "balanced"), ("Lfm2", "balanced")]
)
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


def keys_with_structure(model: Any, bias: float, spread: float) -> Any:
    """``model`` (Qwen2) with large key biases, or with channels of very unequal size.

    RoPE pairs channel i with channel i + size / 2, so that both are made alike; what keys gain queries lose. Biased are channels of low
    frequency: the mean of others fades within a text.
    """
    size = model.config.hidden_size // model.config.num_attention_heads
    factor = torch.logspace(spread, -spread, size // 2).repeat(2)
    biases = torch.zeros(size)
    biases[[28, 30]] = bias
    with torch.no_grad():
        for layer in model.model.layers:
            attention = layer.self_attn
            for linear, by in ((attention.k_proj, factor), (attention.q_proj, 1 / factor)):
                heads = linear.out_features // size
                linear.weight.mul_(by.repeat(heads)[:, None])
                linear.bias.mul_(by.repeat(heads))
            attention.k_proj.bias.add_(biases.repeat(attention.k_proj.out_features // size))
    return model


@pytest.mark.parametrize(("mode", "bias", "spread", "kind"), [("int2", 100.0, 0.0, "mean"), ("int4", 0.0, 1.0, "balanced")])
def test_it_takes_off_most_of_the_loss_where_keys_have_structure(mode: str, bias: float, spread: float, kind: str) -> None:
    model = keys_with_structure(make_model("Qwen2", initializer_range=0.1, hidden_size=256), bias, spread)
    inputs, other = prompts(2, 48, (0, 5)), prompts(3, 60)
    mask = inputs["attention_mask"].bool()
    exact = logits_in_steps(exact_twin(model), inputs, DynamicCache(config=model.config), [48])[mask].log_softmax(-1)

    def loss(kind: str | None) -> float:
        smoothing = kind and calibrate(model, **other, smoothing=kind).smoothing
        found = logits_in_steps(model, inputs, KVQCache(model.config, mode, smoothing=smoothing), [30, 18])
        return float((exact.exp() * (exact - found[mask].double().log_softmax(-1))).sum(-1).mean())

    assert loss(kind) < 0.5 * loss(None)
    assert kind == "mean" or loss(kind) < 0.5 * loss("mean"), "the balance, and not the mean alone"


@pytest.mark.parametrize("size", [1e-4, 1e4])
def test_scales_keep_small_and_large_values(size: float) -> None:
    """Values so small that e4m3 has no code for them, or beyond its largest: with a scale of 1 they are lost."""
    model, inputs = make_model("Llama"), prompts(2, sum(STEPS), (0, 5))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.mul_(size)
            layer.self_attn.o_proj.weight.div_(size)
    plain, found = logits_in_steps(model, inputs, KVQCache(model.config, "none"), STEPS), calibrate(model, **inputs, smoothing=None)

    def loss(mode: str = "fp8_per_tensor", **scales: Any) -> float:
        return worst(logits_in_steps(model, inputs, KVQCache(model.config, mode, **scales), STEPS), plain, inputs["attention_mask"])

    per_head = loss("fp8")
    assert loss(k_scale=found.k_scale, v_scale=found.v_scale) < 2 * per_head < 0.3 * loss()
    one = {"k_scale": max(found.k_scale.values()), "v_scale": torch.tensor([max(found.v_scale.values())])}
    assert loss(**one) < 2 * per_head, "one number for all layers"


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
    out = model.generate(**inputs, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    assert float(out[GENERATE].layers[1].pages.caches.v_scale_cache) == found.v_scale[1]
    assert out[GENERATE].smoothing.fingerprint == found.smoothing.fingerprint


@pytest.mark.parametrize(
    ("mode", "options", "message"),
    [
        ("fp8_per_tensor", {"k_scale": 0.0}, r"k_scale: got 0.0 for layer 0, need a positive, finite float32"),
        ("fp8_per_tensor", {"v_scale": {0: 1.0, 1: torch.ones(2)}}, r"v_scale: got .* for layer 1, need a number"),
        ("fp8_per_tensor", {"v_scale": {0: 1.0}}, r"v_scale: got none for layers \[1\], need one for each of \[0, 1\]: .*calibrate"),
        ("fp8_per_tensor", {"k_scale": {0: 1.0, 1: 1.0, 2: 1.0}}, r"k_scale: got one for layers \[2\]"),
        ("int4", {"k_scale": 1.0}, r"k_scale: got a scale, need None: no layer's mode takes one from the caller \(int4_per_token_head\)"),
        ("int4", {"smoothing": ModelSmoothing({})}, r"smoothing: got none for layers \[0, 1\]"),
    ],
)
def test_what_does_not_fit_is_named(mode: str, options: dict[str, Any], message: str) -> None:
    model = make_model("Llama")
    for make in (lambda: KVQCache(model.config, mode, **options), lambda: enable(model, mode=mode, **options)):
        with pytest.raises(ArgumentError, match=f"^{message}"):
            make()


IDS = prompts(1, 8)["input_ids"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"smoothing": FIRST_PREFILL}, r"smoothing: got 'first_prefill', need 'mean' or 'balanced' or 'rotary'"),
        ({"chunk": 0}, "chunk: got 0"),
        ({"input_ids": IDS[0]}, "input_ids: got shape"),
        ({"input_ids": IDS[:, :0]}, "input_ids: got shape"),
        ({"input_ids": IDS.float()}, "input_ids: got shape"),
        ({"attention_mask": torch.ones(1, 3)}, "attention_mask: got shape"),
        ({"smoothing": ModelSmoothing({})}, "smoothing: got none for layers"),
    ],
)
def test_calibrate_names_what_does_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{message}"):
        calibrate(make_model("Llama"), **({"input_ids": IDS} | options))
