"""Who decides about the cache of an enabled model, how transformers calls kvq's attention, and which models are refused before they run."""

import copy
import warnings
from collections.abc import Callable
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
from transformers_families import eager_twin, make_model, prompts

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
IDS = prompts(1, 20)["input_ids"]
pytestmark = pytest.mark.usefixtures("torch_path")


def test_no_cache_is_no_cache_wherever_it_is_said() -> None:
    model = make_model("Llama")
    expected = eager_twin(model).generate(IDS, **GREEDY, use_cache=False)
    enable(model, "int2")
    config = GenerationConfig(**GREEDY, use_cache=False)
    assert torch.equal(model.generate(IDS, config), expected)
    assert torch.equal(model.generate(IDS, generation_config=config), expected)
    assert torch.equal(model.generate(IDS, **GREEDY, use_cache=False), expected)
    assert not torch.equal(model.generate(IDS, **GREEDY), expected)
    for in_generation_config, in_config in ((False, True), (None, False)):
        model.generation_config.use_cache, model.config.use_cache = in_generation_config, in_config
        assert torch.equal(model.generate(IDS, **GREEDY), expected)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # the old name is the caller's own
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_that_is_given_is_the_one_that_is_used(name: str) -> None:
    model = enable(make_model("Llama"), "int2")
    expected = eager_twin(disable(copy.deepcopy(model))).generate(IDS, **GREEDY)
    for cache in (DynamicCache(config=model.config), KVQCache(model.config, "none")):
        assert torch.equal(model.generate(IDS, **GREEDY, **{name: cache}), expected)
        assert int(cache.get_seq_length()) == 25
    out = model.generate(IDS, **GREEDY, return_dict_in_generate=True, use_cache=None, **{name: None})
    assert isinstance(out[GENERATE], KVQCache)


CONTRADICTIONS: list[tuple[Callable[[Any], dict[str, Any]], str]] = [
    (lambda config: {"use_cache": 0}, "use_cache"),
    (lambda config: {"use_cache": False, "cache": DynamicCache(config=config)}, "use_cache"),
    (lambda config: {"cache": DynamicCache(config=config), "past_key_values": DynamicCache(config=config)}, GENERATE),
]


@pytest.mark.parametrize(("kwargs", "argument"), CONTRADICTIONS)
def test_wishes_that_contradict_each_other_are_refused(kwargs: Callable[[Any], dict[str, Any]], argument: str) -> None:
    model = enable(make_model("Llama"), "int8")
    with pytest.raises(ArgumentError) as caught:
        model.generate(IDS, **GREEDY, **kwargs(model.config))
    assert caught.value.argument == argument


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


def test_kvq_itself_uses_no_deprecated_name() -> None:
    model = make_model("Llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        warnings.simplefilter("error", DeprecationWarning)
        calibrate(model, IDS)
        enable(model, "int8").generate(IDS, **GREEDY)


def test_attention_may_be_called_by_position_as_kvpress_does() -> None:
    own = ALL_ATTENTION_FUNCTIONS["kvq"]

    def wrapper(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, dropout: float = 0.0, **kwargs: Any) -> Any:
        return own(module, query, key, value, attention_mask, dropout, **kwargs)

    model = make_model("Llama")
    expected = eager_twin(model).generate(IDS, **GREEDY)
    ALL_ATTENTION_FUNCTIONS["kvq"] = wrapper
    try:
        assert torch.equal(enable(model, "none").generate(IDS, **GREEDY), expected)
    finally:
        del ALL_ATTENTION_FUNCTIONS["kvq"]  # it lies over what is registered


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
