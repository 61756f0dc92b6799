"""What a KVQCache cannot serve, said before anything runs, with the reason."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from kvq_core.backend import QuantKVBackend
from kvq_core.errors import ArgumentError


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
    if getattr(text, "kv_lora_rank", None):
        raise _refusal(text, "multi-head latent attention (kv_lora_rank)", "separate K and V heads: MLA's cache is one latent vector")
    types = set(getattr(text, "layer_types", None) or ())
    if "chunked_attention" in types or (not types and getattr(text, "attention_chunk_size", None)):
        raise _refusal(text, "chunked attention", "full or sliding-window attention: kvq has no mask for chunks")
    if getattr(text, "use_bidirectional_attention", False) or getattr(text, "is_causal", True) is False:
        raise _refusal(text, "bidirectional attention", "causal attention: a token must not see later ones")
    if getattr(text, "num_kv_shared_layers", None) or "reuse" in (getattr(text, "kv_sharing_modes", None) or ()):
        raise _refusal(text, "layers that read another layer's K and V", "K and V of its own in every attention layer")
    return text


def head_size(config: Any) -> int | None:
    """The size of K's heads as far as ``config`` tells."""
    size = getattr(config, "head_dim", None)
    heads = getattr(config, "num_attention_heads", None)
    if isinstance(size, int):
        return size
    return config.hidden_size // heads if isinstance(heads, int) and isinstance(getattr(config, "hidden_size", None), int) else None


def check_head_sizes(config: Any, backends: dict[int, QuantKVBackend]) -> None:
    """Raise :class:`ArgumentError` for the first layer whose mode cannot store heads of the size ``config`` states."""
    size = head_size(config)
    if size is not None:
        for layer, backend in backends.items():
            backend.check_head_size(size, f"mode (layer {layer})")


def _refusal(config: PretrainedConfig, got: str, need: str) -> ArgumentError:
    return ArgumentError("config", f"{config.model_type} with {got}", need)
