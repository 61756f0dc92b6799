"""Who decides about the cache of an enabled model, how transformers calls kvq's attention, and which models are refused before they run."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import model_table
import tiny_models
from kvq_core.errors import ArgumentError
from kvq_transformers import KVQCache, calibrate, disable, enable
from kvq_transformers.naming import GENERATE
from transformers_families import eager_twin, make_model, prompts

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
pytestmark = pytest.mark.usefixtures("torch_path")


def test_no_cache_is_no_cache_wherever_it_is_said() -> None:
    model, ids = make_model("Llama"), prompts(1, 20)["input_ids"]
    expected = eager_twin(model).generate(ids, **GREEDY, use_cache=False)
    enable(model, "int2")
    config = GenerationConfig(**GREEDY, use_cache=False)
    assert torch.equal(model.generate(ids, config), expected)
    assert torch.equal(model.generate(ids, generation_config=config), expected)
    assert torch.equal(model.generate(ids, **GREEDY, use_cache=False), expected)
    assert not torch.equal(model.generate(ids, **GREEDY), expected)
    for in_generation_config, in_config in ((False, True), (None, False)):
        model.generation_config.use_cache, model.config.use_cache = in_generation_config, in_config
        assert torch.equal(model.generate(ids, **GREEDY), expected)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # the old name is the caller's own
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_that_is_given_is_the_one_that_is_used(name: str) -> None:
    model = enable(make_model("Llama"), "int2")
    ids = prompts(1, 20)["input_ids"]
    expected = eager_twin(disable(copy.deepcopy(model))).generate(ids, **GREEDY)
    for cache in (DynamicCache(config=model.config), KVQCache(model.config, "none")):
        assert torch.equal(model.generate(ids, **GREEDY, **{name: cache}), expected)
        assert int(cache.get_seq_length()) == 25
    out = model.generate(ids, **GREEDY, return_dict_in_generate=True, use_cache=None, **{name: None})
    assert isinstance(out[GENERATE], KVQCache)


@pytest.mark.parametrize(
    ("kwargs", "argument"),
    [
        (lambda config: {"use_cache": 0}, "use_cache"),
        (lambda config: {"use_cache": False, "cache": DynamicCache(config=config)}, "use_cache"),
        (lambda config: {"cache": DynamicCache(config=config), "past_key_values": DynamicCache(config=config)}, GENERATE),
    ],
)
def test_wishes_that_contradict_each_other_are_refused(kwargs: Callable[[Any], dict[str, Any]], argument: str) -> None:
    model = enable(make_model("Llama"), "int8")
    with pytest.raises(ArgumentError) as caught:
        model.generate(prompts(1, 9)["input_ids"], **GREEDY, **kwargs(model.config))
    assert caught.value.argument == argument


def test_settings_are_those_of_when_it_was_enabled() -> None:
    modes: dict[Any, Any] = {"default": "int8", 0: "none"}
    model = enable(make_model("Llama"), modes)
    modes[0] = "int2"
    out = model.generate(**prompts(1, 9), **GREEDY, return_dict_in_generate=True)
    assert out[GENERATE].modes == {0: "none", 1: "int8_per_token_head"}


def test_the_models_default_implementation_comes_back() -> None:
    model = make_model("Llama")
    model.generation_config.cache_implementation = "static"
    out = enable(model, "int8").generate(**prompts(1, 9), **GREEDY, return_dict_in_generate=True)
    assert isinstance(out[GENERATE], KVQCache)
    model.generation_config.cache_implementation = "static"  # a later wish
    with pytest.raises(ArgumentError, match="static cache"):
        model.generate(**prompts(1, 9), **GREEDY)
    model.generation_config.cache_implementation = None
    assert disable(model).generation_config.cache_implementation == "static"


def test_an_enabled_model_may_draft_for_another() -> None:
    """All of its drafts are wrong, and rolled back over its window's edge."""
    model, drafter = make_model("Gemma2"), enable(make_model("Gemma2"), "none")
    drafter.lm_head.weight = torch.nn.Parameter(drafter.lm_head.weight.detach().roll(1, 0))
    drafter.generation_config.num_assistant_tokens = 5
    ids = prompts(1, 23)["input_ids"]
    expected = eager_twin(model).generate(ids, **GREEDY)
    assert torch.equal(enable(model, "none").generate(ids, **GREEDY, assistant_model=drafter), expected)


