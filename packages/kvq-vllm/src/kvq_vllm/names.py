"""What vLLM's ``kv_cache_dtype`` names mean to kvq. Imports nothing but kvq's registry, which reads package metadata."""

from __future__ import annotations

from typing import Final

from kvq_core.registry import list_backends, short_pairs

PREFIX: Final = "kvq_"
VLLM_NAMES: Final = ("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head")
"""vLLM's own names of modes that kvq has, too."""
PLAIN_NAMES: Final = ("auto", "float16", "bfloat16")
"""Names of an unquantized cache. Layers of ``kv_cache_dtype_skip_layers`` have ``auto``."""
_SUFFIX: Final = "_per_token_head"


def own_names() -> dict[str, str]:
    """The names that kvq adds to vLLM, each with a name of its mode: for every installed mode, whoever provides it, and every pair of them
    that has a short name (``kvq_k8v4``)."""
    modes = sorted({entry.mode for entry in list_backends()})
    return {own_name(mode): mode for mode in modes} | {PREFIX + pair: pair for pair in short_pairs()}


def own_name(mode: str) -> str:
    """kvq's name of an installed mode."""
    return PREFIX + mode.removesuffix(_SUFFIX)


def mode_of(name: str, override: str | None = None) -> str | None:
    """The mode that layers of this ``kv_cache_dtype`` have; ``None`` if the name is none of kvq's business.

    ``override``: the mode that the configuration gives layers of vLLM's quantized names.
    """
    if name in PLAIN_NAMES:
        return "none"
    if name in VLLM_NAMES:
        return override or name
    return own_names().get(name)
