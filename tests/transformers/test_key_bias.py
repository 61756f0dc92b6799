"""Key biases: read from the weights of any family, for its rotary embeddings, and given back to scores exactly."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.qwen2 import modeling_qwen2

from kvq_core import ArgumentError
from kvq_core.smoothing.calibration import WEIGHTS, ModelSmoothing
from kvq_transformers import KVQCache, calibrate, enable
from kvq_transformers.key_bias import key_biases
from kvq_transformers.naming import GENERATE
from transformers_families import BIASED, SCALED, biased, eager_twin, logits_in_steps, make_model, prompts, worst

pytestmark = pytest.mark.usefixtures("torch_path")
STEPS = [19, 40, 1, 1, 3, 1]


@pytest.mark.parametrize("name", BIASED)
@torch.no_grad()
def test_scores_are_those_of_the_keys_as_they_were(name: str, capacity: dict[str, Any]) -> None:
    """Mode none stores what is left to float32's rounding: a wrong pair, rate or position is off by the whole bias."""
    model, inputs = biased(name), prompts(2, sum(STEPS), (0, 5))
    assert set(key_biases(model)) == {0, 1}
    gold = eager_twin(model)(**inputs, position_ids=(inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)).logits
    cache = KVQCache(model, "none", smoothing=ModelSmoothing(key_biases(model)), **capacity)
    found = logits_in_steps(model, inputs, cache, STEPS)
    assert cache.smoothing is not None and all(one.rotary is not None for one in cache.smoothing.values())
    assert worst(found, gold, inputs["attention_mask"]) < 2e-3 * float(gold.abs().max())


@torch.no_grad()
def test_in_a_residual_window(capacity: dict[str, Any]) -> None:
    model, inputs = biased("Qwen2"), prompts(2, sum(STEPS), (0, 5))
    gold = logits_in_steps(model, inputs, KVQCache(model, "none", smoothing=None), STEPS)

    def loss(mode: str, **window: Any) -> float:
        return worst(logits_in_steps(model, inputs, KVQCache(model, mode, **window, **capacity), STEPS), gold, inputs["attention_mask"])

    assert loss("int8", residual_length=16, sink_tokens=20) < 0.1 * float(gold.std())
    in_int8 = loss("int8/fp8", residual_length=8, residual_mode="int8")
    assert in_int8 < 0.6 * loss("int8/fp8"), "keys of int8 rows without their rotary mean lose more than values in fp8"


def test_it_is_taken_off_by_default() -> None:
    model, inputs = biased("Qwen2"), prompts(2, 30, (0, 5))

    def loss(**given: Any) -> float:
        found, exact = (logits_in_steps(model, inputs, KVQCache(model, mode, **given), [20, 10]) for mode in ("int8", "none"))
        return float((found - exact).norm())

    plain = loss(smoothing=None)
    assert loss() < 0.5 * plain and loss(smoothing="first_prefill") < 0.5 * plain
    out = enable(model, "int8").generate(**inputs, max_new_tokens=2, return_dict_in_generate=True)
    assert {layer: one.fingerprint for layer, one in out[GENERATE].smoothing.items()} == {
        layer: one.fingerprint for layer, one in key_biases(model).items()
    }


def test_models_without_biases_have_none() -> None:
    model = make_model("Llama")
    assert key_biases(model) == {} and KVQCache(model, "int4").smoothing is None
    assert KVQCache(biased("Qwen2").config, "int4").smoothing is None, "a config has no weights"


def test_new_weights_are_read_anew() -> None:
    """Of a vocabulary of one token; no position is asked for past the context's end, and the model stays as it was."""
    model = biased("Qwen2", vocab_size=1, max_position_embeddings=60)
    asked: list[torch.Tensor] = []
    model.model.rotary_emb.register_forward_hook(lambda module, inputs, out: asked.append(inputs[1]))
    first = key_biases(model)
    assert key_biases(model) is first and max(int(positions.max()) for positions in asked) == 50
    projections = [layer.self_attn.k_proj for layer in model.model.layers]
    model.model.layers[1].train()
    before = [module.training for module in model.modules()]
    with torch.no_grad():
        projections[0].bias.add_(1.0)
    changed = key_biases(model)
    assert changed[0].fingerprint != first[0].fingerprint and changed[1].fingerprint == first[1].fingerprint
    projections[1].bias = torch.nn.Parameter(projections[1].bias * 2)
    assert key_biases(model)[1].fingerprint != changed[1].fingerprint
    assert before == [module.training for module in model.modules()]
    assert sum(len(module._forward_hooks) for module in model.modules()) == 1


