"""From a Hugging Face ``config.json`` to a :class:`~kvq_core.capacity.shape.ModelShape`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from kvq_core.capacity import kinds
from kvq_core.capacity.fields import NAMES, Config, count, flag, integer, required, shown
from kvq_core.capacity.refusals import named, refuse_other_caches, type_of
from kvq_core.capacity.shape import DTYPES, AttentionLayer, ModelShape
from kvq_core.errors import ArgumentError

_NESTED: Final = ("text_config", "llm_config", "language_config")
_MOST_BYTES: Final = 2**24
"""Of a config.json: what is longer is something else, and may have no end."""
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
        with file.open("rb") as stream:
            text = stream.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES:,} bytes")
        config = json.loads(text.decode("utf-8"))
    except (OSError, ValueError, RecursionError) as cause:
        why = f"{cause.strerror}" if isinstance(cause, OSError) else f"no JSON ({cause})"
        raise ArgumentError("config", f"{file}: {why}", "the config.json of a Hugging Face model, or the folder it lies in") from cause
    if not isinstance(config, dict):
        raise ArgumentError("config", f"{file}: a JSON {type(config).__name__}", "a JSON object, as a Hugging Face config.json holds")
    return config


def text_config(config: Config) -> dict[str, Any]:
    """The decoder's part of a config: the nested one of a multimodal model, with what only the outer one says, and defaults filled in.

    Raises:
        ArgumentError: what should be nested is no object.
    """
    merged = dict(config)
    while True:
        name = next((name for name in _NESTED if merged.get(name) is not None), None)
        if name is None:
            break
        nested = merged.pop(name)
        if not isinstance(nested, Mapping):
            raise ArgumentError(f"config field {name}", shown(nested), "a JSON object")
        # What the nested one says under one name, the outer one does not say under another.
        said = {alias for names in NAMES.values() if not nested.keys().isdisjoint(names) for alias in names}
        merged = {**{key: value for key, value in merged.items() if key not in said}, **nested}
    attention = merged.get("attn_config")  # DBRX
    if isinstance(attention, Mapping) and attention.get("kv_n_heads") is not None:
        merged["kv_n_heads"] = attention["kv_n_heads"]
        merged.pop("num_key_value_heads", None)  # the class's default
    return {**_DEFAULTS.get(str(merged.get("model_type")), {}), **merged}


def model_shape(config: Config) -> ModelShape:
    """What the KV cache of a model with this config holds.

    Understood: grouped and multi-query heads, ``head_dim`` and ``v_head_dim``, windows (on all layers, by ``layer_types``, by pattern, from
    ``max_window_layers`` on), hybrid models (only their attention layers keep keys), layers that share another one's cache, and
    multimodal configs (their ``text_config``), and layers with fields of their own (``per_layer_config``).

    Raises:
        ArgumentError: a field is missing or wrong, two of them contradict each other, or the model keeps something else than keys and
            values per head (MLA latents, encoder states, chunked or compressed attention).
    """
    decoder = text_config(config)
    refuse_other_caches(decoder)
    every = kinds.layer_kinds(decoder)
    shared = count(decoder, "num_kv_shared_layers")
    if shared > len(every):
        raise ArgumentError("config field num_kv_shared_layers", shared, f"at most the {len(every)} layers")
    own = every[: len(every) - shared]
    if not any(kind.attends for kind in own):
        raise ArgumentError("config", f"{named(decoder)} without attention layers of its own", "a model that keeps keys and values")
    special = _per_layer(decoder, len(every))
    as_usual = {kind: _layer(decoder, kind) for kind in dict.fromkeys(own) if kind.attends}
    layers = tuple(_own_layer(decoder, special[i], kind) if i in special else as_usual[kind] for i, kind in enumerate(own) if kind.attends)
    return ModelShape(
        model_type=type_of(config),
        layers=layers,
        num_layers=len(every),
        dtype=_dtype(config, decoder),
        max_context=integer(decoder, "max_position_embeddings"),
        notes=_notes(config, decoder, every, shared),
        num_query_heads=required(decoder, "num_attention_heads"),
    )


def _per_layer(config: Config, num_layers: int) -> dict[int, Config]:
    """The fields that single layers have for themselves, by layer."""
    given = config.get("per_layer_config")
    if given is None:
        return {}
    need = f"objects of fields by layer, 0 to {num_layers - 1}"
    if not isinstance(given, Mapping):
        raise ArgumentError("config field per_layer_config", shown(given), need)
    found: dict[int, Config] = {}
    for name, fields in given.items():
        layer = int(name) if isinstance(name, str) and name.isdecimal() and len(name) < 10 else -1
        if not 0 <= layer < num_layers or not isinstance(fields, Mapping) or layer in found or any("skip" in field for field in fields):
            raise ArgumentError("config field per_layer_config", shown({name: fields}), need)
        found[layer] = fields
    return found


def _own_layer(config: Config, fields: Config, kind: kinds.Kind) -> AttentionLayer:
    """A layer with ``fields`` of its own."""
    return _layer(
        {**config, **fields}, kind if kind.window is None else kinds.Kind(window=integer(fields, "sliding_window") or kind.window)
    )


def _layer(config: Config, kind: kinds.Kind) -> AttentionLayer:
    heads = required(config, "num_attention_heads")
    multi_query = flag(config, "multi_query") is True and not flag(config, "new_decoder_architecture")  # Falcon and GPT-BigCode
    kv_heads = 1 if multi_query else integer(config, "num_key_value_heads") or heads
    _divides("num_key_value_heads", kv_heads, "num_attention_heads", heads)
    size = integer(config, "head_dim")
    if size is None:
        hidden = required(config, "hidden_size")
        _divides("num_attention_heads", heads, "hidden_size", hidden)
        size = hidden // heads
    size_v = integer(config, "v_head_dim") or size
    if kind.window is None and integer(config, "global_head_dim"):  # Gemma 4: its full layers have heads of their own
        size = size_v = required(config, "global_head_dim")
        kv_heads = integer(config, "num_global_key_value_heads") or kv_heads
    elif kind.window is not None:  # MiMo: its windowed layers do
        size, size_v = integer(config, "swa_head_dim") or size, integer(config, "swa_v_head_dim") or size_v
        kv_heads = integer(config, "swa_num_key_value_heads") or kv_heads * (2 if config.get("model_type") == "mimo_v2_flash" else 1)
        heads = integer(config, "swa_num_attention_heads") or heads
    _divides("key and value heads of a layer", kv_heads, "its query heads", heads)
    return AttentionLayer(kv_heads, size, size_v, kind.window)


def _divides(name: str, part: int, of: str, whole: int) -> None:
    if whole % part:
        raise ArgumentError(f"config field {name}", part, f"a divisor of {of}, {whole}")


def _dtype(config: Config, decoder: Config) -> torch.dtype:
    return DTYPES.get(_dtype_name(config, decoder).removeprefix("torch."), torch.bfloat16)


def _dtype_name(config: Config, decoder: Config) -> str:
    """The dtype that a config names; empty if it names none."""
    name = decoder.get("dtype") or decoder.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype") or ""
    if not isinstance(name, str):
        raise ArgumentError("config field dtype", shown(name), f"a name: {', '.join(DTYPES)}")
    return name


def _notes(config: Config, decoder: Config, every: tuple[kinds.Kind, ...], shared: int) -> tuple[str, ...]:
    notes = []
    recurrent = sum(not kind.attends for kind in every)
    if recurrent:
        notes.append(
            f"{recurrent} of {len(every)} layers keep no keys; the state they keep instead, a constant for each sequence, is not counted"
        )
    if shared:
        notes.append(f"the last {shared} layers read the cache of earlier ones")
    if any(config.get(name) is not None for name in _NESTED):
        notes.append("a multimodal config: its text model is counted, its other towers are not")
    if flag(decoder, "add_cross_attention") or "cross_attention_hidden_size" in decoder:
        notes.append("the keys of an encoder, which cross-attention reads, are not counted")
    dtype = _dtype_name(config, decoder)
    if dtype.removeprefix("torch.") not in DTYPES:
        notes.append(f"the config names {f'dtype {shown(dtype)}' if dtype else 'no dtype'}: taken for bfloat16")
    return tuple(notes)
