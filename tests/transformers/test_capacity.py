"""``kvq calc`` counts the weights of transformers' models, or says that it does not."""

import json
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModel, AutoModelForCausalLM

from kvq_core import KVQError
from kvq_core.capacity import weight_count
from kvq_core.capacity.weights import COUNTED

NEEDED: dict[str, dict[str, Any]] = {
    **{family: {"head_dim": 128} for family in ("ministral", "hunyuan_v1_dense", "glm4_moe", "glm4v_moe_text")},
    "bloom": {"hidden_size": 1024},
}
"""What a family's class has no default for, one that the model takes otherwise, or one so small that biases count."""
DENSE: dict[str, tuple[dict[str, Any], ...]] = {
    "qwen2_moe": ({"decoder_sparse_step": 2}, {"mlp_only_layers": [1, 2]}, {"decoder_sparse_step": 3, "mlp_only_layers": [2]}),
    "qwen3_moe": ({"decoder_sparse_step": 2}, {"mlp_only_layers": [0, 3]}),
    "glm4_moe": ({"first_k_dense_replace": 0}, {"first_k_dense_replace": 3}, {"n_shared_experts": 2}),
    "laguna": ({"mlp_layer_types": ["sparse", "dense", "dense", "sparse"]},),
}
"""Mixtures of experts in which some layers are none."""


def counted_and_real(family: str, **fields: Any) -> tuple[int, int]:
    """The parameters of a model with the family's default sizes: by its config, and by itself."""
    config = CONFIG_MAPPING[family](**NEEDED.get(family, {}), **fields)
    described = {"dtype": "bfloat16"} | {k: v for k, v in json.loads(config.to_json_string(use_diff=False)).items() if v is not None}
    whole = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    with torch.device("meta"):
        model = (AutoModelForCausalLM if whole else AutoModel).from_config(config)
    real = sum(parameter.numel() for parameter in model.parameters())
    head = 0 if whole or described.get("tie_word_embeddings") else config.vocab_size * config.hidden_size
    return weight_count(described).parameters, real + head


@pytest.mark.parametrize("family", sorted(COUNTED))
def test_counted_families_have_the_parameters_of_their_models(family: str) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    few, more = (counted_and_real(family, num_hidden_layers=count) for count in (4, 12))
    # Of the layers alone, too: a vocabulary can be most of a small model.
    for counted, real in (few, more, (more[0] - few[0], more[1] - few[1])):
        assert counted == pytest.approx(real, rel=0.003)


@pytest.mark.parametrize(("family", "fields"), [(family, fields) for family, many in DENSE.items() for fields in many])
def test_some_layers_have_no_experts(family: str, fields: dict[str, Any]) -> None:
    counted, real = counted_and_real(family, num_hidden_layers=4, **fields)
    assert counted == pytest.approx(real, rel=0.003)


@pytest.mark.parametrize("family", ["lfm2", "nemotron", "ernie4_5_moe", "jetmoe", "one of tomorrow"])
def test_other_families_are_refused(family: str) -> None:
    described = {"model_type": family, "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4, "vocab_size": 9}
    with pytest.raises(KVQError, match=f"model type '{family}', need the size of the weights"):
        weight_count(described)


@pytest.mark.parametrize("types", [["sparse"], ["sparse", "moe"]])
def test_every_layer_s_mlp_is_known(types: list[str]) -> None:
    described = json.loads(CONFIG_MAPPING["laguna"](num_hidden_layers=2).to_json_string(use_diff=False)) | {"mlp_layer_types": types}
    with pytest.raises(KVQError, match=r"mlp_layer_types: got .*, need 'dense' or 'sparse' for each layer"):
        weight_count({name: value for name, value in described.items() if value is not None})
