"""Calibration of a Hugging Face model, in one pass: scales for fp8_per_tensor and smoothed keys; and smoothing by the first prompt."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from kvq_core import ArgumentError
from kvq_core.scales import LARGEST_CODE
from kvq_core.smoothing.calibration import FIRST_PREFILL, KeySmoothing, ModelSmoothing
from kvq_transformers import KVQCache, calibrate, disable, enable
from kvq_transformers.key_bias import key_biases
from kvq_transformers.naming import GENERATE
from transformers_families import biased, eager_twin, logits_in_steps, make_model, own_attention, prompts

pytestmark = pytest.mark.usefixtures("torch_path")
IDS = prompts(2, 40)["input_ids"]


@pytest.fixture
def recorded() -> Iterator[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
    """q, k and v of every call of the attention implementation ``recording``, [tokens, heads, size] of one row."""
    rows: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def attention(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        rows.append(tuple(x[0].transpose(0, 1) for x in (query, key, value)))  # type: ignore[arg-type]
        return own_attention(module, query, key, value, *args, **kwargs)

    AttentionInterface.register("recording", attention)
    AttentionMaskInterface.register("recording", eager_mask)
    yield rows


@pytest.mark.parametrize(("family", "kind"), [("Llama", None), ("Gemma2", "mean"), ("GptOss", "balanced"), ("Lfm2", "balanced")])
def test_it_is_that_of_the_models_own_rows(family: str, kind: str | None, recorded: list[Any]) -> None:
    """In chunks shorter than the text, than the window, and than the padding, which does not count."""
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


@pytest.mark.parametrize("kind", ["rotary", "rotary_balanced", "rotary_ordered"])
def test_a_text_tells_the_mean_before_the_embedding(kind: str) -> None:
    """In chunks, the first of padding alone: of a biased model about its bias."""
    model = biased("Qwen2", size=8.0)
    found = calibrate(model, **prompts(2, 200, (40, 60)), smoothing=kind, chunk=37).smoothing
    assert found is not None
    for layer, wanted in key_biases(model).items():
        got = found[layer].rotary
        assert got is not None and wanted.rotary is not None and (found[layer].balance is None) == (kind == "rotary")
        assert (found[layer].order is None) == (kind != "rotary_ordered")
        positions = torch.arange(0, 2000, 37)
        assert (got.at(positions) - wanted.rotary.at(positions)).norm() < 0.25 * wanted.rotary.at(positions).norm()


def test_an_order_of_channels_is_for_modes_that_take_one() -> None:
    """Found out when the cache is made; layers in mode none leave it out."""
    model = make_model("Llama")
    ordered = calibrate(model, IDS, smoothing="rotary_ordered").smoothing
    with pytest.raises(ArgumentError, match=r"^smoothing: got an order of channels, for heads of 64, need one without: mode int4"):
        KVQCache(model, "int4", smoothing=ordered)
    cache = KVQCache(model, {"default": "int2", 0: "none"}, smoothing=ordered)
    with torch.no_grad():
        found = model(IDS, **{GENERATE: cache}).logits
    assert found.isfinite().all() and cache.smoothing is not None
    assert cache.smoothing[0].order is None and cache.smoothing[1].order is not None


def test_scales_are_found_for_a_smoothing_that_is_there() -> None:
    model = make_model("Llama")
    first = calibrate(model, IDS, smoothing="balanced")
    again = calibrate(model, IDS, smoothing=first.smoothing)
    assert again.smoothing is first.smoothing
    assert again.k_scale == first.k_scale != calibrate(model, IDS, smoothing=None).k_scale


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


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model: got NoneType"),
    ({"smoothing": "first_prefill"}, r"smoothing: got 'first_prefill', need 'mean' or 'balanced' or 'rotary'"),
    ({"smoothing": 3}, "smoothing: got 3"),
    ({"smoothing": ModelSmoothing({})}, "smoothing: got none for layers"),
    *(({"chunk": wrong}, f"chunk: got {wrong}") for wrong in (0, 1.5, True)),
    *(({"input_ids": wrong}, "input_ids: got shape") for wrong in (IDS[0], IDS[:, :0], IDS.float(), IDS.bool())),
    ({"input_ids": [[1]]}, "input_ids: got"),
    ({"attention_mask": torch.ones(1, 3)}, "attention_mask: got shape"),
    ({"attention_mask": torch.zeros_like(IDS)}, "attention_mask: got 0 everywhere"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_calibrate_names_what_does_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{message}"):
        calibrate(**({"model": make_model("Llama"), "input_ids": IDS} | options))


def test_scales_and_smoothing_go_where_they_are_given() -> None:
    """And stay when pages grow and are copied."""
    model, inputs = make_model("Llama", num_hidden_layers=3), prompts(1, 60)
    found = calibrate(model, **inputs)
    cache = KVQCache(model.config, {"default": "fp8_per_tensor", 1: "int8"}, **vars(found), block_size=8)
    for part in inputs["input_ids"].split(20, 1):
        model(part, **{GENERATE: cache})
    enable(model, "fp8_per_tensor", **vars(found))
    own = model.generate(**inputs, max_new_tokens=3, return_dict_in_generate=True)[GENERATE]
    for one in (cache, copy.deepcopy(cache), own):
        assert one.smoothing.fingerprint == found.smoothing.fingerprint
        for layer in (0, 2):
            caches = one.layers[layer].pages.caches
            assert [float(caches.k_scale_cache), float(caches.v_scale_cache)] == [found.k_scale[layer], found.v_scale[layer]]
    assert cache.layers[1].pages.caches.k_scale_cache.dim() == 3, "int8's own"
    plain = KVQCache(model.config, "fp8_per_tensor", v_scale=torch.tensor([0.25]))
    model(**inputs, **{GENERATE: plain})
    assert [float(layer.pages.caches.v_scale_cache) for layer in plain.layers] == [0.25] * 3


# -- by the first prompt --------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_padding_is_no_key(capacity: dict[str, Any]) -> None:
    """In a chunk of its own, it leaves the mean to the next."""
    model, text = make_model("Llama"), torch.arange(3, 23)[None]
    means = []
    for padding, steps in ((0, [20]), (8, [28]), (20, [16, 24])):
        inputs = prompts(1, 20 + padding, (padding,))
        inputs["input_ids"][:, padding:] = text
        cache = KVQCache(model.config, "int4", smoothing=FIRST_PREFILL, **capacity)
        assert cache.smoothing is None
        logits_in_steps(model, inputs, cache, steps)
        means.append([cache.smoothing[layer].mean for layer in (0, 1)])
    assert all(mean.any() for mean in means[0])
    for other in means[1:]:
        torch.testing.assert_close(other, means[0], rtol=1e-3, atol=1e-4)


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
    model, inputs = make_model("Llama"), prompts(2, 15, (0, 4))
    first = KVQCache(model.config, "int4", smoothing=FIRST_PREFILL, **capacity)
    waiting = copy.deepcopy(first)
    wanted = model.generate(**inputs, **{GENERATE: first}, max_new_tokens=5, do_sample=False)
    assert waiting.smoothing is None and first.smoothing is not None
    given = KVQCache(model.config, "int4", smoothing=first.smoothing, **capacity)
    assert torch.equal(model.generate(**inputs, **{GENERATE: given}, max_new_tokens=5, do_sample=False), wanted)
    for one in (given, copy.deepcopy(first)):
        assert one.smoothing is not None and one.smoothing.fingerprint == first.smoothing.fingerprint
