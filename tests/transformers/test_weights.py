"""What the weights say of keys: biases, behind the rotary embeddings of any family, and channels that norms make large.

Scores stay, and codes lose less.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.qwen2 import modeling_qwen2

from kvq_core import ArgumentError
from kvq_core.smoothing.calibration import KEY_BIAS, WEIGHTS, KeySmoothing, ModelSmoothing
from kvq_transformers import KVQCache, calibrate, enable
from kvq_transformers.key_bias import key_biases
from kvq_transformers.naming import GENERATE
from kvq_transformers.weights import weights_smoothing
from transformers_families import BIASED, SCALED, biased, logits_in_steps, make_model, prompts, uneven, whole_text, worst

pytestmark = pytest.mark.usefixtures("torch_path")
STEPS = [19, 40, 1, 1, 3, 1]
INPUTS = prompts(2, sum(STEPS), (0, 5))
IDS = prompts(1, 20)["input_ids"]
BOTH = "two embeddings, windows, norms"
NORMS = {family: partial(uneven, family) for family in ("Qwen3", "Gemma3", "Olmo2", "Lfm2")}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {name: partial(biased, name) for name in BIASED} | NORMS
MODELS |= {f"{name} of few tokens": partial(biased, name, sliding_window=4) for name in (BOTH, "yarn, sinks, windows")}


def losses(model: PreTrainedModel, capacity: dict[str, Any]) -> Callable[..., float]:
    """``loss(mode, **options)``: how far logits are from those of the whole text."""
    gold = whole_text(model, INPUTS)

    def loss(mode: str, **given: Any) -> float:
        found = logits_in_steps(model, INPUTS, KVQCache(model, mode, **given, **capacity), STEPS)
        return worst(found, gold, INPUTS["attention_mask"]) / float(gold.abs().max())

    return loss


def fingerprints(smoothing: Mapping[int, KeySmoothing] | None) -> dict[int, str]:
    return {layer: one.fingerprint for layer, one in (smoothing or {}).items()}


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_the_keys_as_they_were(name: str, capacity: dict[str, Any]) -> None:
    """Mode none stores what is left to float32's rounding: a wrong pair, rate or position is off by the whole bias. Windows of few tokens
    do not hide the rotary embedding."""
    model = MODELS[name]()
    known = weights_smoothing(model)
    for one in known.values():
        assert (one.rotary is not None) == (name not in NORMS) and (one.balance is not None) == (name in NORMS or BOTH in name)
    loss = losses(model, capacity)
    assert loss("none", smoothing=ModelSmoothing(known)) < 1e-4
    if name in NORMS:
        window = {"residual_length": 16, "residual_mode": "int8"}
        assert loss("int8") < 0.6 * loss("int8", smoothing=KEY_BIAS)
        assert loss("int4", **window) < loss("int4", smoothing=KEY_BIAS, **window)


def test_codes_lose_less_of_biased_keys(capacity: dict[str, Any]) -> None:
    """By default, where a model is enabled, and in a residual window."""
    model = biased("Qwen2")
    loss = losses(model, capacity)
    assert max(loss("int8"), loss("int8", smoothing="first_prefill")) < 0.5 * loss("int8", smoothing=None)
    assert loss("int8", residual_length=16, sink_tokens=20) < 0.1 * loss("int8", smoothing=None)
    in_int8 = loss("int8/fp8", residual_length=8, residual_mode="int8")
    assert in_int8 < 0.6 * loss("int8/fp8"), "keys of int8 rows without their rotary mean lose more than values in fp8"
    out = enable(model, "int8", **capacity).generate(**INPUTS, max_new_tokens=2, return_dict_in_generate=True)
    assert fingerprints(out[GENERATE].smoothing) == fingerprints(key_biases(model))


def test_weights_are_read_once_and_anew_when_they_change() -> None:
    """Of a vocabulary of one token; no position is asked for past the context's end, and the model stays as it was."""
    model = biased(BOTH, vocab_size=1, max_position_embeddings=60)
    attentions: list[Any] = [layer.self_attn for layer in model.model.layers]
    asked: list[int] = []
    model.model.rotary_emb.register_forward_hook(lambda module, inputs, out: asked.append(int(inputs[1].max())))
    attentions[1].train()
    before = [(module.training, len(module._forward_hooks)) for module in model.modules()]
    known, biases, shape = weights_smoothing(model), key_biases(model), attentions[0].k_proj.bias.shape
    assert max(asked) == 50
    asked.clear()
    assert weights_smoothing(model) is known and key_biases(model) is biases and not asked
    changes: list[tuple[int, Callable[[], object]]] = [
        (0, lambda: attentions[0].k_proj.bias.add_(1.0)),
        (1, lambda: setattr(attentions[1].k_proj, "bias", torch.nn.Parameter(attentions[1].k_proj.bias.neg()))),
        (1, lambda: attentions[1].k_norm.weight[3:4].fill_(5.0)),
        # Twice: the second may lie where the first one lay, which nobody has seen.
        *[(0, lambda: [setattr(attentions[0].k_proj, "bias", torch.nn.Parameter(torch.randn(shape))) for _ in range(2)])] * 10,
    ]
    for layer, change in changes:
        with torch.no_grad():
            change()
        old, known = [fingerprints(known), fingerprints(biases)], weights_smoothing(model)
        biases = key_biases(model)
        for earlier, now in zip(old, (known, biases), strict=True):
            assert [index for index, one in fingerprints(now).items() if one != earlier[index]] == [layer]
    assert before == [(module.training, len(module._forward_hooks)) for module in model.modules()]


