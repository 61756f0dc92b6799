"""Whether what somebody offers as a backend has what the contract says, before anything is asked of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from kvq_core.errors import BrokenBackendError, KVQError, told

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend
    from kvq_core.kernels.formats import Kernels


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _are_errors(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(error) in (int, float) and math.isfinite(error) for error in value)


_FIELDS: Final = MappingProxyType[str, tuple[str, Callable[[Any], bool]]](
    {
        "mode": ("of type str", lambda value: isinstance(value, str)),
        "packing_factor": ("that is an integer or a Fraction, 1 or more", lambda value: type(value) in (int, Fraction) and value >= 1),
        "head_size_multiple": ("that is a positive integer", _is_count),
        "max_head_size": ("that is a positive integer", _is_count),
        "needs_scale_caches": ("that is True or False", lambda value: isinstance(value, bool)),
        "reads_scales": ("that is True or False", lambda value: isinstance(value, bool)),
        "order_multiple": ("that is 0 or a positive integer", lambda value: type(value) is int and value >= 0),
        "read_level_errors": ("that is a tuple of finite numbers", _are_errors),
        **dict.fromkeys(
            (
                "cache_dtype",
                "accepted_cache_dtypes",
                "packed_head_size",
                "check_head_size",
                "allocate_scale_caches",
                "encode",
                "encode_value",
                "decode",
                "encode_ordered",
                "decode_ordered",
                "kernels",
                "write",
                "read",
                "reshape_and_cache",
                "unified_attention",
            ),
            ("that can be called", callable),
        ),
    }
)
"""Attributes of a backend: what each must be, in words and as a test."""


def checked(backend: object) -> QuantKVBackend:
    """``backend``, a class or an instance, as an instance; TypeError if it does not fit the contract, or what its own code raises."""
    from kvq_core.backend import QuantKVBackend

    instance = backend() if isinstance(backend, type) and issubclass(backend, QuantKVBackend) else backend
    if not isinstance(instance, QuantKVBackend):
        raise TypeError(f"{backend!r} is not a QuantKVBackend")
    for name, (need, holds) in _FIELDS.items():
        value = getattr(instance, name, None)
        if not holds(value):
            raise TypeError(f"{backend!r} has no {name} attribute {need}: it is {value!r}")
    if instance.head_size_multiple % instance.packing_factor:
        of_packing = f"a multiple of its packing_factor {instance.packing_factor}"
        raise TypeError(f"{backend!r}: its head_size_multiple is {instance.head_size_multiple}, need {of_packing}")
    return instance


def checked_kernels(backend: QuantKVBackend) -> Kernels | None:
    """What ``backend.kernels()`` returns; :class:`BrokenBackendError` if some head sizes that the mode takes are no whole lanes."""
    kernels = backend.kernels()
    if kernels is not None:
        for plane in (kernels.format.key, kernels.format.value):
            channels = plane.ways * (2 if plane.side_bytes else 1)
            if backend.head_size_multiple % channels:
                need = f"a multiple of {channels}, which its format {plane.name!r} keeps together"
                raise BrokenBackendError(f"mode {backend.mode!r}: its head_size_multiple is {backend.head_size_multiple}, need {need}")
        if backend.order_multiple and kernels.format.ordered_key is None:
            raise BrokenBackendError(f"mode {backend.mode!r}: it has an order_multiple, and its kernels' format no ordered_key")
    return kernels


@contextmanager
def blamed(mode: str) -> Iterator[None]:
    """Within the block the code of ``mode`` runs: what it raises, kvq's own errors apart, is a :class:`BrokenBackendError` of that mode."""
    try:
        yield
    except (KVQError, KeyboardInterrupt):
        raise
    except BaseException as cause:  # SystemExit, too
        raise BrokenBackendError(f"mode {mode!r} does not work: {told(cause)}") from cause
