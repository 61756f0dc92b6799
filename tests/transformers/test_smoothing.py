"""Key smoothing in a KVQCache, decided by the first prompt, and not by its padding."""

import copy
from typing import Any

import pytest
import torch

from kvq_core.smoothing.calibration import FIRST_PREFILL
from kvq_transformers import KVQCache
from kvq_transformers.naming import GENERATE
from transformers_families import make_model, prompts

pytestmark = pytest.mark.usefixtures("torch_path")


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
