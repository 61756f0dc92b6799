"""What the weights say of channels of keys, whose norms make some of them large: scores stay, and codes lose less."""

import logging
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvq_core.smoothing.calibration import KEY_BIAS, WEIGHTS, KeySmoothing, ModelSmoothing
from kvq_transformers import KVQCache
from kvq_transformers.key_bias import key_biases
from kvq_transformers.naming import cache_argument
from kvq_transformers.weights import weights_smoothing
from transformers_families import biased, eager_twin, logits_in_steps, make_model, prompts, uneven, worst

pytestmark = pytest.mark.usefixtures("torch_path")
STEPS = [19, 40, 1, 3, 1]
OFF = {"smoothing": KEY_BIAS}


@pytest.mark.parametrize("family", ["Qwen3", "Gemma3", "Olmo2", "Lfm2"])
@torch.no_grad()
def test_scores_stay_and_codes_lose_less(family: str, capacity: dict[str, Any]) -> None:
    model, inputs = uneven(family), prompts(2, sum(STEPS), (0, 5))
    gold = eager_twin(model)(**inputs, position_ids=(inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)).logits

    def loss(mode: str, **given: Any) -> float:
        found = logits_in_steps(model, inputs, KVQCache(model, mode, **given, **capacity), STEPS)
        return worst(found, gold, inputs["attention_mask"])

    assert loss("none", smoothing=ModelSmoothing(weights_smoothing(model))) < 1e-3 * float(gold.abs().max())
    assert loss("int8") < 0.6 * loss("int8", **OFF)
    window = {"residual_length": 16, "residual_mode": "int8"}
    assert loss("int4", **window) < loss("int4", **OFF, **window)


def test_weights_are_read_once_and_anew_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model = uneven("Qwen3")
    first = weights_smoothing(model)
    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", None)  # nothing is asked again
        assert weights_smoothing(model) is first
    with torch.no_grad():
        model.model.layers[1].self_attn.k_norm.weight[3] = 5.0
    again = weights_smoothing(model)
    assert again[0].fingerprint == first[0].fingerprint and again[1].fingerprint != first[1].fingerprint


@torch.no_grad()
def test_beside_a_key_bias() -> None:
    model, inputs = biased("two embeddings, windows, norms"), prompts(2, sum(STEPS), (0, 5))
    gold = eager_twin(model)(**inputs, position_ids=(inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)).logits
    both = weights_smoothing(model)
    assert all(one.rotary is not None and one.balance is not None for one in both.values())
    found = logits_in_steps(model, inputs, KVQCache(model, "none", smoothing=ModelSmoothing(both)), STEPS)
    assert worst(found, gold, inputs["attention_mask"]) < 2e-3 * float(gold.abs().max())


@torch.no_grad()
def test_factors_are_those_of_pairs_and_groups() -> None:
    """Of a norm over all heads: queries of a group count alike, and both channels of a rotary pair have one factor."""
    model = make_model("Olmo2")
    attention = model.model.layers[0].self_attn
    size, heads = attention.head_dim, attention.k_proj.out_features // attention.head_dim
    even = {layer: one.balance for layer, one in weights_smoothing(model).items()}
    assert even[0] is not None and torch.equal(even[0], torch.ones(heads, size))
    attention.k_norm.weight.view(heads, size)[0, 1] = 9.0  # mean square of its pair: 41
    attention.q_norm.weight.view(heads, -1, size)[-1, 0, 2] = 7.0  # and of the pair and the group
    found = weights_smoothing(model)[0].balance
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
    wanted = weights_smoothing(model)[0].balance
    for layer in model.model.layers:
        for name in ("q_norm", "k_norm"):
            norm = torch.nn.LayerNorm(layer.self_attn.head_dim, bias=False)
            norm.weight.copy_(getattr(layer.self_attn, name).weight)
            setattr(layer.self_attn, name, norm)
    found = weights_smoothing(model)[0].balance
    assert wanted is not None and found is not None and wanted.std() > 0.1
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=0)


@torch.no_grad()
def test_modes_take_what_they_gain_from() -> None:
    """Keys of mode ``none`` stay as they are; a scale for the whole tensor knows no factors."""
    norms, both, ids = uneven("Qwen3"), biased("two embeddings, windows, norms"), prompts(1, 9)["input_ids"]

    def found(model: PreTrainedModel, mode: str) -> dict[int, str]:
        cache = KVQCache(model, mode)
        model(ids, **{cache_argument(model.forward): cache})
        return fingerprints(cache.smoothing or {})

    def fingerprints(smoothing: Mapping[int, KeySmoothing]) -> dict[int, str]:
        return {layer: one.fingerprint for layer, one in smoothing.items()}

    for model in (norms, both):
        assert not found(model, "none") and found(model, "fp8") == fingerprints(weights_smoothing(model))
    assert not found(norms, "fp8_per_tensor") and found(both, "fp8_per_tensor") == fingerprints(key_biases(both))


def test_what_cannot_be_told_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert not weights_smoothing(make_model("Llama"))
    with caplog.at_level(logging.WARNING):
        strange = uneven("Qwen3")
        strange.model.layers[1].self_attn.k_norm.weight = torch.nn.Parameter(torch.ones(3))
        strange.model.layers[1].self_attn.k_norm.forward = lambda x: x  # type: ignore[method-assign]
        assert set(weights_smoothing(strange)) == {0}
        unknown = uneven("Qwen3")
        unknown.config.rope_parameters = {**unknown.config.rope_parameters, "rope_type": "dynamic"}
        assert not weights_smoothing(unknown) and KVQCache(unknown, "int4").smoothing is None
    assert [record.message.split(" leave")[0] for record in caplog.records] == [
        "channels of keys of layer 1 stay as its norm",
        "channels of keys stay as the norms of Qwen3ForCausalLM",
    ]


@torch.no_grad()
def test_a_config_alone_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = uneven("Qwen3"), prompts(1, 9)["input_ids"]
    with caplog.at_level(logging.WARNING):
        for given in ({"smoothing": None}, {"smoothing": WEIGHTS}):
            assert not caplog.records
            model(ids, **{cache_argument(model.forward): KVQCache(model.config, "int4", **given)})
    assert ["keys pass a norm" in record.message for record in caplog.records] == [True]
