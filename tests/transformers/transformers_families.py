"""Tiny random models of each family, and transformers' own cache with K and V passed through a mode: what a KVQCache is held to.

The models are made so that attention matters: weights are large enough that scores spread over several units.
"""

from __future__ import annotations

import copy
import sys
from typing import Any
from unittest.mock import patch

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface, CompileConfig, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import eager_mask

from kvq_core import get_backend
from kvq_transformers import KVQCache
from kvq_transformers.naming import GENERATE
from kvq_transformers.weights import layer_norms

CAPACITIES: dict[str, dict[str, Any]] = {"growing": {}, "fixed": {"max_cache_len": 80}}
"""Both kinds of pages, as KVQCache is asked for them."""
VOCAB = 97
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
MIXED: dict[str, Any] = {"sliding_window": 11, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts_per_tok": 1}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"head_dim": 64},
    "Qwen2": {},
    "Qwen3": {"head_dim": 128},
    "Mistral": {"sliding_window": 11, "head_dim": 96},
    "Gemma2": MIXED | {"head_dim": 256, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 100},
    "Gemma3": MIXED | {"head_dim": 64, "query_pre_attn_scalar": 50},
    "GptOss": MIXED | EXPERTS | {"head_dim": 64, "num_local_experts": 2, "rope_parameters": PLAIN},
    "Phi3": {"head_dim": 80, "hidden_size": 320, "partial_rotary_factor": 1.0},
    "Granite": {"attention_multiplier": 0.31, "head_dim": 64},
    "Olmo2": {"hidden_size": 256},
    "Cohere2": MIXED | {"head_dim": 64},
    "Lfm2": {"layer_types": ["conv", "full_attention"], "hidden_size": 128, "block_multiple_of": 32},
    "Qwen3Next": LINEAR
    | EXPERTS
    | {"layer_types": ["linear_attention", "full_attention"], "head_dim": 64, "num_experts": 2}
    | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
}
_CONFIGS = {"Gemma3": "Gemma3TextConfig"}


def make_config(family: str, **changes: Any) -> Any:
    return getattr(transformers, _CONFIGS.get(family, f"{family}Config"))(**(COMMON | FAMILIES.get(family, {}) | changes))


def make_model(
    family: str, dtype: torch.dtype = torch.float32, biases: tuple[float, float] = (0.3, 0.3), **changes: Any
) -> PreTrainedModel:
    """A model of ``family`` with fixed random weights; ``biases``: the deviation of keys' and of all others; ``changes`` to its config."""
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(make_config(family, **changes))
    model.set_experts_implementation("eager")  # the others know no float64
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter, std=2.0)
        elif name.endswith("bias"):
            of_keys = any(part in name for part in ("k_proj", "query_key_value"))
            torch.nn.init.normal_(parameter, std=biases[0 if of_keys else 1])
    return model.to(dtype).eval()


SCALED = {"rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 = SCALED | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
BIASED: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2": ("Qwen2", {}),
    "interleaved, partial": ("Glm", {"attention_bias": True, "head_dim": 32, "partial_rotary_factor": 0.5}),
    "fused projections, partial": ("GPTNeoX", {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.25}}),
    "llama3": ("Llama", {"attention_bias": True, "rope_parameters": LLAMA3}),
    "linear": ("Llama", {"attention_bias": True, "rope_parameters": SCALED | {"rope_type": "linear"}}),
    "yarn, sinks, windows": ("GptOss", {"rope_parameters": SCALED | {"rope_type": "yarn"}}),
    "two embeddings, windows, norms": ("Gemma3", {"attention_bias": True}),
    "softcap, windows": ("Gemma2", {"head_dim": 64, "attention_bias": True, "attn_logit_softcapping": 20.0}),
}
"""Families by what is particular about their keys."""


def biased(name: str, size: float = 10.0, **changes: Any) -> PreTrainedModel:
    """A tiny model whose key biases are ``size`` times a standard normal, other biases small."""
    family, options = BIASED[name]
    return make_model(family, biases=(size, 0.1), **(options | changes))


@torch.no_grad()
def uneven(family: str) -> PreTrainedModel:
    """A model whose norms make a few channels of keys large, as those of trained ones do, and theirs of queries small."""
    model = make_model(family)
    for one in layer_norms(model):
        for norm, by in ((one.k_norm, 12.0), (one.q_norm, 1 / 12.0)):
            effective = norm(torch.ones(1, norm.weight.numel()))[0]
            wanted = torch.where(torch.arange(norm.weight.numel()) % 16 == 3, by, 1.0)
            norm.weight += wanted - effective
    return model


