"""Key biases: read from the weights of any family, for its rotary embeddings, and given back to scores exactly."""

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from kvq_core import ArgumentError
from kvq_core.smoothing.calibration import KEY_BIAS
from kvq_transformers import KVQCache, calibrate, enable
from kvq_transformers.key_bias import embeddings, key_biases
from kvq_transformers.naming import GENERATE
from transformers_families import COMMON, compiled, eager_twin, logits_in_steps, make_model, prompts, worst

pytestmark = pytest.mark.usefixtures("torch_path")
STEPS = [19, 40, 1, 1, 3, 1]
SCALED = {"rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 = SCALED | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
BIASED: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2": ("Qwen2", {}),
    "interleaved, partial": ("Glm", {"attention_bias": True, "head_dim": 32, "partial_rotary_factor": 0.5}),
    "fused projections, partial": (
        "GPTNeoX",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
    ),
    "llama3": ("Llama", {"attention_bias": True, "rope_parameters": LLAMA3}),
    "linear": ("Llama", {"attention_bias": True, "rope_parameters": SCALED | {"rope_type": "linear"}}),
    "yarn, sinks, windows": ("GptOss", {"head_dim": 64, "sliding_window": 11, "rope_parameters": SCALED | {"rope_type": "yarn"}}),
    "two embeddings, windows, norms": ("Gemma3", {"head_dim": 64, "sliding_window": 11, "attention_bias": True}),
    "softcap, windows": ("Gemma2", {"head_dim": 64, "sliding_window": 11, "attention_bias": True, "attn_logit_softcapping": 20.0}),
}
"""Families by what is particular about their keys."""
_MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
_FURTHER = {"GptOss": {"num_local_experts": 2, "num_experts_per_tok": 1} | _MIXED, "Gemma3": _MIXED, "Gemma2": _MIXED}


def biased(name: str, size: float = 10.0, **changes: Any) -> PreTrainedModel:
    """A tiny model whose key biases are ``size`` times a standard normal, other biases small."""
    family, options = BIASED[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}{'Text' if family == 'Gemma3' else ''}Config")
    model = getattr(transformers, f"{family}ForCausalLM")(config(**(COMMON | _FURTHER.get(family, {}) | options | changes)))
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):
            large = any(part in parameter_name for part in ("k_proj", "query_key_value"))
            torch.nn.init.normal_(parameter, std=size if large else 0.1)
    return model.eval()


@pytest.mark.parametrize("name", BIASED)
@torch.no_grad()
def test_scores_are_those_of_the_keys_as_they_were(name: str, capacity: dict[str, Any]) -> None:
    """Mode none stores what is left to float32's rounding: a wrong pair, rate or position is off by the whole bias."""
    model, inputs = biased(name), prompts(2, sum(STEPS), (0, 5))
    assert set(key_biases(model)) == {0, 1}
    gold = eager_twin(model)(**inputs, position_ids=(inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)).logits
    cache = KVQCache(model, "none", **capacity)
    found = logits_in_steps(model, inputs, cache, STEPS)
    assert cache.smoothing is not None and all(one.rotary is not None for one in cache.smoothing.values())
    assert worst(found, gold, inputs["attention_mask"]) < 2e-3 * float(gold.abs().max())


def test_a_large_bias_no_longer_takes_up_the_levels() -> None:
    """Queries have nothing in a few pairs: any bias there leaves the model what it was."""
    plain = biased("Qwen2", size=0.0)
    loud = copy.deepcopy(plain)
    silent = torch.tensor([0, 1, 2, 5, 7])
    for model, size in ((plain, 0.0), (loud, 60.0)):
        for layer in model.model.layers:
            attention = layer.self_attn
            half = attention.head_dim // 2
            for projection in (attention.q_proj, attention.k_proj):
                heads = projection.out_features // attention.head_dim
                channels = (torch.arange(heads)[:, None, None] * attention.head_dim + silent[:, None] + torch.tensor([0, half])).flatten()
                if projection is attention.q_proj:
                    projection.weight.data[channels], projection.bias.data[channels] = 0.0, 0.0
                else:
                    projection.bias.data[channels] = size * torch.randn(len(channels), generator=torch.Generator().manual_seed(4))
    inputs = prompts(2, sum(STEPS))
    gold = logits_in_steps(plain, inputs, KVQCache(plain, "none"), STEPS)
    torch.testing.assert_close(logits_in_steps(loud, inputs, KVQCache(loud, "none"), STEPS), gold, rtol=1e-3, atol=1e-3)

    def loss(model: PreTrainedModel, **options: Any) -> float:
        found = logits_in_steps(model, inputs, KVQCache(model, "int4", **options), STEPS)
        kl = torch.nn.functional.kl_div(found.log_softmax(-1), gold.log_softmax(-1), log_target=True, reduction="sum")
        return float(kl / found[..., 0].numel())

    quiet = loss(plain)
    assert loss(loud, smoothing=None) > 10 * quiet
    assert loss(loud) < 1.5 * quiet and loss(loud, smoothing="first_prefill") < 1.5 * quiet


