"""An enabled model: whose cache it uses, what its copies do, how transformers calls kvq's attention, and which models are refused."""

import copy
import pickle
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, GenerationConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import model_table
import tiny_models
from kvq_core.errors import ArgumentError
from kvq_transformers import KVQCache, calibrate, disable, enable
from kvq_transformers.naming import GENERATE
from transformers_families import eager_twin, fake_quantized_cache, logits_in_steps, make_model, prompts

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
INPUTS = prompts(1, 20)
IDS = INPUTS["input_ids"]
pytestmark = pytest.mark.usefixtures("torch_path")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"])
def test_a_model_and_its_copies_use_a_new_cache_each_time_until_they_are_disabled(copied: Callable[[Any], Any]) -> None:
    model = make_model("Llama")
    model.set_attn_implementation("sdpa")
    plain, twin = model.generate(IDS, **GREEDY), eager_twin(model)
    assert enable(enable(model, "int8"), {"default": "int2", 0: "int8"}) is model
    other = copied(model)
    for one in (model, model, other):
        out = one.generate(IDS, **GREEDY, return_dict_in_generate=True)
        assert isinstance(out[GENERATE], KVQCache) and out[GENERATE].modes == {0: "int8_per_token_head", 1: "int2_per_token_head"}
        expected = twin.generate(IDS, **GREEDY, **{GENERATE: fake_quantized_cache(twin.config, out[GENERATE].modes)})
        assert torch.equal(out.sequences, expected) and not torch.equal(out.sequences, plain)
    for one in (other, model):
        assert disable(one) is one and one.config._attn_implementation == "sdpa" and "generate" not in one.__dict__
        assert torch.equal(one.generate(IDS, **GREEDY), plain)
    other = copied(enable(model, "int8"))
    other.lm_head.weight.data.neg_()
    assert not torch.equal(*(one.generate(IDS, **GREEDY) for one in (model, other))), "a copy has weights of its own"


def test_what_was_given_may_change_afterwards() -> None:
    model, modes = make_model("Llama"), {"default": "int8", 0: "none"}
    smoothing = calibrate(model, IDS).smoothing
    cache = KVQCache(model, "int8", smoothing=smoothing)
    expected = logits_in_steps(model, INPUTS, copy.deepcopy(cache), [10, 10])
    enable(model, modes, smoothing=smoothing, max_cache_len=64, residual_length=8)  # type: ignore[arg-type]
    logits = GREEDY | {"output_logits": True, "return_dict_in_generate": True}
    before = model.generate(IDS, **logits)
    with torch.no_grad():
        model(IDS[:, :10], **{GENERATE: cache})
        modes[0] = "int2"
        for one in smoothing.values():
            one.mean.add_(50.0)
        torch.testing.assert_close(model(IDS[:, 10:], **{GENERATE: cache}).logits, expected[:, 10:])
    after = model.generate(IDS, **logits)
    torch.testing.assert_close(after.logits, before.logits)
    used = after[GENERATE]
    assert used.modes == {0: "none", 1: "int8_per_token_head"} and used.get_max_length() == 64
    assert used.layers[1].pages.exact_tensors[0].shape[-1] == 4 * model.config.head_dim


def test_a_generate_of_the_models_own_is_called_and_comes_back() -> None:
    model, calls = make_model("Llama"), []

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return type(self).generate(self, *args, **kwargs)

    own = model.generate = MethodType(counting, model)
    enable(enable(model, "int2"), "int8").generate(IDS, **GREEDY)
    assert isinstance(calls[0][GENERATE], KVQCache) and disable(model).generate == own


@pytest.mark.parametrize("mode", ["none", {"default": "none", -1: "int8"}], ids=str)
def test_an_early_exit_drafts_with_the_first_layers(mode: Any) -> None:
    model = make_model("Llama", num_hidden_layers=4)
    smoothing = calibrate(model, IDS).smoothing if mode == "none" else None
    expected = enable(model, mode, smoothing=smoothing).generate(IDS, **GREEDY)
    assert torch.equal(model.generate(IDS, **GREEDY, assistant_early_exit=2), expected)
    assert model.config.num_hidden_layers == 4


# -- whose cache ----------------------------------------------------------------------------------------------------------


