"""generate() with a KVQCache: every way of decoding gives the tokens that eager attention over transformers' own cache gives.

For a quantized mode that cache holds what the mode makes of each row, so that the tokens must be the same there, too.
"""

import copy
from typing import Any

import pytest
import torch
from transformers import CompileConfig, DynamicCache, PreTrainedModel

from kvq_transformers import KVQCache, disable, enable
from kvq_transformers.naming import GENERATE
from transformers_families import eager_twin, fake_quantized_cache, make_model, prompts

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
pytestmark = pytest.mark.usefixtures("torch_path")
# Gemma 2: a sliding window of 11, much shorter than the texts, and a full layer.
FAMILIES = ["Llama", "Gemma2"]


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return make_model(request.param)


def both(model: PreTrainedModel, mode: str, capacity: dict[str, Any]) -> tuple[KVQCache, PreTrainedModel, DynamicCache]:
    """A KVQCache for ``model``; and its eager twin with the cache to expect the same of."""
    twin = eager_twin(model)
    cache = KVQCache(model.config, mode, **capacity)
    return cache, twin, fake_quantized_cache(twin.config, cache.modes)


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "chunks of 1": {"prefill_chunk_size": 1},
    "chunks of 7": {"prefill_chunk_size": 7},
    "beams": {"num_beams": 3},
    "beams returned": {"num_beams": 4, "num_return_sequences": 3, "early_stopping": True},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
}


# A cache in int2 is one in int4 with other bytes: it takes the plain way, and one that reorders rows.
@pytest.mark.parametrize(
    ("way", "mode"), [(way, mode) for way in WAYS for mode in ("none", "int4", "int2") if mode != "int2" or way in ("greedy", "beams")]
)
def test_padded_batches(model: PreTrainedModel, mode: str, capacity: dict[str, Any], way: str) -> None:
    options = WAYS[way]
    cache, twin, expected_cache = both(model, mode, capacity)
    inputs = prompts(3, 23, (0, 9, 22))
    torch.manual_seed(1)
    expected = twin.generate(**inputs, **(GREEDY | options), **{GENERATE: expected_cache})
    torch.manual_seed(1)
    assert torch.equal(model.generate(**inputs, **(GREEDY | options), **{GENERATE: cache}), expected)


@pytest.mark.parametrize("mode", ["none", "int4"])
@pytest.mark.parametrize("helped_by", ["prompt", "model"])
def test_assisted_decoding(model: PreTrainedModel, mode: str, capacity: dict[str, Any], helped_by: str) -> None:
    """Drafts that are wrong are cropped: over the window's edge, too."""
    cache, twin, _ = both(model, mode, capacity)
    inputs = prompts(1, 23)
    inputs["input_ids"] = inputs["input_ids"][:, :8].repeat(1, 3)[:, :23]
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 3}
    if helped_by == "model":
        assistant = make_model("Llama", num_hidden_layers=1)
        assistant.generation_config.num_assistant_tokens = 3
        options = {"assistant_model": assistant}
    # Which drafts come does not change what the model makes of the accepted ones: plain decoding is what to expect.
    plain = fake_quantized_cache(twin.config, cache.modes)
    expected = twin.generate(**inputs, **GREEDY, **{GENERATE: plain})
    assert torch.equal(model.generate(**inputs, **GREEDY, **options, **{GENERATE: cache}), expected)


@pytest.mark.parametrize("mode", ["none", "int4"])
def test_a_conversation_goes_on_in_its_cache(model: PreTrainedModel, mode: str, capacity: dict[str, Any]) -> None:
    cache, twin, expected_cache = both(model, mode, capacity)
    text, mask = prompts(2, 15, (0, 4)).values()
    for turn in range(3):
        found = model.generate(input_ids=text, attention_mask=mask, **GREEDY, **{GENERATE: cache})
        assert torch.equal(found, twin.generate(input_ids=text, attention_mask=mask, **GREEDY, **{GENERATE: expected_cache}))
        more = prompts(2, 6 + turn)["input_ids"]
        text = torch.cat([found, more], 1)
        mask = torch.cat([mask, mask.new_ones(2, text.shape[1] - mask.shape[1])], 1)
    # The last token of a turn is not in the cache yet.
    assert int(cache.get_seq_length()) == found.shape[1] - 1