@torch.no_grad()
def test_rows_that_moved_keep_their_positions() -> None:
    model, ids = biased("yarn, sinks, windows"), prompts(3, 64)["input_ids"]

    def told(cache: KVQCache, rows: list[int]) -> torch.Tensor:
        model(ids[rows][:, :30], **{GENERATE: cache})
        cache.batch_select_indices(torch.arange(len(rows)))
        cache = pickle.loads(pickle.dumps(copy.copy(cache)))
        cache.activate_past_recording()
        model(ids[rows][:, 30:37], **{GENERATE: cache})
        cache.crop(-3)
        return model(ids[rows][:, 34:35], **{GENERATE: cache}).logits

    gold = told(KVQCache(model, "none", smoothing=None), [2, 0])
    torch.testing.assert_close(told(KVQCache(model, "none"), [2, 0]), gold, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_in_a_residual_window(capacity: dict[str, Any]) -> None:
    model, inputs = biased("Qwen2"), prompts(2, sum(STEPS), (0, 5))
    gold = logits_in_steps(model, inputs, KVQCache(model, "none", smoothing=None), STEPS)

    def loss(mode: str, **window: Any) -> float:
        return worst(logits_in_steps(model, inputs, KVQCache(model, mode, **window, **capacity), STEPS), gold, inputs["attention_mask"])

    for window in ({"residual_length": 8}, {"residual_length": 16, "sink_tokens": 20}):
        assert loss("int8", **window) < 0.1 * float(gold.std())
    in_int8 = loss("int8/fp8", residual_length=8, residual_mode="int8")
    assert in_int8 < 0.6 * loss("int8/fp8"), "keys of int8 rows without their rotary mean lose more than values in fp8"
    for smoothing in ("key_bias", "first_prefill"):
        with pytest.raises(ArgumentError, match="residual_mode: got int8_per_token_head, need none with sink_tokens"):
            KVQCache(model, "int4", sink_tokens=4, residual_mode="int8", smoothing=smoothing, **capacity)


def test_generate_takes_it_off_by_default() -> None:
    model, inputs = biased("Qwen2"), prompts(2, 30, (0, 5))
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}

    def scores(mode: str, **given: Any) -> torch.Tensor:
        return torch.stack(enable(model, mode, **given).generate(**inputs, **options).logits)

    gold = scores("none")
    assert (scores("int8") - gold).norm() < 0.5 * (scores("int8", smoothing=None) - gold).norm()


def test_a_decode_step_compiles_as_one_graph() -> None:
    model, inputs = biased("Qwen2", num_hidden_layers=1), prompts(2, 21, (0, 5))

    def tokens(**given: Any) -> torch.Tensor:
        cache = KVQCache(model, "int8", max_cache_len=64, residual_length=16)
        return model.generate(**inputs, max_new_tokens=6, do_sample=False, **given, **{GENERATE: cache})

    assert torch.equal(tokens(compile_config=compiled()), tokens(disable_compile=True))


def test_models_without_biases_have_none() -> None:
    model = make_model("Llama")
    assert key_biases(model) == {} and KVQCache(model, "int4").smoothing is None
    assert {len(one.pairs) for one in embeddings(model).values()} == {32}
    assert KVQCache(biased("Qwen2").config, "int4").smoothing is None, "a config has no weights"


