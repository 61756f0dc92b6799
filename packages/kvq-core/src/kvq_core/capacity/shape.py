"""What of a model its KV cache depends on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch

from kvq_core.errors import ArgumentError

DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class AttentionLayer:
    """One layer that keeps keys and values: ``window`` of them (a row and the keys before it), or all of them (``None``)."""

    num_kv_heads: int
    head_size: int
    head_size_v: int
    window: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "head_size", "head_size_v"):
            if getattr(self, name) < 1:
                raise ArgumentError(name, getattr(self, name), "a positive integer")
        if self.window is not None and self.window < 1:
            raise ArgumentError("window", self.window, "a positive integer, or None for all keys")


@dataclass(frozen=True)
class ModelShape:
    """A decoder as its cache sees it.

    Attributes:
        model_type: as the config names it.
        layers: the layers that keep keys and values, in order. Layers without a KV cache of their own (recurrent ones, ones that
            read another layer's) are not among them.
        num_layers: all layers.
        dtype: of the model's K/V rows.
        max_context: tokens the model says it can attend over; ``None`` if the config does not say.
        notes: what a reader of the figures should know about this model.
        num_query_heads: of a layer; ``None`` if nobody asks.
    """

    model_type: str
    layers: tuple[AttentionLayer, ...]
    num_layers: int
    dtype: torch.dtype
    max_context: int | None
    notes: tuple[str, ...] = ()
    num_query_heads: int | None = None

    def on_each_of(self, gpus: int) -> ModelShape:
        """What each GPU caches under tensor parallelism: its part of the kv heads, or, with more GPUs than kv heads, a copy of one.

        Raises:
            ArgumentError: the heads do not divide so.
        """
        if gpus < 1:
            raise ArgumentError("gpus", gpus, "a positive number of GPUs")
        heads = {layer.num_kv_heads for layer in self.layers}
        uneven = [f"{n} kv heads" for n in sorted(heads) if n % gpus and gpus % n]
        if self.num_query_heads is not None and self.num_query_heads % gpus:
            uneven.append(f"{self.num_query_heads} query heads")
        if uneven:
            needed = "a divisor or a multiple of the kv heads"
            if self.num_query_heads is not None:
                needed = "a divisor of the query heads that divides the kv heads, too, or is a multiple of them"
            raise ArgumentError("gpus", f"{gpus} for layers of {' and '.join(uneven)}", needed)
        layers = tuple(replace(layer, num_kv_heads=max(1, layer.num_kv_heads // gpus)) for layer in self.layers)
        return replace(self, layers=layers, num_query_heads=None if self.num_query_heads is None else self.num_query_heads // gpus)

    def describe(self) -> str:
        """One line: how many layers of which kind."""
        kinds: dict[AttentionLayer, int] = {}
        for layer in self.layers:
            kinds[layer] = kinds.get(layer, 0) + 1
        parts = []
        for layer, count in kinds.items():
            size = str(layer.head_size) if layer.head_size == layer.head_size_v else f"{layer.head_size}/{layer.head_size_v}"
            window = "" if layer.window is None else f", window {layer.window:,}"
            parts.append(f"{count} x {layer.num_kv_heads} kv heads of {size}{window}")
        without = self.num_layers - len(self.layers)
        return "; ".join(parts) + (f"; {without} layers without a KV cache" if without else "")
