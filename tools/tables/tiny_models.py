"""A tiny configuration of any causal language model that transformers knows: its default one, with every size it has made small.

Sizes go by the names that configurations give them. What a type needs besides is in ``HINTS``.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB: Final = 97
WINDOW: Final = 11

_SIZES: Final[dict[int | float | None, str]] = {
    VOCAB: "vocab_size vocab_size_per_layer_input unpadded_vocab_size output_vocab_size",
    64: "hidden_size d_model n_embd embedding_size word_embed_proj_dim dim emb_dim embedding_dim attention_hidden_size lru_width d_embed",
    96: "intermediate_size decoder_ffn_dim encoder_ffn_dim ffn_dim n_inner dim_ff dff d_inner ffn_hidden_size intermediate_size_mlp "
    "dense_intermediate_size feed_forward_size prefix_dense_intermediate_size",
    48: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size "
    "expert_ffn_hidden_size shared_experts_intermediate_size",
    2: "num_hidden_layers n_layer num_layers n_layers decoder_layers encoder_layers num_decoder_layers num_encoder_layers "
    "num_key_value_heads num_kv_heads swa_num_key_value_heads num_query_groups num_experts_per_tok moe_topk moe_k num_experts_per_token "
    "top_k_experts linear_num_key_heads n_group topk_group num_expert_group num_groups",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads num_encoder_attention_heads "
    "num_decoder_attention_heads swa_num_attention_heads num_experts n_routed_experts num_local_experts moe_num_experts "
    "linear_num_value_heads mamba_d_conv conv_kernel linear_conv_kernel_dim linear_num_heads attention_heads zero_expert_num",
    1: "n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace num_dense_layers mamba_n_groups n_groups "
    "mamba_ngroups",
    0: "pad_token_id num_nextn_predict_layers num_mtp_layers",
    16: "head_dim swa_head_dim d_head attention_head_size kv_channels dim_head linear_key_head_dim linear_value_head_dim linear_head_dim "
    "qk_rope_head_dim qk_nope_head_dim v_head_dim mamba_d_state state_size ssm_state_size mamba_d_head mamba_head_dim mamba_headdim "
    "index_head_dim hidden_size_per_layer_input laurel_rank time_step_rank mamba_dt_rank chunk_size mamba_chunk_size",
    32: "kv_lora_rank q_lora_rank qk_head_dim o_lora_rank",
    8: "mamba_n_heads mamba_num_heads rotary_dim n_mamba_heads",
    512: "max_position_embeddings n_positions n_ctx max_seq_len context_length max_target_positions model_max_length max_source_positions",
    WINDOW: "sliding_window sliding_window_size attention_window_size window_size",
    0.3: "initializer_range init_std initializer_factor",
    None: "eos_token_id forced_eos_token_id quantization_config max_length",
}
SMALL: dict[str, Any] = {name: size for size, names in _SIZES.items() for name in names.split()} | {
    "bos_token_id": 1,
    "decoder_start_token_id": 1,
    "is_decoder": True,
}
"""The value of every field that a tiny configuration sets, by the field's name."""

_LAYER_LISTS: Final = ("layer_types", "layers_block_type", "block_types", "mlp_layer_types", "attention_layers", "hybrid_override_pattern")

HINTS: Final[dict[str, dict[str, Any]]] = {
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
"""What some types need besides: fields of their own that depend on each other."""


def causal_types() -> list[str]:
    """Every ``model_type`` of which the installed transformers has a causal language model."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """A configuration of ``model_type`` with two layers, or one of each kind of layer that its default has; ``changes`` come last."""
    hints = HINTS.get(model_type, {})
    try:
        default = AutoConfig.for_model(model_type)
    except Exception:  # its default is no valid configuration: the hints must be
        return AutoConfig.for_model(model_type, **(hints | changes))
    return type(default)(**(_small(default) | hints | changes))


def tiny_model(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The causal language model of ``config`` with fixed random weights, such that attention matters, on eager attention."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others know no float64
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=2.0)
        elif name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    return model.to(dtype).eval()


def _small(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of ``config`` that are made small, those of the configurations within it included."""
    fields: dict[str, Any] = {}
    kinds = _kinds_of_layers(config)
    for name, value in config.to_dict().items():
        own = config.__dict__.get(name)
        if isinstance(own, PreTrainedConfig):
            fields[name] = {"model_type": own.model_type} | _small(own)
        elif name in _LAYER_LISTS and isinstance(value, list) and kinds:
            fields[name] = [value[place] for place in kinds]
        elif name in SMALL and (value is not None or name in ("head_dim", "num_key_value_heads")):
            fields[name] = SMALL[name]
            if name in ("num_hidden_layers", "n_layer", "num_layers") and kinds:
                fields[name] = len(kinds)
    return fields


def _kinds_of_layers(config: PreTrainedConfig) -> list[int]:
    """The first layer of each kind, and at least two layers."""
    lists = [value for name in _LAYER_LISTS if isinstance(value := getattr(config, name, None), list) and value]
    if not lists or len({len(one) for one in lists}) != 1:
        return []
    first: dict[Any, int] = {}
    for place, kind in enumerate(zip(*lists, strict=True)):
        first.setdefault(str(kind), place)
    places = sorted(first.values())
    return places if len(places) > 1 else [0, 1][: len(lists[0])]
