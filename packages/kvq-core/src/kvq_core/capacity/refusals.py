"""Models that keep something else than keys and values per head, which a page of kvq cannot hold."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from kvq_core.capacity.fields import Config, count, flag, shown
from kvq_core.errors import ArgumentError

_STATES: Final = "a model with keys and values: it keeps a recurrent state, a constant for each sequence"
_OTHERS: Final = MappingProxyType(
    {
        **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"), _STATES),
        "blt": "one decoder: it is several stacks, over bytes and over patches of them",
        "reformer": "a model with keys and values: its attention by hashes keeps hidden states",
        "xlnet": "a model with keys and values: its memory is of hidden states",
    }
)
"""By model type: what would be needed, and what the model has."""


def type_of(config: Config) -> str:
    """The model type that a config names."""
    name = config.get("model_type", "unknown")
    if not isinstance(name, str):
        raise ArgumentError("config field model_type", shown(name), "a string")
    return name


def named(config: Config) -> str:
    """A model in messages: by its type."""
    return f"model type {shown(type_of(config))}"


def refuse_other_caches(config: Config) -> None:
    """Raise :class:`ArgumentError` with the reason, if the cache of this decoder is none of keys and values per head."""
    kind = named(config)
    need = _OTHERS.get(type_of(config))
    if need is not None:
        raise ArgumentError("config", kind, need)
    rank = count(config, "kv_lora_rank")
    if rank:
        raise ArgumentError(
            "config",
            f"{kind} with kv_lora_rank {rank}: multi-head latent attention (MLA)",
            f"a model with keys and values per head: MLA caches one latent of {rank} + {count(config, 'qk_rope_head_dim')} values a token"
            " instead",
        )
    if flag(config, "is_encoder_decoder"):
        raise ArgumentError("config", f"{kind}, an encoder-decoder", "a decoder: the keys of an encoder are computed once, not paged")
    if count(config, "attention_chunk_size"):
        raise ArgumentError(
            "config", f"{kind} with attention_chunk_size: chunked attention", "full or windowed attention, which kvq's reads mask"
        )
    if config.get("cross_attention_layers"):
        raise ArgumentError(
            "config", f"{kind} with cross_attention_layers", "layers that attend to the text: these keep the keys of images, computed once"
        )
    for name in ("n_recurrent_loops", "loop_num_passes"):
        if count(config, name) > 1:
            raise ArgumentError(
                "config", f"{kind} with {name}: looped layers", "layers that run once: each pass of these keeps keys of its own"
            )
