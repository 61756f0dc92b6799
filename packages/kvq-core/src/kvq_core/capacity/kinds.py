"""Which of a model's layers keep keys, and how many: the many ways in which configs say so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvq_core.capacity.fields import Config, indices, integer, required, strings
from kvq_core.errors import ArgumentError


@dataclass(frozen=True)
class Kind:
    """Whether a layer attends, and over how many keys (``None``: all)."""

    attends: bool = True
    window: int | None = None


_WITHOUT: Final = frozenset({"linear_attention", "mamba", "mamba2", "conv", "recurrent", "rwkv", "mlp", "moe", "gated_deltanet"})
_FULL: Final = frozenset({"full_attention", "attention", "hybrid", "global", "global_attention"})
_WINDOWED: Final = frozenset({"sliding_attention", "local", "local_attention", "sliding_window_attention"})
# What ``layers`` are like where a config says nothing: transformers' own defaults, one windowed layer in so many is full.
_PATTERNS: Final = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "gemma3": 6, "gemma4_text": 6, "gemma3n_text": 5, "cohere2": 4}
_INTERVALS: Final = {"qwen3_next": 4, "qwen3_5_text": 4, "qwen3_5_moe_text": 4}


def layer_kinds(config: Config) -> tuple[Kind, ...]:
    """One :class:`Kind` a layer, from the first of these that the config has: a list of layer types, a pattern of letters, the indices or
    the period of its attention layers; otherwise all layers attend, with windows where :func:`_window` and a pattern put them.

    Raises:
        ArgumentError: a layer type that kvq does not know, or no number of layers.
    """
    for name in ("layer_types", "layers_block_type"):
        types = strings(config, name)
        if types is not None:
            return tuple(_of_type(config, name, kind) for kind in types)
    letters = config.get("hybrid_override_pattern")  # Nemotron-H: M mamba, * attention, - and E feed-forward
    if isinstance(letters, str):
        return tuple(Kind(attends=letter == "*") for letter in letters if letter in "M*-E")
    num_layers = required(config, "num_hidden_layers")
    cycle = strings(config, "block_types")  # RecurrentGemma
    if cycle:
        window = integer(config, "attention_window_size")
        return tuple(Kind(window=window) if cycle[i % len(cycle)] == "attention" else Kind(False) for i in range(num_layers))
    attending = _attending(config, num_layers)
    if attending is not None:
        return tuple(Kind(attends=i in attending) for i in range(num_layers))
    return _windows(config, num_layers)


def _attending(config: Config, num_layers: int) -> set[int] | None:
    """The layers that attend in a hybrid model; ``None`` for a model that is not said to be one."""
    for name in ("attn_layer_indices", "full_attn_idxs", "hybrid_layer_ids"):
        named = indices(config, name)
        if named is not None:
            return set(named)
    flags = indices(config, "attn_type_list")  # MiniMax: 1 attends, 0 is linear
    if flags is not None:
        return {i for i, flag in enumerate(flags) if flag == 1}
    period = integer(config, "attn_layer_period")  # Jamba
    if period:
        return {i for i in range(num_layers) if i % period == (config.get("attn_layer_offset") or 0)}
    interval = integer(config, "full_attention_interval") or _INTERVALS.get(str(config.get("model_type")))
    return {i for i in range(num_layers) if (i + 1) % interval == 0} if interval else None


def _of_type(config: Config, name: str, kind: str) -> Kind:
    if kind in _WITHOUT:
        return Kind(attends=False)
    if kind in _FULL:
        return Kind()
    if kind in _WINDOWED:
        return Kind(window=required(config, "sliding_window"))
    known = ", ".join(sorted(_FULL | _WINDOWED | _WITHOUT))
    raise ArgumentError(f"config field {name}", repr(kind), f"layers that kvq can keep a cache for, or that need none: {known}")


def _windows(config: Config, num_layers: int) -> tuple[Kind, ...]:
    """Every layer attends; which of them have a window."""
    window = integer(config, "sliding_window")
    if window is None or config.get("use_sliding_window") is False:
        return (Kind(),) * num_layers
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or _PATTERNS.get(str(config.get("model_type")))
    if isinstance(pattern, str):  # EXAONE 4: L local, G global, over and over
        return tuple(Kind(window=window if pattern[i % len(pattern)] == "L" else None) for i in range(num_layers))
    if pattern is not None:
        if not isinstance(pattern, int) or pattern < 1:
            raise ArgumentError("config field sliding_window_pattern", repr(pattern), "a positive integer, or letters L and G")
        return tuple(Kind(window=window if (i + 1) % pattern else None) for i in range(num_layers))
    first = 0
    if config.get("use_sliding_window") is True:  # Qwen2: the layers from this one on
        first = config.get("max_window_layers") or 0
    return tuple(Kind(window=window if i >= first else None) for i in range(num_layers))
