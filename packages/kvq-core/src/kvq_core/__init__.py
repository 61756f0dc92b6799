"""Paged, quantized KV caches: the contract every kvq mode implements, and what a caller needs to use one.

Importing this package is cheap: it imports neither torch nor triton nor any mode. The names below arrive at first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from kvq_core.errors import (
    ArgumentError,
    BrokenBackendError,
    DuplicateModeError,
    KVQError,
    OutOfBlocksError,
    SnapshotError,
    UnknownModeError,
)
from kvq_core.registry import InstalledMode, get_backend, has_backend, list_backends, register_backend, unregister_backend

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend
    from kvq_core.cache.paged import PagedKVCache
    from kvq_core.call.cascade import combine
    from kvq_core.hadamard import fast_hadamard_transform, single_rht
    from kvq_core.plan.invariance import batch_invariant, set_batch_invariant

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "BrokenBackendError",
    "DuplicateModeError",
    "InstalledMode",
    "KVQError",
    "OutOfBlocksError",
    "PagedKVCache",
    "QuantKVBackend",
    "SnapshotError",
    "UnknownModeError",
    "batch_invariant",
    "combine",
    "fast_hadamard_transform",
    "get_backend",
    "has_backend",
    "list_backends",
    "register_backend",
    "set_batch_invariant",
    "single_rht",
    "unregister_backend",
]


def __getattr__(name: str) -> object:
    home = {
        "QuantKVBackend": "backend",
        "PagedKVCache": "cache.paged",
        "combine": "call.cascade",
        "fast_hadamard_transform": "hadamard",
        "single_rht": "hadamard",
        "batch_invariant": "plan.invariance",
        "set_batch_invariant": "plan.invariance",
    }.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
