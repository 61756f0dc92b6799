"""Models, caches and masks that do not fit each other: no result without an error is another than eager attention's."""

import copy
import io
import logging
import pickle
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from kvq_core import ArgumentError, KVQError
from kvq_transformers import KVQCache, calibrate, disable, enable
from kvq_transformers.key_bias import key_biases
from kvq_transformers.naming import GENERATE
from transformers_families import biased, eager_twin, logits_in_steps, make_model, prompts, worst

pytestmark = pytest.mark.usefixtures("torch_path")
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
IDS = prompts(1, 20)["input_ids"]
NEXT = torch.tensor([[5]])


@pytest.mark.parametrize("removed", [0, 1, 2])
def test_a_model_that_has_lost_layers_is_refused(removed: int, capacity: dict[str, Any]) -> None:
    model = make_model("Llama", num_hidden_layers=3)
    del model.model.layers[removed]
    for use in (lambda: KVQCache(model, "none", **capacity), lambda: enable(model, **capacity), lambda: calibrate(model, IDS)):
        with pytest.raises(ArgumentError, match=rf"num_hidden_layers: got 3, but the model has no layers \[{removed}\]"):
            use()


def test_of_a_config_alone_it_is_told_of(capacity: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("Llama", num_hidden_layers=3)
    del model.model.layers[2]
    with caplog.at_level(logging.WARNING):
        model.generate(IDS, **GREEDY, **{GENERATE: KVQCache(model.config, "none", smoothing=None, **capacity)})
    assert "stored 2 of 3 layers" in caplog.text
    with pytest.raises(ArgumentError, match="cache: got one made for 3 layers, need one made from this model, of 2"):
        enable(make_model("Llama"))(IDS, **{GENERATE: KVQCache(model.config, "none", **capacity)})


OFF: list[Callable[[PreTrainedModel], object]] = [disable, lambda model: model.set_attn_implementation("sdpa")]


@pytest.mark.parametrize("off", OFF, ids=["disable", "set"])
@torch.no_grad()
def test_a_filled_cache_behind_another_attention_gives_no_result(off: Callable[[PreTrainedModel], object]) -> None:
    model = make_model("Llama")
    cache = KVQCache(model, "none")
    model(IDS, **{GENERATE: cache})
    off(model)
    with pytest.raises(KVQError, match="never reached kvq's attention"):
        model(NEXT, **{GENERATE: cache})


@pytest.mark.parametrize("with_cache", [False, True])
@torch.no_grad()
def test_padding_in_a_window_is_refused_without_a_kvq_cache_too(with_cache: bool) -> None:
    model = enable(make_model("Gemma2"), "none")
    window, given = model.config.sliding_window, {GENERATE: DynamicCache(config=model.config)} if with_cache else {"use_cache": False}
    inputs = prompts(2, 3 * window, (0, 5))
    gold = eager_twin(model)(**inputs).logits
    assert worst(model(**inputs, **copy.deepcopy(given)).logits, gold, inputs["attention_mask"]) < 1e-3
    inputs["attention_mask"][1, 2 * window - 3 : 2 * window] = 0
    with pytest.raises(ArgumentError, match="padding between tokens, within the window"):
        model(**inputs, **given)


@pytest.mark.parametrize(
    "settings", [{"mode": "none"}, {"mode": {"default": "none", -1: "int8"}}, {"mode": "none", "smoothing": True}], ids=str
)
def test_an_early_exit_drafts_with_the_first_layers(settings: dict[str, Any]) -> None:
    model = make_model("Llama", num_hidden_layers=4)
    if "smoothing" in settings:
        settings = settings | {"smoothing": calibrate(model, IDS).smoothing}
    expected = enable(model, **settings).generate(IDS, **GREEDY)
    assert torch.equal(model.generate(IDS, **GREEDY, assistant_early_exit=2), expected)
    assert model.config.num_hidden_layers == 4


def test_what_enable_was_given_may_change_afterwards() -> None:
    model = make_model("Llama")
    smoothing = calibrate(model, IDS).smoothing
    cache = KVQCache(model, "int8", smoothing=smoothing)
    expected = [enable(model, "int8", smoothing=smoothing).generate(IDS, **GREEDY, output_logits=True, return_dict_in_generate=True).logits]
    expected.append(logits_in_steps(model, prompts(1, 20), copy.deepcopy(cache), [10, 10]))
    with torch.no_grad():
        model(IDS[:, :10], **{GENERATE: cache})
        for one in smoothing.values():
            one.mean.add_(50.0)
        found = model(IDS[:, 10:], **{GENERATE: cache}).logits
    torch.testing.assert_close(found, expected[1][:, 10:])
    again = model.generate(IDS, **GREEDY, output_logits=True, return_dict_in_generate=True).logits
    torch.testing.assert_close(again, expected[0])


def copied(model: PreTrainedModel) -> PreTrainedModel:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "copies", [copy.deepcopy, copied, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "save", "pickle"]
)
def test_copies_of_an_enabled_model_are_enabled(copies: Callable[[PreTrainedModel], PreTrainedModel]) -> None:
    model = make_model("Llama")
    model.set_attn_implementation("sdpa")
    plain = model.generate(IDS, **GREEDY)
    twin = copies(enable(model, {"default": "int2", 0: "int8"}))
    out = twin.generate(IDS, **GREEDY, return_dict_in_generate=True)
    assert torch.equal(out.sequences, model.generate(IDS, **GREEDY))
    assert out[GENERATE].modes == {0: "int8_per_token_head", 1: "int2_per_token_head"}
    for one in (twin, model):
        assert disable(one).config._attn_implementation == "sdpa"
        assert torch.equal(one.generate(IDS, **GREEDY), plain)


