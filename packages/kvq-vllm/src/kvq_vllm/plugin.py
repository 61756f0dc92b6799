"""Offering kvq to the vLLM of this process: names of KV cache dtypes, and the attention backend ``CUSTOM``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kvq_core import variables
from kvq_core.registry import has_backend
from kvq_vllm.names import VLLM_NAMES, own_names

SLOT: Final = "CUSTOM"
PATH: Final = "kvq_vllm.backend.KVQBackend"
CPU_PATH: Final = "kvq_vllm.backend.KVQCPUBackend"
CPU_SWITCH: Final = "KVQ_VLLM_CPU"
"""Take the place of vLLM's attention on its CPU platform, which asks for no other backend. For tests without a GPU."""


@dataclass(frozen=True)
class Offer:
    """What became of an offer. ``names``: of KV cache dtypes that kvq serves here; ``problem``: why it stepped aside, or ""."""

    names: tuple[str, ...] = ()
    problem: str = ""


_MADE: list[Offer] = []


def offer() -> Offer:
    """Make the offer, once in a process; whatever goes wrong is logged in one line and ends there."""
    if not _MADE:
        try:
            _MADE.append(_offer())
        except Exception as problem:  # a plug-in must never keep vLLM from starting
            _MADE.append(Offer(problem=f"{type(problem).__name__}: {problem}"))
        if _MADE[0].problem:
            logging.getLogger("vllm.kvq").warning("kvq steps aside: %s", _MADE[0].problem)
    return _MADE[0]


def _offer() -> Offer:
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as problem:
        return Offer(problem=f"this vLLM has no attention backends to register ({problem}); kvq-vllm needs 0.26 or later")
    slot = getattr(AttentionBackendEnum, SLOT, None)
    if slot is None:
        return Offer(problem=f"this vLLM has no attention backend {SLOT}; kvq-vllm needs 0.26 or later")
    if slot.is_overridden() and slot.get_path() != PATH:
        return Offer(problem=f"attention backend {SLOT} is taken by {slot.get_path()}")
    replaces_cpu = variables.flag(CPU_SWITCH)
    names = (*filter(has_backend, VLLM_NAMES), *_add_names())
    register_backend(slot, PATH)
    if replaces_cpu:
        register_backend(AttentionBackendEnum.CPU_ATTN, CPU_PATH)
    return Offer(names)


def _add_names() -> tuple[str, ...]:
    """Add kvq's own names to vLLM's KV cache dtypes, where it takes new ones (0.33 and later)."""
    try:
        from vllm.config.cache import KV_CACHE_DTYPES, register_kv_cache_dtype
    except ImportError:
        return ()
    found = own_names()
    for name in found:
        # Names that are there already may be kvq's own, of an earlier call, or somebody else's.
        if name not in KV_CACHE_DTYPES:
            register_kv_cache_dtype(name)(_handler(name))
    return tuple(found)


def _handler(name: str) -> type[Any]:
    """What vLLM asks about a dtype: bytes, whose meaning is the attention backend's business."""
    import torch
    from vllm.v1.kv_cache_interface import KVQuantMode

    def torch_dtype(self: object) -> torch.dtype:
        return torch.uint8

    def quant_mode(self: object) -> Any:
        return KVQuantMode.CUSTOM

    members: dict[str, str | Callable[[object], Any]] = {"name": name, "torch_dtype": torch_dtype, "quant_mode": quant_mode}
    return type("KVQCacheDType", (), members)
