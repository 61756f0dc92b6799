"""Key smoothing in a KVQCache: exact where nothing is quantized, decided by the first prompt, and not by its padding."""

import copy
from typing import Any

import pytest
import torch

from kvq_core import ArgumentError
from kvq_core.smoothing.calibration import FIRST_PREFILL, ModelSmoothing
from kvq_core.testing import places
from kvq_transformers import KVQCache, enable
from kvq_transformers.naming import GENERATE
from transformers_families import eager_twin, make_model, prompts


@pytest.fixture(autouse=True)
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    places.enter("eager", monkeypatch)


@pytest.mark.parametrize("family", ["Qwen2", "Gemma2", "GptOss"])
def test_unquantized_logits_are_those_without(family: str, capacity: dict[str, Any]) -> None:
    """Through RoPE, a softcap and sinks."""
    model = make_model(family)
    inputs = prompts(2, 19, (0, 6))
    found = []
    for smoothing in (None, FIRST_PREFILL):
        cache = KVQCache(model.config, "none", smoothing=smoothing, **capacity)
        steps = [inputs, {"input_ids": torch.full((2, 3), 7)}]
        mask = inputs["attention_mask"]
        logits = [model(**steps[0], **{GENERATE: cache}).logits[:, -1]]
        mask = torch.cat([mask, torch.ones(2, 3, dtype=mask.dtype)], 1)
        logits.append(model(**steps[1], attention_mask=mask, **{GENERATE: cache}).logits[:, -1])
        found.append(torch.stack(logits))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)


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


def test_enable_takes_it_and_names_what_is_missing() -> None:
    model = make_model("Llama")
    plain = eager_twin(model).generate(**prompts(1, 9, (0,)), max_new_tokens=4, do_sample=False)
    enable(model, mode="none", smoothing=FIRST_PREFILL)
    assert torch.equal(model.generate(**prompts(1, 9, (0,)), max_new_tokens=4, do_sample=False), plain)
    with pytest.raises(ArgumentError, match="smoothing: got none for layers"):
        KVQCache(model.config, smoothing=ModelSmoothing({}))
    with pytest.raises(ArgumentError, match="smoothing: got 'mean'"):
        KVQCache(model.config, smoothing="mean")
