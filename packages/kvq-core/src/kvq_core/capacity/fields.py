"""Reading single fields of a config, under the several names that model families give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

from kvq_core.errors import ArgumentError

Config = Mapping[str, Any]
T = TypeVar("T")

NAMES: Final[dict[str, tuple[str, ...]]] = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_head_kv"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "head_dim": ("head_dim", "attention_head_dim", "kv_channels"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len", "model_max_length"),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "moe_intermediate_size": ("moe_intermediate_size", "intermediate_size"),
    "intermediate_size": ("intermediate_size", "ffn_dim", "n_inner"),
}
"""Our name of a field, and the names it goes by, the usual one first."""


def integer(config: Config, name: str) -> int | None:
    """The positive integer under any of the names of ``name``; ``None`` if the config has none of them, or null.

    Raises:
        ArgumentError: it is something else.
    """
    for alias in NAMES.get(name, (name,)):
        value = config.get(alias)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ArgumentError(f"config field {alias}", repr(value), "a positive integer")
        return value
    return None


def required(config: Config, name: str) -> int:
    """:func:`integer`, where a config without the field cannot be used."""
    value = integer(config, name)
    if value is None:
        raise ArgumentError(
            f"config field {name}",
            f"none in a config of model type {config.get('model_type', 'unknown')!r}",
            "the config.json of a decoder",
        )
    return value


def strings(config: Config, name: str) -> list[str] | None:
    """A list of strings; ``None`` if there is none."""
    return _several(config, name, str, "a list of strings")


def indices(config: Config, name: str) -> list[int] | None:
    """A list of layer indices; ``None`` if there is none."""
    return _several(config, name, int, "a list of layer indices")


def _several(config: Config, name: str, kind: type[T], need: str) -> list[T] | None:
    value = config.get(name)
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(isinstance(item, kind) for item in value):
        raise ArgumentError(f"config field {name}", repr(value), need)
    return list(value)