def test_a_prefix_serves_several_prompts(model: PreTrainedModel, capacity: dict[str, Any]) -> None:
    prefix, ends = prompts(1, 20)["input_ids"], [prompts(1, 4)["input_ids"], prompts(1, 5)["input_ids"]]
    cache, twin, _ = both(model, "int4", capacity)
    with torch.no_grad():
        model(prefix, **{GENERATE: cache})
    for end in ends:
        text = torch.cat([prefix, end], 1)
        found = model.generate(text, **GREEDY, **{GENERATE: copy.deepcopy(cache)})
        expected = twin.generate(text, **GREEDY, **{GENERATE: fake_quantized_cache(twin.config, cache.modes)}, prefill_chunk_size=20)
        assert torch.equal(found, expected)
    assert int(cache.get_seq_length()) == 20


def test_enable_makes_plain_generate_use_the_cache() -> None:
    model = make_model("Llama")
    inputs = prompts(2, 23, (0, 9))
    before = model.config._attn_implementation
    plain = model.generate(**inputs, **GREEDY)
    twin = eager_twin(model)
    assert enable(model, mode="int2") is model
    for _ in range(2):  # a new cache each time
        out = model.generate(**inputs, **GREEDY, return_dict_in_generate=True)
        assert isinstance(out[GENERATE], KVQCache)
        expected = twin.generate(**inputs, **GREEDY, **{GENERATE: fake_quantized_cache(twin.config, out[GENERATE].modes)})
        assert torch.equal(out.sequences, expected)
    assert not torch.equal(out.sequences, plain)
    enable(model, mode={"default": "int8", 0: "none"}, max_cache_len=64, smoothing="first_prefill")
    out = model.generate(**inputs, **GREEDY, return_dict_in_generate=True)
    assert out[GENERATE].modes == {0: "none", 1: "int8_per_token_head"} and out[GENERATE].get_max_length() == 64
    assert list(out[GENERATE].smoothing) == [0, 1]
    assert disable(model) is model
    assert torch.equal(model.generate(**inputs, **GREEDY), plain)
    assert model.config._attn_implementation == before and "generate" not in model.__dict__


def test_a_copy_of_an_enabled_model_is_a_model_of_its_own() -> None:
    model = enable(make_model("Llama"), mode="none")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.neg_()
    inputs = prompts(1, 9)
    assert not torch.equal(twin.generate(**inputs, **GREEDY), model.generate(**inputs, **GREEDY))


@pytest.mark.parametrize("mode", ["none", "int4"])
def test_a_decode_step_compiles_once_and_as_one_graph(model: PreTrainedModel, mode: str) -> None:
    compiled = CompileConfig(fullgraph=True, backend="aot_eager", mode="default")
    compiled._compile_all_devices = True
    cache, twin, expected_cache = both(model, mode, {"max_cache_len": 64})
    inputs = prompts(2, 23, (0, 9))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = model.generate(**inputs, **GREEDY, **{GENERATE: cache}, compile_config=compiled)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert torch.equal(found, twin.generate(**inputs, **GREEDY, **{GENERATE: expected_cache}))
    cache.reset()
    assert torch.equal(model.generate(**inputs, **GREEDY, **{GENERATE: cache}, compile_config=compiled), found)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("early", [False, True], ids=["lazily", "early"])
def test_chunked_prefill_compiles(early: bool) -> None:
    """``generate`` compiles that, too. Pages made beforehand leave nothing to do inside the graph."""
    model = make_model("Llama")
    compiled = CompileConfig(fullgraph=early, backend="aot_eager", mode="default")
    compiled._compile_all_devices = True
    cache, twin, expected_cache = both(model, "int8", {"max_cache_len": 64})
    if early:
        cache.early_initialization(2, num_heads=2, head_dim=64, dtype=torch.float32, device=torch.device("cpu"))
    inputs = prompts(2, 24, (0, 9))
    torch._dynamo.reset()
    found = model.generate(**inputs, **GREEDY, **{GENERATE: cache}, compile_config=compiled, prefill_chunk_size=8)
    assert torch.equal(found, twin.generate(**inputs, **GREEDY, **{GENERATE: expected_cache}))