def test_memory_that_runs_out_is_not_taken_for_an_unknown_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The biases would stay in the keys, for good."""

    def full(*_: object, **__: object) -> None:
        raise RuntimeError("Triton Error [CUDA]: out of memory")

    model = biased("Qwen2")
    with monkeypatch.context() as patch:
        patch.setattr(model.model, "forward", full)
        for use in (lambda: KVQCache(model, "int4"), lambda: calibrate(model, IDS, smoothing="rotary")):
            with pytest.raises(RuntimeError, match="out of memory"):
                use()
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
        calibrate(model, IDS, smoothing="rotary")


def test_norms_that_are_not_understood_are_left_alone_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert KVQCache(make_model("Llama"), "int4").smoothing is None and not caplog.records, "there are none"
        strange, unknown = uneven("Qwen3"), uneven("Qwen3")
        strange.model.layers[1].self_attn.k_norm.weight = torch.nn.Parameter(torch.ones(3))
        strange.model.layers[1].self_attn.k_norm.forward = lambda x: x  # type: ignore[method-assign]
        assert set(weights_smoothing(strange)) == {0}
        unknown.config.rope_parameters = {**unknown.config.rope_parameters, "rope_type": "dynamic"}
        assert KVQCache(unknown, "int4").smoothing is None
    assert [record.message.split(" leave")[0] for record in caplog.records] == [
        "channels of keys of layer 1 stay as its norm",
        "channels of keys stay as the norms of Qwen3ForCausalLM",
    ]


@torch.no_grad()
def test_factors_are_those_of_pairs_and_groups() -> None:
    """Of a norm over all heads: queries of a group count alike, and both channels of a rotary pair have one factor."""
    model = make_model("Olmo2")
    attention = model.model.layers[0].self_attn
    size, heads = attention.head_dim, attention.k_proj.out_features // attention.head_dim
    even = weights_smoothing(model)[0].balance
    assert even is not None and torch.equal(even, torch.ones(heads, size))
    attention.k_norm.weight.view(heads, size)[0, 1] = 9.0  # mean square of its pair: 41
    attention.q_norm.weight.view(heads, -1, size)[-1, 0, 2] = 7.0  # and of the pair and the group
    found = weights_smoothing(model)[0].balance
    assert found is not None
    squares = torch.ones(heads, size, dtype=torch.float64)
    squares[0, [1, 1 + size // 2]] = 41.0
    squares[-1, [2, 2 + size // 2]] /= ((48 / attention.num_key_value_groups + 1) + 1) / 2
    torch.testing.assert_close((found / found[:, 5:6]).double(), squares**0.25, rtol=1e-5, atol=0)


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
    norms, both = uneven("Qwen3"), biased(BOTH)

    def found(model: PreTrainedModel, mode: str) -> dict[int, str]:
        cache = KVQCache(model, mode)
        model(IDS, **{GENERATE: cache})
        return fingerprints(cache.smoothing)

    for model in (norms, both):
        assert not found(model, "none") and found(model, "fp8") == fingerprints(weights_smoothing(model))
    assert not found(norms, "fp8_per_tensor") and found(both, "fp8_per_tensor") == fingerprints(key_biases(both))


@pytest.mark.parametrize(("make", "said"), [(NORMS["Qwen3"], "keys pass a norm"), (MODELS["Qwen2"], "keys have biases")])
@torch.no_grad()
def test_a_config_alone_is_warned_about(make: Callable[[], PreTrainedModel], said: str, caplog: pytest.LogCaptureFixture) -> None:
    """Once, where it matters."""
    plain, loud = make_model("Llama"), make()
    given = ((plain, "int4", WEIGHTS), (loud, "none", WEIGHTS), (loud, "int4", None), (loud, "int4", WEIGHTS))
    with caplog.at_level(logging.WARNING):
        for model, mode, smoothing in given:
            assert not caplog.records
            cache = KVQCache(model.config, mode, smoothing=smoothing)
            for _ in range(2):
                model(IDS, **{GENERATE: cache})
    assert cache.smoothing is None and [said in record.message for record in caplog.records] == [True]
