"""Layers that read another layer's pages, and must take them for what they hold."""

from __future__ import annotations

from typing import Any

from kvq_core.errors import ArgumentError
from kvq_vllm.refusals import WITHOUT_KVQ


def target_of(layer: Any) -> str | None:
    """The name of the layer whose pages ``layer`` reads, if it has none of its own. Of a draft's layers vLLM says so after loading."""
    target: str | None = getattr(layer, "kv_sharing_target_layer_name", None)
    return target


def share(config: Any) -> None:
    """Check all layers of ``config`` that share pages.

    Raises:
        ArgumentError: of two layers with the same pages one has another mode, or is not kvq's.
    """
    layers = config.compilation_config.static_forward_context
    for name, layer in layers.items():
        target = target_of(layer)
        if target is None:
            continue
        found, need = (_mode_of(layers[each]) for each in (name, target))
        if found != need:
            both = f"{need or 'attention of another backend'} as {target}, whose pages it reads"
            way = f"name both or none of them in --kv-cache-dtype-skip-layers, or {WITHOUT_KVQ}"
            raise ArgumentError(f"layer {name}", found or "attention of another backend", f"{both}: {way}")


def _mode_of(layer: Any) -> str | None:
    """The mode of ``layer``'s pages, ``None`` if they are not kvq's."""
    kvq: Any = getattr(getattr(layer, "impl", None), "kvq", None)
    return None if kvq is None else str(kvq.mode)
