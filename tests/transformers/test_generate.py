"""generate() with a KVQCache: every way of decoding gives the tokens that eager attention over transformers' own cache gives.

For a quantized mode that cache holds what the mode makes of each row, so that the tokens must be the same there, too.
"""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from kvq_transformers import KVQCache, enable
from kvq_transformers.naming import GENERATE
from transformers_families import biased, compiled, eager_twin, fake_quantized_cache, make_model, prompts

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
pytestmark = pytest.mark.usefixtures("torch_path")


def both(
    family: str, mode: str, capacity: dict[str, Any], **changes: Any
) -> tuple[PreTrainedModel, KVQCache, PreTrainedModel, DynamicCache]:
    """A model and a KVQCache; and its eager twin with the cache to expect the same of."""
    model = make_model(family, **changes)
    twin, cache = eager_twin(model), KVQCache(model.config, mode, **capacity)
    return model, cache, twin, fake_quantized_cache(twin.config, cache.modes)


# Gemma 2: a sliding window of 11, much shorter than the texts, and a full layer. Drafts that are wrong are cropped over its edge, too.
WAYS: list[tuple[str, str, dict[str, Any]]] = [
    ("Gemma2", "int4", {"prefill_chunk_size": 7}),
    ("Gemma2", "int4", {"num_beams": 4, "num_return_sequences": 3, "early_stopping": True}),
    ("Gemma2", "int4", {"prompt_lookup_num_tokens": 3}),
    ("Llama", "int2", {"num_beams": 3}),
    ("GptOss", "none", {}),
    ("Lfm2", "none", {}),
    ("Qwen3Next", "none", {}),
]


@pytest.mark.parametrize(("family", "mode", "options"), WAYS, ids=str)
def test_every_way_of_decoding(family: str, mode: str, capacity: dict[str, Any], options: dict[str, Any]) -> None:
    model, cache, twin, expected_cache = both(family, mode, capacity)
    inputs, plain = prompts(2, 23, (0, 9)) if mode == "none" else prompts(3, 23, (0, 9, 22)), options
    if "prompt_lookup_num_tokens" in options:  # of one row, which repeats itself
        inputs, plain = prompts(1, 23), {}
        inputs["input_ids"] = inputs["input_ids"][:, :8].repeat(1, 3)[:, :23]
    expected = twin.generate(**inputs, **GREEDY | plain, **{GENERATE: expected_cache})
    assert torch.equal(model.generate(**inputs, **GREEDY | options, **{GENERATE: cache}), expected)


def test_an_enabled_model_may_draft_for_another() -> None:
    """All of its drafts are wrong, and rolled back over its window's edge."""
    model, drafter = make_model("Gemma2"), enable(make_model("Gemma2"), "none")
    drafter.lm_head.weight = torch.nn.Parameter(drafter.lm_head.weight.detach().roll(1, 0))
    drafter.generation_config.num_assistant_tokens = 5
    ids = prompts(1, 23)["input_ids"]
    expected = eager_twin(model).generate(ids, **GREEDY)
    assert torch.equal(enable(model, "none").generate(ids, **GREEDY, assistant_model=drafter), expected)


def test_a_conversation_goes_on_in_its_cache(capacity: dict[str, Any]) -> None:
    model, cache, twin, expected_cache = both("Gemma2", "int4", capacity)
    text, mask = prompts(2, 15, (0, 4)).values()
    for turn in range(3):
        found = model.generate(input_ids=text, attention_mask=mask, **GREEDY, **{GENERATE: cache})
        assert torch.equal(found, twin.generate(input_ids=text, attention_mask=mask, **GREEDY, **{GENERATE: expected_cache}))
        more = prompts(2, 6 + turn)["input_ids"]
        text = torch.cat([found, more], 1)
        mask = torch.cat([mask, mask.new_ones(2, text.shape[1] - mask.shape[1])], 1)
    # The last token of a turn is not in the cache yet.
    assert int(cache.get_seq_length()) == found.shape[1] - 1


def test_a_decode_step_compiles_once_and_as_one_graph() -> None:
    """Under a softcap and in a window, with key biases and int8 rows in a residual window."""
    model, inputs = biased("softcap, windows"), prompts(2, 23, (0, 9))
    cache, plain = (KVQCache(model, "int4", max_cache_len=64, residual_length=16, residual_mode="int8") for _ in range(2))
    expected = model.generate(**inputs, **GREEDY, **{GENERATE: plain}, disable_compile=True)
    options = GREEDY | {"compile_config": compiled(), GENERATE: cache}
    for _ in range(2):
        assert torch.equal(model.generate(**inputs, **options), expected)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        cache.reset()


@torch.no_grad()
def test_a_growing_cache_in_a_compiled_model() -> None:
    """Its account is no part of the graph."""
    model, ids = make_model("Llama"), prompts(2, 24)["input_ids"]
    cache, step = KVQCache(model, "none"), torch.compile(model, backend="eager")
    torch._dynamo.reset()
    logits = [step(part, **{GENERATE: cache}).logits for part in (ids[:, :10], *ids[:, 10:].split(1, 1))]
    torch.testing.assert_close(torch.cat(logits, 1), eager_twin(model)(ids).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("early", [False, True], ids=["lazily", "early"])
def test_chunked_prefill_compiles(early: bool) -> None:
    """``generate`` compiles that, too. Pages made beforehand leave nothing to do inside the graph."""
    model, cache, twin, expected_cache = both("Llama", "int8", {"max_cache_len": 64}, num_hidden_layers=1 if early else 2)
    if early:
        cache.early_initialization(2, num_heads=2, head_dim=64, dtype=torch.float32, device=torch.device("cpu"))
    options = prompts(2, 24, (0, 9)) | {"max_new_tokens": 2, "do_sample": False}
    found = model.generate(**options, **{GENERATE: cache}, compile_config=compiled(early), prefill_chunk_size=12)
    assert torch.equal(found, twin.generate(**options, **{GENERATE: expected_cache}))