def test_no_cache_is_no_cache_wherever_it_is_said() -> None:
    model = make_model("Llama")
    expected = eager_twin(model).generate(IDS, **GREEDY, use_cache=False)
    enable(model, "int2")
    config = GenerationConfig(**GREEDY, use_cache=False)
    for args, kwargs in (((IDS, config), {}), ((IDS,), {"generation_config": config}), ((IDS,), GREEDY | {"use_cache": False})):
        assert torch.equal(model.generate(*args, **kwargs), expected)
    assert not torch.equal(model.generate(IDS, **GREEDY), expected)
    for in_generation_config, in_config in ((False, True), (None, False)):
        model.generation_config.use_cache, model.config.use_cache = in_generation_config, in_config
        assert torch.equal(model.generate(IDS, **GREEDY), expected)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # the old name is the caller's own
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_that_is_given_is_the_one_that_is_used(name: str) -> None:
    model = make_model("Llama")
    expected = eager_twin(model).generate(IDS, **GREEDY)
    enable(model, "int2")
    for cache in (DynamicCache(config=model.config), KVQCache(model.config, "none")):
        assert torch.equal(model.generate(IDS, **GREEDY, **{name: cache}), expected)
        assert int(cache.get_seq_length()) == 25
    out = model.generate(IDS, **GREEDY, return_dict_in_generate=True, use_cache=None, **{name: None})
    assert isinstance(out[GENERATE], KVQCache)


def test_wishes_that_contradict_each_other_are_refused() -> None:
    model = enable(make_model("Llama"), "int8")
    one, other = (DynamicCache(config=model.config) for _ in range(2))
    contradictions: list[tuple[dict[str, Any], str]] = [
        ({"use_cache": 0}, "use_cache"),
        ({"use_cache": False, "cache": one}, "use_cache"),
        ({"cache": one, "past_key_values": other}, GENERATE),
    ]
    for kwargs, argument in contradictions:
        with pytest.raises(ArgumentError, match=f"^{argument}: "):
            model.generate(IDS, **GREEDY, **kwargs)
    with pytest.raises(ArgumentError, match="model: got LlamaConfig, need a transformers model with generate"):
        enable(model.config)


def test_the_models_default_implementation_comes_back() -> None:
    model = make_model("Llama")
    model.generation_config.cache_implementation = "static"
    out = enable(model, "int8").generate(IDS, **GREEDY, return_dict_in_generate=True)
    assert isinstance(out[GENERATE], KVQCache)
    model.generation_config.cache_implementation = "static"  # a later wish
    with pytest.raises(ArgumentError, match="static cache"):
        model.generate(IDS, **GREEDY)
    model.generation_config.cache_implementation = None
    assert disable(model).generation_config.cache_implementation == "static"


# -- how transformers calls kvq -------------------------------------------------------------------------------------------


def test_kvq_itself_uses_no_deprecated_name() -> None:
    model = make_model("Llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        warnings.simplefilter("error", DeprecationWarning)
        calibrate(model, IDS)
        enable(model, "int8").generate(IDS, **GREEDY)


def test_attention_may_be_called_by_position_as_kvpress_does(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ALL_ATTENTION_FUNCTIONS["kvq"]

    def wrapper(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, dropout: float = 0.0, **kwargs: Any) -> Any:
        return own(module, query, key, value, attention_mask, dropout, **kwargs)

    model = make_model("Llama")
    expected = eager_twin(model).generate(IDS, **GREEDY)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "kvq", wrapper)
    assert torch.equal(enable(model, "none").generate(IDS, **GREEDY), expected)


OUTCOMES = {model_table.SAME: ["cohere2", "gpt2", "jamba", "nemotron_h"], model_table.REFUSED: ["moshi", "mpt", "zamba"]}


def test_no_model_type_is_silently_different() -> None:
    """The table's own examination; its page names every type that there is."""
    for outcome, names in OUTCOMES.items():
        found = [model_table.examine(name) for name in names]
        assert [one.outcome for one in found] == [outcome] * len(names), found
        assert all(f"`{one.model_type}`" in model_table.page(found) for one in found)
    page = model_table.PAGE.read_text()
    assert "## Different" not in page
    if f"transformers {transformers.__version__} " in page:
        assert all(f"`{name}`" in page for name in tiny_models.causal_types())
