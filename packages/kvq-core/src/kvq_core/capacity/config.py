"""From a Hugging Face ``config.json`` to a :class:`~kvq_core.capacity.shape.ModelShape`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from kvq_core.capacity import kinds
from kvq_core.capacity.fields import Config, integer, required
from kvq_core.capacity.shape import DTYPES, AttentionLayer, ModelShape
from kvq_core.errors import ArgumentError

_NESTED: Final = ("text_config", "llm_config", "language_config")
_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    # Checkpoints of these families leave out fields that have their class's default (transformers 5.17).
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208},
    "gemma4_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512, "vocab_size": 262_144},
}


def read_config(path: str | Path) -> dict[str, Any]:
    """The JSON object in a ``config.json``, or in the one of a model's folder.

    Raises:
        ArgumentError: there is no such file, or it holds something else.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        why = f"{cause.strerror}" if isinstance(cause, OSError) else f"no JSON ({cause})"
        raise ArgumentError("config", f"{file}: {why}", "the config.json of a Hugging Face model, or the folder it lies in") from cause
    if not isinstance(config, dict):
        raise ArgumentError("config", f"{file}: a JSON {type(config).__name__}", "a JSON object, as a Hugging Face config.json holds")
    return config


def text_config(config: Config) -> dict[str, Any]:
    """The decoder's part of a config: the nested one of a multimodal model, with what only the outer one says, and defaults filled in."""
    nested: Config = next((config[name] for name in _NESTED if isinstance(config.get(name), Mapping)), {})
    merged = {**config, **nested}
    return {**_DEFAULTS.get(str(merged.get("model_type")), {}), **merged}


def model_shape(config: Config) -> ModelShape:
    """What the KV cache of a model with this config holds.

    Understood: grouped and multi-query heads, ``head_dim`` and ``v_head_dim``, windows (on all layers, by ``layer_types``, by pattern, from
    ``max_window_layers`` on), hybrid models (only their attention layers keep keys), layers that share another one's cache, and
    multimodal configs (their ``text_config``).

    Raises:
        ArgumentError: a field is missing or wrong, or the model keeps something else than keys and values per head (MLA latents,
            encoder states, chunked or compressed attention).
    """
    decoder = text_config(config)
    _refuse_other_caches(decoder)
    every = kinds.layer_kinds(decoder)
    shared = decoder.get("num_kv_shared_layers") or 0
    own = every[: len(every) - shared] if shared else every
    layers = tuple(_layer(decoder, kind) for kind in own if kind.attends)
    if not layers:
        raise ArgumentError(
            "config", f"model type {decoder.get('model_type')!r} without attention layers", "a model that keeps keys and values"
        )
    return ModelShape(
        model_type=str(config.get("model_type", "unknown")),
        layers=layers,
        num_layers=len(every),
        dtype=_dtype(config, decoder),
        max_context=integer(decoder, "max_position_embeddings"),
        notes=_notes(config, decoder, every, shared),
    )


def _layer(config: Config, kind: kinds.Kind) -> AttentionLayer:
    heads = required(config, "num_attention_heads")
    kv_heads = integer(config, "num_key_value_heads") or (1 if _multi_query(config) else heads)
    if _multi_query(config):
        kv_heads = 1
    size = integer(config, "head_dim") or required(config, "hidden_size") // heads
    size_v = integer(config, "v_head_dim") or size
    if kind.window is None and integer(config, "global_head_dim"):  # Gemma 4: its full layers have heads of their own
        size = size_v = required(config, "global_head_dim")
        kv_heads = integer(config, "num_global_key_value_heads") or kv_heads
    elif kind.window is not None:  # MiMo: its windowed layers do
        size, size_v = integer(config, "swa_head_dim") or size, integer(config, "swa_v_head_dim") or size_v
        kv_heads = integer(config, "swa_num_key_value_heads") or kv_heads
    return AttentionLayer(kv_heads, size, size_v, kind.window)


def _multi_query(config: Config) -> bool:
    """Falcon and GPT-BigCode say so with a flag."""
    return config.get("multi_query") is True and not config.get("new_decoder_architecture")


def _dtype(config: Config, decoder: Config) -> torch.dtype:
    name = str(decoder.get("dtype") or decoder.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return DTYPES.get(name.removeprefix("torch."), torch.bfloat16)


def _refuse_other_caches(config: Config) -> None:
    kind = f"model type {config.get('model_type', 'unknown')!r}"
    if config.get("kv_lora_rank"):
        rank, rope = config["kv_lora_rank"], config.get("qk_rope_head_dim", 0)
        raise ArgumentError(
            "config",
            f"{kind} with kv_lora_rank {rank}: multi-head latent attention (MLA)",
            f"a model with keys and values per head: MLA caches one latent of {rank} + {rope} values a token instead",
        )
    if config.get("is_encoder_decoder"):
        raise ArgumentError("config", f"{kind}, an encoder-decoder", "a decoder: the keys of an encoder are computed once, not paged")
    if config.get("attention_chunk_size"):
        raise ArgumentError(
            "config", f"{kind} with attention_chunk_size: chunked attention", "full or windowed attention, which kvq's reads mask"
        )


def _notes(config: Config, decoder: Config, every: tuple[kinds.Kind, ...], shared: int) -> tuple[str, ...]:
    notes = []
    recurrent = sum(not kind.attends for kind in every)
    if recurrent:
        notes.append(
            f"{recurrent} of {len(every)} layers keep no keys; the state they keep instead, a constant for each sequence, is not counted"
        )
    if shared:
        notes.append(f"the last {shared} layers read the cache of earlier ones")
    if any(isinstance(config.get(name), Mapping) for name in _NESTED):
        notes.append("a multimodal config: its text model is counted, its other towers are not")
    if not (decoder.get("dtype") or decoder.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")):
        notes.append("the config names no dtype: taken for bfloat16")
    return tuple(notes)
