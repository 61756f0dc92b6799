"""Channels balanced by the weights of the norms of queries and keys: scores stay, and codes of unequal channels lose less."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel

from kvq_core import ArgumentError
from kvq_transformers import KVQCache
from kvq_transformers.qk_norm import norms_smoothing
from transformers_families import biased, eager_twin, logits_in_steps, make_model, prompts, worst

pytestmark = pytest.mark.usefixtures("torch_path")
STEPS = [19, 40, 1, 3, 1]


@torch.no_grad()
def uneven(family: str) -> PreTrainedModel:
    """A model whose norms make a few channels of keys large, as those of trained ones do, and theirs of queries small."""
    model = make_model(family)
    for layer in model.model.layers:
        for norm, by in ((layer.self_attn.k_norm, 12.0), (layer.self_attn.q_norm, 1 / 12.0)):
            effective = norm(torch.ones(1, norm.weight.numel()))[0]
            wanted = torch.where(torch.arange(norm.weight.numel()) % 16 == 3, by, 1.0)
            norm.weight += wanted - effective
    return model


@pytest.mark.parametrize("family", ["Qwen3", "Gemma3", "Olmo2"])
@torch.no_grad()
def test_scores_stay_and_codes_lose_less(family: str, capacity: dict[str, Any]) -> None:
    model, inputs = uneven(family), prompts(2, sum(STEPS), (0, 5))
    gold = eager_twin(model)(**inputs, position_ids=(inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)).logits

    def loss(mode: str, **given: Any) -> float:
        found = logits_in_steps(model, inputs, KVQCache(model, mode, **given, **capacity), STEPS)
        return worst(found, gold, inputs["attention_mask"])

    assert loss("none", smoothing="qk_norm") < 1e-3 * float(gold.abs().max())
    assert loss("int8", smoothing="qk_norm") < 0.6 * loss("int8", smoothing=None)
    window = {"residual_length": 16, "residual_mode": "int8"}
    assert loss("int4", smoothing="qk_norm", **window) < loss("int4", smoothing=None, **window)


def test_weights_are_read_once_and_anew_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model = uneven("Qwen3")
    first = norms_smoothing(model)
    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", None)  # nothing is asked again
        assert norms_smoothing(model) is first
    with torch.no_grad():
        model.model.layers[1].self_attn.k_norm.weight[3] = 5.0
    again = norms_smoothing(model)
    assert again[0].fingerprint == first[0].fingerprint and again[1].fingerprint != first[1].fingerprint


@torch.no_grad()
def test_beside_a_key_bias() -> None:
    model, inputs = biased("two embeddings, windows, norms"), prompts(2, sum(STEPS), (0, 5))
    gold = eager_twin(model)(**inputs, position_ids=(inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)).logits
    cache = KVQCache(model, "none", smoothing="qk_norm")
    found = logits_in_steps(model, inputs, cache, STEPS)
    assert cache.smoothing is not None and all(one.rotary is not None and one.balance is not None for one in cache.smoothing.values())
    assert worst(found, gold, inputs["attention_mask"]) < 2e-3 * float(gold.abs().max())


@torch.no_grad()
def test_factors_are_those_of_pairs_and_groups() -> None:
    """Of a norm over all heads: queries of a group count alike, and both channels of a rotary pair have one factor."""
    model = make_model("Olmo2")
    attention = model.model.layers[0].self_attn
    size, heads = attention.head_dim, attention.k_proj.weight.shape[0] // attention.head_dim
    even = {layer: one.balance for layer, one in norms_smoothing(model).items()}
    assert even[0] is not None and torch.equal(even[0], torch.ones(heads, size))
    attention.k_norm.weight.view(heads, size)[0, 1] = 9.0  # mean square of its pair: 41
    attention.q_norm.weight.view(heads, -1, size)[-1, 0, 2] = 7.0  # and of the pair and the group
    found = norms_smoothing(model)[0].balance
    assert found is not None
    relative = found / found[:, 5:6]
    group = attention.num_key_value_groups
    squares = torch.ones(heads, size, dtype=torch.float64)
    squares[0, [1, 1 + size // 2]] = 41.0
    squares[-1, [2, 2 + size // 2]] /= ((48 / group + 1) + 1) / 2
    torch.testing.assert_close(relative.double(), squares**0.25, rtol=1e-5, atol=0)


@torch.no_grad()
def test_a_norm_that_takes_the_mean_off_is_read_alike() -> None:
    model = uneven("Qwen3")
    wanted = norms_smoothing(model)[0].balance
    for layer in model.model.layers:
        for name in ("q_norm", "k_norm"):
            norm = torch.nn.LayerNorm(layer.self_attn.head_dim, bias=False)
            norm.weight.copy_(getattr(layer.self_attn, name).weight)
            setattr(layer.self_attn, name, norm)
    found = norms_smoothing(model)[0].balance
    assert wanted is not None and found is not None and wanted.std() > 0.1
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=0)


def test_what_has_no_norms_is_refused() -> None:
    with pytest.raises(ArgumentError, match="smoothing: got 'qk_norm' for LlamaForCausalLM, need one whose attention layers have q_norm"):
        KVQCache(make_model("Llama"), smoothing="qk_norm")
    with pytest.raises(ArgumentError, match="need a model in the place of its config"):
        KVQCache(LlamaConfig(), smoothing="qk_norm")
