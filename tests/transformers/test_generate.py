"""generate() with a KVQCache: every way of decoding gives the tokens that eager attention over transformers' own cache gives.

For a quantized mode that cache holds what the mode makes of each row, so that the tokens must be the same there, too.
"""

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from kvq_transformers import KVQCache, disable, enable
from kvq_transformers.naming import GENERATE
from transformers_families import compiled, eager_twin, fake_quantized_cache, make_model, prompts

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
    "chunks of 7": {"prefill_chunk_size": 7},
    "beams": {"num_beams": 3},
    "beams returned": {"num_beams": 4, "num_return_sequences": 3, "early_stopping": True},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
}


WAYS_IN_MODES = [(way, "int4") for way in WAYS] + [("greedy", "none"), ("beams", "none"), ("beams", "int2")]


@pytest.mark.parametrize(("way", "mode"), WAYS_IN_MODES)
def test_padded_batches(model: PreTrainedModel, mode: str, capacity: dict[str, Any], way: str) -> None:
    options = WAYS[way]
    cache, twin, expected_cache = both(model, mode, capacity)
    inputs = prompts(3, 23, (0, 9, 22))
    torch.manual_seed(1)
    expected = twin.generate(**inputs, **(GREEDY | options), **{GENERATE: expected_cache})
    torch.manual_seed(1)
    assert torch.equal(model.generate(**inputs, **(GREEDY | options), **{GENERATE: cache}), expected)


@pytest.mark.parametrize("helped_by", ["prompt", "model"])
def test_assisted_decoding(model: PreTrainedModel, capacity: dict[str, Any], helped_by: str) -> None:
    """Drafts that are wrong are cropped: over the window's edge, too."""
    # Which drafts come does not change what the model makes of the accepted ones: plain decoding is what to expect.
    cache, twin, plain = both(model, "int4", capacity)
    inputs = prompts(1, 23)
    inputs["input_ids"] = inputs["input_ids"][:, :8].repeat(1, 3)[:, :23]
    options: dict[str, Any] = {"prompt_lookup_num_tokens": 3}
    if helped_by == "model":
        assistant = make_model("Llama", num_hidden_layers=1)
        assistant.generation_config.num_assistant_tokens = 3
        options = {"assistant_model": assistant}
    expected = twin.generate(**inputs, **GREEDY, **{GENERATE: plain})
    assert torch.equal(model.generate(**inputs, **GREEDY, **options, **{GENERATE: cache}), expected)


def test_a_conversation_goes_on_in_its_cache(model: PreTrainedModel, capacity: dict[str, Any]) -> None:
    cache, twin, expected_cache = both(model, "int4", capacity)
    text, mask = prompts(2, 15, (0, 4)).values()
    for turn in range(3):
        found = model.generate(input_ids=text, attention_mask=mask, **GREEDY, **{GENERATE: cache})
        assert torch.equal(found, twin.generate(input_ids=text, attention_mask=mask, **GREEDY, **{GENERATE: expected_cache}))
        more = prompts(2, 6 + turn)["input_ids"]
        text = torch.cat([found, more], 1)
        mask = torch.cat([mask, mask.new_ones(2, text.shape[1] - mask.shape[1])], 1)
    # The last token of a turn is not in the cache yet.
    assert int(cache.get_seq_length()) == found.shape[1] - 1


def test_enable_makes_plain_generate_use_the_cache() -> None:
    model = make_model("Llama")
    inputs, before = prompts(2, 23, (0, 9)), model.config._attn_implementation
    plain, twin = model.generate(**inputs, **GREEDY), eager_twin(model)

    def generated() -> Any:
        return model.generate(**inputs, **GREEDY, return_dict_in_generate=True)

    assert enable(model, mode="int2") is model
    for _ in range(2):  # a new cache each time
        out = generated()
        expected = twin.generate(**inputs, **GREEDY, **{GENERATE: fake_quantized_cache(twin.config, out[GENERATE].modes)})
        assert isinstance(out[GENERATE], KVQCache) and torch.equal(out.sequences, expected)
    assert not torch.equal(out.sequences, plain)
    other = copy.deepcopy(model)  # a model of its own
    with torch.no_grad():
        other.lm_head.weight.neg_()
    assert not torch.equal(other.generate(**inputs, **GREEDY), out.sequences)
    enable(model, mode={"default": "int8", 0: "none"}, max_cache_len=64, smoothing="first_prefill")
    cache = generated()[GENERATE]
    assert cache.modes == {0: "none", 1: "int8_per_token_head"} and cache.get_max_length() == 64 and list(cache.smoothing) == [0, 1]
    assert disable(model) is model
    assert torch.equal(model.generate(**inputs, **GREEDY), plain)
    assert model.config._attn_implementation == before and "generate" not in model.__dict__


def test_a_decode_step_compiles_once_and_as_one_graph() -> None:
    model = make_model("Gemma2")
    cache, twin, expected_cache = both(model, "int4", {"max_cache_len": 64})
    inputs, given = prompts(2, 23, (0, 9)), GREEDY | {"compile_config": compiled()}
    found = model.generate(**inputs, **given, **{GENERATE: cache})
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert torch.equal(found, twin.generate(**inputs, **GREEDY, **{GENERATE: expected_cache}))
    cache.reset()
    assert torch.equal(model.generate(**inputs, **given, **{GENERATE: cache}), found)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("early", [False, True], ids=["lazily", "early"])
def test_chunked_prefill_compiles(early: bool) -> None:
    """``generate`` compiles that, too. Pages made beforehand leave nothing to do inside the graph."""
    model, greedy = make_model("Llama", num_hidden_layers=1), GREEDY | {"max_new_tokens": 2}
    cache, twin, expected_cache = both(model, "int8", {"max_cache_len": 64})
    if early:
        cache.early_initialization(2, num_heads=2, head_dim=64, dtype=torch.float32, device=torch.device("cpu"))
    inputs = prompts(2, 24, (0, 9))
    found = model.generate(**inputs, **greedy, **{GENERATE: cache}, compile_config=compiled(early), prefill_chunk_size=12)
    assert torch.equal(found, twin.generate(**inputs, **greedy, **{GENERATE: expected_cache}))