def prompts(batch_size: int, columns: int, padding: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    """Random token ids [batch_size, columns] and their attention mask, with ``padding[b]`` columns of padding on the left of row b."""
    generator = torch.Generator().manual_seed(batch_size * 1000 + columns)
    ids = torch.randint(3, VOCAB, (batch_size, columns), generator=generator)
    mask = torch.ones_like(ids)
    for row, count in enumerate(padding):
        ids[row, :count], mask[row, :count] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def begun(family: str, mode: str = "none", capacity: dict[str, Any] | None = None, count: int = 20) -> tuple[PreTrainedModel, KVQCache]:
    """A model and a cache that has seen two rows of ``count`` columns: the first of ``prompts(2, 40)``."""
    model = make_model(family)
    cache = KVQCache(model.config, mode, **(capacity or {}))
    model(prompts(2, 40)["input_ids"][:, :count], **{GENERATE: cache})
    return model, cache


def compiled(fullgraph: bool = True) -> CompileConfig:
    """``generate``'s compilation, on the CPU as well."""
    config = CompileConfig(fullgraph=fullgraph, backend="aot_eager", mode="default")
    config._compile_all_devices = True
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return config


def fake_quantized_cache(
    config: Any, modes: dict[int, str], smoothing: Any = None, k_scale: Any = None, v_scale: Any = None
) -> DynamicCache:
    """transformers' cache, in which layer i holds what ``modes[i]`` makes of each row: its ``decode`` of its ``encode``."""
    cache = DynamicCache(config=config)
    for index, mode in modes.items():
        layer, scales = cache.layers[index], [None if scale is None else scale[index] for scale in (k_scale, v_scale)]
        assert type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)
        layer.update = _quantizing(mode, layer.update, None if smoothing is None else smoothing[index], *scales)
    return cache


def _quantizing(mode: str, update: Any, smoothing: Any, k_scale: float | None, v_scale: float | None) -> Any:
    def quantizing(key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return update(through_mode(mode, key, k_scale, smoothing), through_mode(mode, value, v_scale, is_value=True), *args, **kwargs)

    return quantizing


def through_mode(mode: str, rows: torch.Tensor, scale: float | None = None, smoothing: Any = None, is_value: bool = False) -> torch.Tensor:
    """Float32 rows [batch, heads, columns, size] as ``mode`` gives them back; ``scale``: of modes that take one."""
    backend = get_backend(mode)
    mean, balance = (0.0, 1.0) if smoothing is None else (smoothing.mean[:, None], smoothing.balance)
    balance = 1.0 if balance is None else balance if isinstance(balance, float) else balance[:, None]
    given = torch.tensor([scale or 1.0]) if backend.takes_scales else None
    codes, scales = (backend.encode_value if is_value else backend.encode)((rows - mean) * (1 / balance), scale=given)
    return backend.decode(codes, scales if given is None else given) * balance + mean


def eager_twin(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of ``model`` that runs transformers' eager attention."""
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    return twin


def exact_twin(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of ``model`` in float64, softmax included."""
    twin = copy.deepcopy(model).double()
    twin.set_attn_implementation("exact")
    return twin


def own_attention(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The eager attention of the family that ``module`` is of."""
    return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **kwargs)


def exact_attention(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The same, without the softmax's cast to float32."""
    with patch.object(torch.nn.functional, "softmax", lambda scores, dim, dtype=None: scores.softmax(dim)):
        return own_attention(module, *args, **kwargs)


AttentionInterface.register("exact", exact_attention)
AttentionMaskInterface.register("exact", eager_mask)


@torch.no_grad()
def logits_in_steps(model: PreTrainedModel, inputs: dict[str, torch.Tensor], cache: Any, steps: list[int]) -> torch.Tensor:
    """Logits [batch_size, columns, vocabulary] of forwards of ``steps`` columns each, through ``cache``."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found, seen = [], 0
    for count in steps:
        part = slice(seen, seen + count)
        seen += count
        out = model(ids[:, part], attention_mask=mask[:, :seen], position_ids=positions[:, part], **{GENERATE: cache}, use_cache=True)
        found.append(out.logits)
    return torch.cat(found, 1)


@torch.no_grad()
def whole_text(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits of eager attention over the whole text, without any cache."""
    return eager_twin(model)(**inputs, position_ids=(inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)).logits


def worst(found: torch.Tensor, gold: torch.Tensor, mask: torch.Tensor) -> float:
    """Largest difference over real tokens."""
    return float((found.double() - gold.double())[mask.bool()].abs().max())
