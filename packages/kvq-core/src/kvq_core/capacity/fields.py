"""Reading single fields of a config, under the several names that model families give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

from kvq_core.errors import ArgumentError

Config = Mapping[str, Any]
T = TypeVar("T")

NAMES: Final[dict[str, tuple[str, ...]]] = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "attention_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_head_kv", "kv_n_heads"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim", "emb_dim"),
    "head_dim": ("head_dim", "attention_head_dim", "kv_channels"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len", "model_max_length"),
    "sliding_window": ("sliding_window", "sliding_window_size"),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "moe_intermediate_size": ("moe_intermediate_size", "intermediate_size"),
    "intermediate_size": ("intermediate_size", "ffn_dim", "n_inner"),
}
"""Our name of a field, and the names it goes by, the usual one first."""
_ONE_MEANING: Final = frozenset({"num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size"})
"""Fields whose names all say the same."""


_LARGEST: Final = 2**40
"""No field of a model is larger; beyond it is damage."""


def integer(config: Config, name: str, least: int = 1) -> int | None:
    """The integer, ``least`` or more, under any of the names of ``name``; ``None`` if the config has none of them, or null.

    Raises:
        ArgumentError: it is something else, or two of the names hold different ones.
    """
    found: dict[str, int] = {}
    for alias in NAMES.get(name, (name,)):
        value = config.get(alias)
        if value is None:
            continue
        if type(value) is not int or not least <= value <= _LARGEST:
            need = "a positive integer" if least == 1 else f"an integer, {least} or more"
            raise ArgumentError(f"config field {alias}", shown(value), f"{need}, up to 2^40")
        found[alias] = value
    if len(set(found.values())) > 1 and name in _ONE_MEANING:
        both = " and ".join(f"{alias} {value}" for alias, value in found.items())
        raise ArgumentError(f"config field {name}", both, "one value under all its names")
    return next(iter(found.values()), None)


def count(config: Config, name: str) -> int:
    """An integer that may be 0, which it is where the config does not say.

    Raises:
        ArgumentError: it is something else.
    """
    return integer(config, name, 0) or 0


def flag(config: Config, name: str) -> bool | None:
    """A boolean; ``None`` if there is none.

    Raises:
        ArgumentError: it is something else.
    """
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ArgumentError(f"config field {name}", shown(value), "true or false")
    return value


def shown(value: object) -> str:
    """``value`` as a message quotes it: not longer than a line."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deep; an integer of too many digits
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def required(config: Config, name: str) -> int:
    """:func:`integer`, where a config without the field cannot be used."""
    value = integer(config, name)
    if value is None:
        raise ArgumentError(
            f"config field {name}",
            f"none in a config of model type {shown(config.get('model_type', 'unknown'))}",
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
    if not isinstance(value, list | tuple) or not all(type(item) is kind for item in value):
        raise ArgumentError(f"config field {name}", shown(value), need)
    return list(value)
