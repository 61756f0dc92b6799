"""Key biases of a served model: read from its own weights, for its rotary embeddings.

vLLM tells an attention layer nothing of the module that it is part of, which holds the projection and the embedding. torch does: whoever
asks hears of every module that becomes part of another.
"""

from __future__ import annotations

import logging
import math
import weakref
from typing import Any, Final

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from kvq_core.smoothing.calibration import KeySmoothing

_LOG: Final = logging.getLogger("vllm.kvq")
_CHECKED: Final = (2, 3, 50, 400)
"""Positions at which an embedding's phases must be those of its rates."""
_OWNERS: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""Of attention layers, the modules that they are part of."""
_KNOWN: weakref.WeakKeyDictionary[Any, tuple[torch.Tensor, torch.Tensor] | None] = weakref.WeakKeyDictionary()
"""Of embeddings, which layers share: their tables are as long as the context."""
_LISTENING: list[Any] = []


def listen() -> None:
    """From now on remember whose part attention layers become."""
    if not _LISTENING:
        _LISTENING.append(register_module_module_registration_hook(_remember))


def _remember(owner: Any, name: str, module: Any) -> None:
    if hasattr(module, "impl") and hasattr(module.impl, "kvq"):
        _OWNERS[module] = weakref.ref(owner)


def key_bias(layer: Any) -> KeySmoothing | None:
    """What the keys of an attention layer share by their projection's bias, on this rank; ``None`` if that is nothing, or not known."""
    remembered = _OWNERS.get(layer)
    owner = None if remembered is None else remembered()
    if owner is None:
        return None
    projections = [module for module in owner.children() if isinstance(module, QKVParallelLinear)]
    if len(projections) != 1 or not isinstance(projections[0].bias, torch.Tensor):
        return None
    (projection,) = projections
    size, first = projection.head_size, projection.num_heads * projection.head_size
    bias = projection.bias.detach()[first : first + projection.num_kv_heads * size].float().view(-1, size)
    if not bool(bias.any()):
        return None
    rotary = [module for module in owner.children() if isinstance(module, RotaryEmbedding)]
    # Between a bias and a key there must be nothing but the embedding.
    if len(rotary) == 1 and not any("norm" in name for name, _ in owner.named_children()):
        found = _rotary_smoothing(rotary[0], bias)
        if found is not None:
            return found
    _LOG.warning("kvq: key biases of %s stay in its keys: what becomes of them is not known", layer.layer_name)
    return None


def _rotary_smoothing(embedding: Any, bias: torch.Tensor) -> KeySmoothing | None:
    if embedding not in _KNOWN:
        _KNOWN[embedding] = _gain_and_rates(embedding)
    known = _KNOWN[embedding]
    if known is None:
        return None
    gain, rates = known
    count = len(rates)
    index = torch.arange(count)
    pairs = torch.stack((index, index + count) if embedding.is_neox_style else (2 * index, 2 * index + 1), 1)
    scaled = bias.clone()
    scaled[:, pairs] *= gain.to(bias)[:, None]
    return KeySmoothing.of_bias(scaled, pairs, rates)


def _gain_and_rates(embedding: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What an embedding multiplies pairs of channels by, and their radians a position; ``None`` if these change."""
    count, least = embedding.rotary_dim // 2, max(_CHECKED) + 1
    try:
        table = embedding._compute_cos_sin_cache()[:least].double()
    except (AttributeError, TypeError, RuntimeError):
        return None
    if table.shape != (least, 2 * count):
        return None
    cosine, sine = table.split(count, 1)
    rates = torch.atan2(sine[1], cosine[1])
    for position in _CHECKED:
        off = torch.atan2(sine[position], cosine[position]) - rates * position
        if bool(((off + math.pi).remainder(2 * math.pi) - math.pi).abs().max() > 1e-3):
            return None
    return cosine[0], rates
