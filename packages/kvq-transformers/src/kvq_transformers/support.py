"""What of a model a KVQCache serves; and what it cannot serve, said before anything runs, with the reason."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, DynamicCache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from kvq_core.backend import QuantKVBackend
from kvq_core.errors import ArgumentError

_BY_NAME: Final = {
    "bigbird_pegasus": "decoder layers that call themselves not causal",
    "diffllama": "differential attention, which reads a layer's keys twice",
    "doge": "a mask that depends on the values",
    "git": "image tokens that see later ones",
    "jetmoe": "keys that are repeated for each expert",
    "minimax": "a cache of its own",
    "moshi": "a sliding window that its own mask leaves out inside a prompt",
}
"""What the code of some types does that no field of their configs tells."""


def decoder_config(config: PretrainedConfig) -> PretrainedConfig:
    """The part of ``config`` that describes the text decoder (a composite model's own part, else ``config`` itself).

    Raises:
        ArgumentError: no config, or one of an architecture whose attention cannot run over these pages.
    """
    if not isinstance(config, PretrainedConfig):
        raise ArgumentError("config", type(config).__name__, "a transformers config, such as model.config")
    if getattr(config, "is_encoder_decoder", False):
        raise _refusal(config, "an encoder-decoder model", "a decoder-only one: cross attention does not grow token by token")
    text: Any = config.get_text_config(decoder=True)
    for part in (config, text):
        if part.model_type in _BY_NAME:
            raise _refusal(part, _BY_NAME[part.model_type], "attention that reads the keys and values of each token once, as stored")
    if getattr(text, "kv_lora_rank", None):
        raise _refusal(text, "multi-head latent attention (kv_lora_rank)", "separate K and V heads: MLA's cache is one latent vector")
    types = set(getattr(text, "layer_types", None) or ())
    if "chunked_attention" in types or (not types and getattr(text, "attention_chunk_size", None)):
        raise _refusal(text, "chunked attention", "full or sliding-window attention: kvq has no mask for chunks")
    if getattr(text, "use_bidirectional_attention", False) or getattr(text, "is_causal", True) is False:
        raise _refusal(text, "bidirectional attention", "causal attention: a token must not see later ones")
    if getattr(text, "num_kv_shared_layers", None) or "reuse" in (getattr(text, "kv_sharing_modes", None) or ()):
        raise _refusal(text, "layers that read another layer's K and V", "K and V of its own in every attention layer")
    if getattr(text, "cross_attention_layers", None):
        raise _refusal(text, "cross-attention layers (cross_attention_layers)", "self-attention only: images' keys are no tokens")
    if getattr(text, "prefix_lm", False) or getattr(text, "H_cycles", None):
        raise _refusal(text, "prefixes that see later tokens, or layers that run in cycles (prefix_lm, H_cycles)", "plain causal layers")
    for part in (config, text):
        model_class = _model_class(part)
        if model_class is not None and not model_class._can_set_attn_implementation():
            raise _refusal(part, f"{model_class.__name__}'s own attention", "one that goes through transformers' AttentionInterface")
    return text


def _model_class(config: PretrainedConfig) -> Any:
    """The causal language model that transformers has for ``config``, if any."""
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return found[0] if isinstance(found, tuple) else found


@dataclass(frozen=True)
class DefaultLayers:
    """The layers of the cache that transformers itself would give a model; the ``windows`` of those that keep K and V, by number (``None``:
    all of the text); and the numbers of those with a ``recurrent`` state."""

    layers: list[Any]
    windows: dict[int, int | None]
    recurrent: list[int]


def default_layers(config: PretrainedConfig) -> DefaultLayers:
    """Those of the text decoder that ``config`` describes.

    Raises:
        ArgumentError: some are of a kind that these pages cannot hold, or none keeps K and V.
    """
    try:
        layers = DynamicCache(config=config).layers
    except KeyError as unknown:
        raise _refusal(config, f"layers of type {unknown}", "types that transformers' caches know") from None
    windows: dict[int, int | None] = {}
    for index, layer in enumerate(layers):
        if not isinstance(layer, CacheLayerMixin):
            continue
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            got = f"{config.model_type}, whose layer {index} needs a {type(layer).__name__}"
            raise ArgumentError("config", got, "layers of full or sliding-window attention, or without K and V")
        windows[index] = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
    if not windows:
        raise ArgumentError("config", f"{config.model_type}, whose layers keep no K and V", "a model with attention layers")
    # transformers 5.17 gives layers without attention a recurrent state, too, which nothing ever changes.
    stateless = {index for index, kind in enumerate(getattr(config, "layer_types", None) or ()) if kind in ("moe", "mlp")}
    recurrent = [i for i, layer in enumerate(layers) if isinstance(layer, LinearAttentionCacheLayerMixin) and i not in stateless]
    return DefaultLayers(layers, windows, recurrent)


def check_layers(model: torch.nn.Module, config: Any, layers: Collection[int]) -> None:
    """Raise :class:`ArgumentError` if ``model`` has lost attention ``layers`` of its ``config``: their tokens would never be stored."""
    numbered = {module.layer_idx for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)}
    missing = [layer for layer in layers if layer not in numbered and layer < (_plain(config, "num_hidden_layers") or 0)]
    if numbered and missing:
        got = f"{config.num_hidden_layers}, but the model has no layers {missing} (layer_idx of its modules)"
        raise ArgumentError("config.num_hidden_layers", got, "the number of the model's layers, numbered from 0 on")


def head_size(config: Any) -> int | None:
    """The size of K's heads as far as ``config`` tells."""
    size, heads, hidden = (_plain(config, name) for name in ("head_dim", "num_attention_heads", "hidden_size"))
    return size if size is not None else None if heads is None or hidden is None else hidden // heads


def _plain(config: Any, name: str) -> int | None:
    """A field that says one number for all layers; transformers raises for one that differs by layer."""
    try:
        value = getattr(config, name, None)
    except Exception:
        return None
    return value if isinstance(value, int) else None


def check_head_sizes(config: Any, backends: dict[int, QuantKVBackend]) -> None:
    """Raise :class:`ArgumentError` for the first layer whose mode cannot store heads of the size ``config`` states."""
    size = head_size(config)
    if size is not None:
        for layer, backend in backends.items():
            backend.check_head_size(size, f"mode (layer {layer})")


def _refusal(config: PretrainedConfig, got: str, need: str) -> ArgumentError:
    return ArgumentError("config", f"{config.model_type} with {got}", need)