def test_new_weights_are_read_anew() -> None:
    model = biased("Qwen2")
    first = key_biases(model)
    assert key_biases(model) is first
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.bias.add_(1.0)
    again = key_biases(model)
    assert again[0].fingerprint != first[0].fingerprint and again[1].fingerprint == first[1].fingerprint
    model.model.layers[1].train()
    model.model.layers[1].self_attn.k_proj.bias.data.add_(1.0)
    before = [module.training for module in model.modules()]
    model.model.layers[1].self_attn.k_proj.bias = torch.nn.Parameter(model.model.layers[1].self_attn.k_proj.bias * 2)
    assert key_biases(model)[1].fingerprint != again[1].fingerprint
    assert before == [module.training for module in model.modules()]
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_what_follows_the_length_is_left_alone(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    parameters = SCALED | {"rope_type": kind}
    if kind == "longrope":
        parameters |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    model = biased("llama3", rope_parameters=parameters)
    with caplog.at_level(logging.WARNING):
        assert key_biases(model) == {}
    assert kind in caplog.text
    with pytest.raises(ArgumentError, match=f"^model: .*{kind}"):
        embeddings(model)


def test_an_unknown_embedding_is_left_alone(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen2 import modeling_qwen2

    apply = modeling_qwen2.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_qwen2, "apply_rotary_pos_emb", lambda q, k, cos, sin, *rest: apply(q, k, cos**3, sin, *rest))
    model = biased("Qwen2")
    with caplog.at_level(logging.WARNING):
        assert key_biases(model) == {}
    assert "layers [0, 1]" in caplog.text
    with pytest.raises(ArgumentError, match=r"^model: "):
        calibrate(model, prompts(1, 20)["input_ids"], smoothing="rotary")


def test_a_text_tells_the_mean_before_the_embedding() -> None:
    """In chunks, with padding: of a biased model about its bias, and better than a fixed mean."""
    model = biased("Qwen2", size=8.0)
    inputs = prompts(2, 200, (0, 60))
    found = calibrate(model, **inputs, smoothing="rotary_balanced", chunk=37).smoothing
    assert found is not None
    for layer, wanted in key_biases(model).items():
        got = found[layer].rotary
        assert got is not None and wanted.rotary is not None and found[layer].balance is not None
        positions = torch.arange(0, 2000, 37)
        assert (got.at(positions) - wanted.rotary.at(positions)).norm() < 0.25 * wanted.rotary.at(positions).norm()
    text = prompts(1, 120)
    gold = logits_in_steps(model, text, KVQCache(model, "none", smoothing=None), [100, 20])

    def loss(smoothing: Any) -> float:
        return float((logits_in_steps(model, text, KVQCache(model, "int4", smoothing=smoothing), [100, 20]) - gold).norm())

    assert loss(found) < 0.8 * loss(calibrate(model, **inputs, smoothing="mean").smoothing)


@torch.no_grad()
def test_a_config_alone_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    """Once, where it matters."""
    plain, loud, ids = make_model("Llama"), biased("Qwen2"), prompts(1, 9)["input_ids"]
    given = ((plain, "int4", KEY_BIAS), (loud, "none", KEY_BIAS), (loud, "int4", None), (loud, "int4", KEY_BIAS))
    with caplog.at_level(logging.WARNING):
        for model, mode, smoothing in given:
            assert not caplog.records
            cache = KVQCache(model.config, mode, smoothing=smoothing)
            for _ in range(2):
                model(ids, **{GENERATE: cache})
    assert [record.message.count("KVQCache(model) takes them off") for record in caplog.records] == [1]


def test_a_probe_fits_any_vocabulary_and_context() -> None:
    assert key_biases(biased("Qwen2", vocab_size=1)) != {}
    asked: list[torch.Tensor] = []
    model = biased("Qwen2", max_position_embeddings=60)
    model.model.rotary_emb.register_forward_hook(lambda module, inputs, out: asked.append(inputs[1]))
    assert set(key_biases(model)) == {0, 1} and max(int(positions.max()) for positions in asked) == 50


def test_positions_of_another_kind_are_not_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    """Rows of a table, past whose end a GPU's process dies."""
    shape = {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 40}
    model = transformers.OPTForCausalLM(transformers.OPTConfig(**shape, ffn_dim=64, word_embed_proj_dim=64)).eval()
    torch.nn.init.normal_(model.model.decoder.layers[0].self_attn.k_proj.bias)
    model.register_forward_pre_hook(lambda *arguments: pytest.fail("it was asked"))
    with caplog.at_level(logging.WARNING):
        assert key_biases(model) == {}
    assert "no rotary embedding" in caplog.text
    with pytest.raises(ArgumentError, match=r"^model: .*no rotary embedding"):
        embeddings(model)