def test_memory_that_runs_out_is_not_taken_for_an_unknown_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The biases would stay in the keys, for good."""

    def full(*_: object, **__: object) -> None:
        raise RuntimeError("Triton Error [CUDA]: out of memory")

    model = biased("Qwen2")
    with monkeypatch.context() as patch:
        patch.setattr(model.model, "forward", full)
        with pytest.raises(RuntimeError, match="out of memory"):
            KVQCache(model, "int4")
        with pytest.raises(RuntimeError, match="out of memory"):
            calibrate(model, prompts(1, 20)["input_ids"], smoothing="rotary")
    assert set(key_biases(model)) == {0, 1}


def of_a_table() -> PreTrainedModel:
    """Whose positions are rows of a table, past whose end a GPU's process dies."""
    shape = {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 40}
    model = transformers.OPTForCausalLM(transformers.OPTConfig(**shape, ffn_dim=64, word_embed_proj_dim=64)).eval()
    torch.nn.init.normal_(model.model.decoder.layers[0].self_attn.k_proj.bias)
    model.register_forward_pre_hook(lambda *arguments: pytest.fail("it was asked"))
    return model


LONG = {"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
LEFT_ALONE: dict[str, Callable[[], PreTrainedModel]] = {
    "dynamic": lambda: biased("llama3", rope_parameters=SCALED | {"rope_type": "dynamic"}),
    "longrope": lambda: biased("llama3", rope_parameters=SCALED | LONG),
    "layers [0, 1]": lambda: biased("Qwen2"),  # whose embedding is another than its config says
    "no rotary embedding": of_a_table,
}


@pytest.mark.parametrize("said", LEFT_ALONE)
def test_an_embedding_that_is_not_understood_is_left_alone(
    said: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a warning; asked for, it is refused."""
    apply = modeling_qwen2.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_qwen2, "apply_rotary_pos_emb", lambda q, k, cos, sin, *rest: apply(q, k, cos**3, sin, *rest))
    model = LEFT_ALONE[said]()
    with caplog.at_level(logging.WARNING):
        assert key_biases(model) == {}
    assert said in caplog.text
    with pytest.raises(ArgumentError, match=r"^model: "):
        calibrate(model, prompts(1, 20)["input_ids"], smoothing="rotary")


def test_a_text_tells_the_mean_before_the_embedding() -> None:
    """In chunks, with padding: of a biased model about its bias."""
    model = biased("Qwen2", size=8.0)
    inputs = prompts(2, 200, (0, 60))
    found = calibrate(model, **inputs, smoothing="rotary_balanced", chunk=37).smoothing
    assert found is not None
    for layer, wanted in key_biases(model).items():
        got = found[layer].rotary
        assert got is not None and wanted.rotary is not None and found[layer].balance is not None
        positions = torch.arange(0, 2000, 37)
        assert (got.at(positions) - wanted.rotary.at(positions)).norm() < 0.25 * wanted.rotary.at(positions).norm()


@torch.no_grad()
def test_a_config_alone_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    """Once, where it matters."""
    plain, loud, ids = make_model("Llama"), biased("Qwen2"), prompts(1, 9)["input_ids"]
    given = ((plain, "int4", WEIGHTS), (loud, "none", WEIGHTS), (loud, "int4", None), (loud, "int4", WEIGHTS))
    with caplog.at_level(logging.WARNING):
        for model, mode, smoothing in given:
            assert not caplog.records
            cache = KVQCache(model.config, mode, smoothing=smoothing)
            for _ in range(2):
                model(ids, **{GENERATE: cache})
    assert [record.message.count("keys have biases") for record in caplog.records] == [1]
