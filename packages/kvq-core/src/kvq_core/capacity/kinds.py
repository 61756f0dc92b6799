"""Which of a model's layers keep keys, and how many: the many ways in which configs say so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvq_core.capacity.fields import Config, count, flag, indices, integer, required, shown, strings
from kvq_core.errors import ArgumentError


@dataclass(frozen=True)
class Kind:
    """Whether a layer attends, and over how many keys (``None``: all)."""

    attends: bool = True
    window: int | None = None


_WITHOUT: Final = frozenset({"linear_attention", "mamba", "mamba2", "conv", "recurrent", "rwkv", "mlp", "moe", "gated_deltanet"})
_FULL: Final = frozenset({"full_attention", "attention", "hybrid", "global", "global_attention"})
_WINDOWED: Final = frozenset({"sliding_attention", "local", "local_attention", "sliding_window_attention", "hybrid_sliding"})
# What ``layers`` are like where a config says nothing: transformers' own defaults, one windowed layer in so many is full.
_PATTERNS: Final = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6, "gemma3": 6, "gemma4_text": 6, "gemma3n_text": 5, "cohere2": 4}
_INTERVALS: Final = {"qwen3_next": 4, "qwen3_5_text": 4, "qwen3_5_moe_text": 4}


MAX_LAYERS: Final = 4096
"""Work and memory grow with the layers; no model has so many."""


def layer_kinds(config: Config) -> tuple[Kind, ...]:
    """One :class:`Kind` a layer, from the first of these that the config has: a list of layer types, a pattern of letters, the indices or
    the period of its attention layers; otherwise all layers attend, with windows where :func:`_window` and a pattern put them.

    Raises:
        ArgumentError: a layer type that kvq does not know, no number of layers, or two that contradict each other.
    """
    for name in ("layer_types", "layers_block_type"):
        types = strings(config, name)
        if types is not None:
            _as_many(config, name, len(types))
            return tuple(_of_type(config, name, kind) for kind in types)
    letters = config.get("hybrid_override_pattern")  # Nemotron-H: M mamba, * attention, - and E feed-forward
    if letters is not None:
        if not isinstance(letters, str) or not letters or set(letters) - set("M*-E"):
            raise ArgumentError("config field hybrid_override_pattern", shown(letters), "letters M, *, - and E, one a layer")
        _as_many(config, "hybrid_override_pattern", len(letters))
        return tuple(Kind(attends=letter == "*") for letter in letters)
    num_layers = _at_most(required(config, "num_hidden_layers"))
    cycle = strings(config, "block_types")  # RecurrentGemma
    if cycle:
        window = integer(config, "attention_window_size")
        return tuple(Kind(window=window) if cycle[i % len(cycle)] == "attention" else Kind(False) for i in range(num_layers))
    attending = _attending(config, num_layers)
    if attending is not None:
        return tuple(Kind(attends=i in attending) for i in range(num_layers))
    return _windows(config, num_layers)


def _at_most(num_layers: int) -> int:
    if num_layers > MAX_LAYERS:
        raise ArgumentError("config field num_hidden_layers", num_layers, f"at most {MAX_LAYERS:,}")
    return num_layers


def _as_many(config: Config, name: str, entries: int) -> None:
    """Raise unless a list of ``entries`` layers is as long as the config has layers."""
    num_layers = integer(config, "num_hidden_layers")
    _at_most(entries)
    if num_layers is not None and entries != num_layers:
        raise ArgumentError(f"config field {name}", f"{entries} entries", f"{num_layers}, as num_hidden_layers says")


def _attending(config: Config, num_layers: int) -> set[int] | None:
    """The layers that attend in a hybrid model; ``None`` for a model that is not said to be one."""
    for name in ("attn_layer_indices", "full_attn_idxs", "hybrid_layer_ids"):
        named = indices(config, name)
        if named is not None:
            if not all(0 <= i < num_layers for i in named):
                raise ArgumentError(f"config field {name}", shown(named), f"indices of layers, 0 to {num_layers - 1}")
            return set(named)
    flags = indices(config, "attn_type_list")  # MiniMax: 1 attends, 0 is linear
    if flags is not None:
        _as_many(config, "attn_type_list", len(flags))
        return {i for i, flag in enumerate(flags) if flag == 1}
    period = integer(config, "attn_layer_period")  # Jamba
    if period:
        return {i for i in range(num_layers) if i % period == count(config, "attn_layer_offset")}
    if config.get("model_type") == "bamba":  # without indices, which are asked for above
        return set()
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
    raise ArgumentError(f"config field {name}", shown(kind), f"layers that kvq can keep a cache for, or that need none: {known}")


def _windows(config: Config, num_layers: int) -> tuple[Kind, ...]:
    """Every layer attends; which of them have a window."""
    window = integer(config, "sliding_window")
    uses = flag(config, "use_sliding_window")
    if window is None or uses is False:
        return (Kind(),) * num_layers
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or _PATTERNS.get(str(config.get("model_type")))
    if isinstance(pattern, str) and pattern and not set(pattern) - set("LG"):  # EXAONE 4: L local, G global, over and over
        return tuple(Kind(window=window if pattern[i % len(pattern)] == "L" else None) for i in range(num_layers))
    if pattern is not None:
        if type(pattern) is not int or pattern < 1:
            raise ArgumentError("config field sliding_window_pattern", shown(pattern), "a positive integer, or letters L and G")
        return tuple(Kind(window=window if (i + 1) % pattern else None) for i in range(num_layers))
    first = count(config, "max_window_layers") if uses else 0  # Qwen2: the layers from this one on
    return tuple(Kind(window=window if i >= first else None) for i in range(num_layers))