def test_a_generate_of_the_models_own_is_called_and_comes_back() -> None:
    model, calls = make_model("Llama"), []

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return type(self).generate(self, *args, **kwargs)

    own = model.generate = MethodType(counting, model)
    enable(enable(model, "int2"), "int8").generate(IDS, **GREEDY)
    assert isinstance(calls[0][GENERATE], KVQCache) and disable(model).generate == own


@torch.no_grad()
def test_a_copy_made_in_inference_mode_goes_on_outside(capacity: dict[str, Any]) -> None:
    model = make_model("Llama")
    cache = KVQCache(model, "int4", residual_length=16, sink_tokens=4, **capacity)
    with torch.inference_mode():
        model(IDS, **{GENERATE: cache})
        twins = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    expected = model(NEXT, **{GENERATE: cache}).logits
    for twin in twins:
        assert torch.equal(model(NEXT, **{GENERATE: twin}).logits, expected)


@pytest.mark.parametrize("name", ["two embeddings, windows, norms", "yarn, sinks, windows"])
def test_windows_of_few_tokens_do_not_hide_the_rotary_embedding(name: str) -> None:
    found = {window: key_biases(biased(name, sliding_window=window)) for window in (4, 11)}
    assert set(found[4]) == {0, 1}
    for layer, one in found[4].items():
        assert one.rotary is not None and one.fingerprint == found[11][layer].fingerprint


@torch.no_grad()
def test_sinks_may_take_all_of_a_fixed_cache() -> None:
    model = make_model("Llama")
    cache = KVQCache(model, "int2", sink_tokens=4, max_cache_len=20, block_size=32)
    found = logits_in_steps(model, prompts(2, 20, (0, 5)), cache, [9, 8, 1, 2])
    gold = eager_twin(model)(**prompts(2, 20, (0, 5))).logits
    assert worst(found, gold, prompts(2, 20, (0, 5))["attention_mask"]) < 1e-3


@pytest.mark.parametrize("smoothing", ["mean", "balanced", "rotary", "rotary_balanced"])
def test_chunks_of_padding_alone_count_for_nothing(smoothing: str) -> None:
    model = make_model("Llama")
    ids, mask = torch.cat([IDS, IDS], 1), torch.cat([torch.ones_like(IDS), torch.zeros_like(IDS)], 1)
    found, expected = (calibrate(model, *given, smoothing=smoothing, chunk=10).smoothing for given in ((ids, mask), (IDS,)))
    for layer, one in expected.items():
        torch.testing.assert_close(found[layer].mean, one.mean)


@torch.no_grad()
def test_a_first_chunk_of_padding_leaves_the_mean_to_the_next(capacity: dict[str, Any]) -> None:
    model = make_model("Llama")
    padded = {"input_ids": torch.cat([torch.zeros_like(IDS), IDS], 1), "attention_mask": torch.arange(40)[None] >= 20}
    cache, whole = (KVQCache(model, "int8", smoothing="first_prefill", **capacity) for _ in range(2))
    logits_in_steps(model, padded, cache, [16, 24])
    logits_in_steps(model, padded, whole, [40])
    for layer, one in whole.smoothing.items():
        assert one.mean.any()
        torch.testing.assert_close(cache.smoothing[layer].mean, one.mean)


@pytest.mark.parametrize(
    ("argument", "given"),
    [("chunk", {"chunk": 1.5}), ("chunk", {"chunk": True}), ("smoothing", {"smoothing": 3}), ("input_ids", {"input_ids": [[1]]}),
     ("input_ids", {"input_ids": IDS.bool()}), ("attention_mask", {"attention_mask": torch.zeros_like(IDS)}), ("model", {"model": None})],
)  # fmt: skip
def test_calibrate_names_what_is_wrong(argument: str, given: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError) as caught:
        calibrate(**{"model": make_model("Llama"), "input_ids": IDS} | given)
    assert caught.value.argument == argument
