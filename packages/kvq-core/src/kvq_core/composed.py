"""K in the format of one mode and V in that of another: ``get_backend("int8/int4")``, or ``k8v4`` for short.

Nothing here knows a format. Encoding, decoding and page layout are those of the two halves, and so are the hooks of the kernels.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NoReturn

import torch

from kvq_core.backend import QuantKVBackend
from kvq_core.errors import ArgumentError
from kvq_core.registry import SEPARATOR

if TYPE_CHECKING:
    from kvq_core.kernels.formats import Kernels


class ComposedBackend(QuantKVBackend):
    """K as ``key_half`` stores it, V as ``value_half`` does; both modes with a scale for each (token, head).

    Ask the halves for what differs between K and V: cache dtype, packed head size, ``encode`` and ``decode``.

    Raises:
        ArgumentError: a half has no scale for each (token, head), or is composed itself.
    """

    def __init__(self, key_half: QuantKVBackend, value_half: QuantKVBackend) -> None:
        for name, half in (("key_half", key_half), ("value_half", value_half)):
            if isinstance(half, ComposedBackend) or not half.needs_scale_caches:
                raise ArgumentError(name, f"mode {half.mode}", "a mode that stores a scale for each (token, head), such as int8 or int4")
        self._halves = (key_half, value_half)
        self.mode = f"{key_half.mode}{SEPARATOR}{value_half.mode}"  # type: ignore[misc]  # of an instance: there is no class for each pair
        self.head_size_multiple = math.lcm(*(half.head_size_multiple for half in self._halves))  # type: ignore[misc]
        self.max_head_size = min(half.max_head_size for half in self._halves)  # type: ignore[misc]
        self.read_level_errors = key_half.read_level_errors + value_half.read_level_errors  # type: ignore[misc]

    @property
    def key_half(self) -> QuantKVBackend:
        return self._halves[0]

    @property
    def value_half(self) -> QuantKVBackend:
        return self._halves[1]

    def cache_dtype(self, dtype: torch.dtype) -> torch.dtype:
        self._refuse("cache_dtype")

    def packed_head_size(self, head_size: int) -> int:
        self._refuse("packed_head_size")

    def encode(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows of K, as ``key_half`` encodes them."""
        return self.key_half.encode(x, scale=scale)

    def encode_value(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows of V, as ``value_half`` encodes them."""
        return self.value_half.encode_value(x, scale=scale)

    def encode_ordered(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows of K, as ``key_half`` encodes them."""
        return self.key_half.encode_ordered(x)

    def decode(self, codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        self._refuse("decode")

    def kernels(self) -> Kernels | None:
        key, value = (half.kernels() for half in self._halves)
        if key is None or value is None:
            return None
        from kvq_core.kernels import plain
        from kvq_core.kernels.formats import Format, Kernels

        return Kernels(Format(key.format.key, value.format.value, ordered_key=key.format.ordered_key), plain.write, plain.attend)

    def _refuse(self, what: str) -> NoReturn:
        halves = " and ".join(half.mode for half in self._halves)
        raise ArgumentError("backend", f"{what} of mode {self.mode}", f"that of its key_half or its value_half: {halves} differ")
