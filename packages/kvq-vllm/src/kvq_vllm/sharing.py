"""Layers that read another layer's pages, and must take them for what they hold."""

from __future__ import annotations

from typing import Any, Final

from kvq_core.errors import ArgumentError
from kvq_vllm.refusals import WITHOUT_KVQ

_OTHER: Final = "another backend's attention"
_CUSTOM: Final = "--attention-backend CUSTOM (of a draft: attention_backend in --speculative-config)"


def target_of(layer: Any) -> str | None:
    """The name of the layer whose pages ``layer`` reads, if it has none of its own. Of a draft's layers vLLM says so after loading."""
    target: str | None = getattr(layer, "kv_sharing_target_layer_name", None)
    return target


def share(config: Any) -> None:
    """Let all layers of ``config`` that read another one's pages have its smoothing and its exact rows: keys are as it stored them.

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
            way = f"{_CUSTOM} for both, and both or none in --kv-cache-dtype-skip-layers, or {WITHOUT_KVQ}"
            raise ArgumentError(f"layer {name}", found or _OTHER, f"{need or _OTHER} as {target}, whose pages it reads: {way}")
        if found is not None:
            impl, stored_by = layer.impl, layers[target].impl
            impl.smoothing, impl.smoothed_by, impl.residual = stored_by.smoothing, stored_by.smoothed_by, stored_by.residual


def _mode_of(layer: Any) -> str | None:
    """The mode of ``layer``'s pages, ``None`` if they are not kvq's."""
    kvq: Any = getattr(getattr(layer, "impl", None), "kvq", None)
    return None if kvq is None else str(kvq.mode)