def test_kvq_itself_uses_no_deprecated_name() -> None:
    model = make_model("Llama")
    ids = prompts(1, 9)["input_ids"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        warnings.simplefilter("error", DeprecationWarning)
        calibrate(model, ids)
        enable(model, "int8").generate(ids, **GREEDY)


def test_attention_may_be_called_by_position_as_kvpress_does() -> None:
    own = ALL_ATTENTION_FUNCTIONS["kvq"]

    def wrapper(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, dropout: float = 0.0, **kwargs: Any) -> Any:
        return own(module, query, key, value, attention_mask, dropout, **kwargs)

    model = make_model("Llama")
    ids = prompts(1, 20)["input_ids"]
    expected = eager_twin(model).generate(ids, **GREEDY)
    ALL_ATTENTION_FUNCTIONS["kvq"] = wrapper
    try:
        assert torch.equal(enable(model, "none").generate(ids, **GREEDY), expected)
    finally:
        del ALL_ATTENTION_FUNCTIONS["kvq"]  # it lies over what is registered


@pytest.mark.parametrize(("family", "dtype"), [("Llama", torch.bfloat16), ("GptOss", torch.float16)])
@torch.no_grad()
def test_autocast(dtype: torch.dtype, family: str, capacity: dict[str, Any]) -> None:
    """Inside autocast and after it, a cache is as good as transformers' own."""
    # All experts at once: which of them a router takes may hang on the last bit.
    model = make_model(family, **({"num_experts_per_tok": 2} if family == "GptOss" else {}))
    ids = prompts(1, 21)["input_ids"]
    exact = eager_twin(model)(ids).logits
    errors = []
    for one, cache in (
        (eager_twin(model), DynamicCache(config=model.config)),
        (model, KVQCache(model.config, "none", **capacity)),
    ):
        with torch.autocast("cpu", dtype):
            found = [one(ids[:, :18], **{GENERATE: cache}).logits, one(ids[:, 18:19], **{GENERATE: cache}).logits]
        found.append(one(ids[:, 19:], **{GENERATE: cache}).logits)
        errors.append((torch.cat(found, 1).float() - exact).square().mean().sqrt())
    assert errors[1] <= 1.5 * errors[0]


SERVED = ["cohere2", "gemma2", "gpt2", "jamba", "llama", "nemotron_h"]
REFUSED = ["bloom", "diffllama", "falcon_h1", "hrm_text", "mamba", "mamba2", "mllama", "moshi", "mpt", "zamba"]


def test_no_model_type_is_silently_different_and_those_with_one_reason_share_a_line() -> None:
    served, refused = ([model_table.examine(name) for name in names] for names in (SERVED, REFUSED))
    assert [one.outcome for one in served] == [model_table.SAME] * len(served), served
    assert [one.outcome for one in refused] == [model_table.REFUSED] * len(refused), refused
    findings = [
        one
        for one in served + refused
        if one.model_type in ("bloom", "falcon_h1", "gemma2", "gpt2", "jamba", "mamba", "mamba2", "mpt", "zamba")
    ]
    lines = model_table.page([*findings, *(model_table.Finding(name, model_table.UNBUILT, "a | b") for name in "xy")]).splitlines()
    either = "layers of full or sliding-window attention, or without K and V"
    assert [[cell.strip("| ") for cell in line.split(" | ")] for line in lines if "`" in line and line.startswith("|")] == [
        ["full attention, sliding windows", "`gemma2`"],
        ["full attention", "`gpt2`"],
        ["full attention, recurrence or convolution", "`jamba`"],
        ["attention of its own", "one that goes through transformers' AttentionInterface", "`bloom`, `mpt`"],
        ["a layer of class `LinearAttentionAndFullAttentionLayer`", either, "`falcon_h1`, `zamba`"],
        ["layers that keep no K and V", "a model with attention layers", "`mamba`, `mamba2`"],
        ["a / b", "`x`, `y`"],
    ]


def test_the_page_lists_every_type() -> None:
    import transformers

    page = model_table.PAGE.read_text()
    if f"transformers {transformers.__version__} " in page:
        assert all(f"`{name}`" in page for name in tiny_models.causal_types())
    assert "## Different" not in page
