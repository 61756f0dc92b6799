"""What a served model's weights say of its keys: their biases, and the sizes that norms give their channels.

vLLM tells an attention layer nothing of the module that it is part of, which holds the projection, the norms and the embedding. torch
does: whoever asks hears of every module that becomes part of another.
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

from kvq_core.errors import is_out_of_memory
from kvq_core.smoothing.calibration import KeySmoothing
from kvq_core.smoothing.qk_norm import norm_factors, norm_squares, norms_of, rows_of_heads, with_factors
from kvq_vllm.log import warn_once

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


def weights_smoothing(layer: Any) -> KeySmoothing | None:
    """The smoothing of an attention layer's keys on this rank, as far as its module's weights tell; ``None`` if they say nothing.

    What cannot be told is left out, with a warning.
    """
    remembered = _OWNERS.get(layer)
    owner = None if remembered is None else remembered()
    projections = [] if owner is None else [module for module in owner.children() if isinstance(module, QKVParallelLinear)]
    if owner is None or len(projections) != 1:
        what = "a module that is not known" if owner is None else type(owner).__name__
        warn_once(f"kvq: keys of {what} stay as they are: it has {len(projections)} QKVParallelLinear, and kvq reads the weights of one")
        return None
    (projection,) = projections
    known = _key_bias(owner, projection, layer.layer_name)
    factors = _norm_factors(owner, projection, layer.layer_name)
    return known if factors is None else with_factors(known, factors)


def _key_bias(owner: Any, projection: Any, layer_name: str) -> KeySmoothing | None:
    """What keys share by the bias of their projection, if it has one."""
    if not isinstance(projection.bias, torch.Tensor) or not bool(projection.bias.any()):
        return None
    bias = _added_to_keys(projection)
    if bias is None:
        _LOG.warning("kvq: key biases of %s stay in its keys: their order in its quantized projection is not known", layer_name)
        return None
    if not bool(bias.any()):
        return None
    rotary = [module for module in owner.children() if isinstance(module, RotaryEmbedding)]
    # Between a bias and a key there must be nothing but the embedding.
    if len(rotary) == 1 and not any("norm" in name for name, _ in owner.named_children()):
        found = _rotary_smoothing(rotary[0], bias)
        if found is not None:
            return found
    _LOG.warning("kvq: key biases of %s stay in its keys: what becomes of them is not known", layer_name)
    return None


@torch.no_grad()
def _added_to_keys(projection: Any) -> torch.Tensor | None:
    """[num_kv_heads, head_size] float32: the bias of keys, which are the projection's outputs for zeros; ``None`` if there are none such.

    The projection is asked, since quantized ones may keep the tensor in their kernel's order (Marlin).
    """
    zeros = torch.zeros(1, projection.input_size_per_partition, dtype=projection.params_dtype, device=projection.bias.device)
    first, count = projection.num_heads * projection.head_size, projection.num_kv_heads * projection.head_size
    try:
        added = projection.quant_method.apply(projection, zeros, projection.bias).float().flatten()[first : first + count]
        return added.view(-1, projection.head_size) if len(added) == count and bool(added.isfinite().all()) else None
    except Exception as problem:  # a quantization's own code, which may want more
        if is_out_of_memory(problem):
            raise
        return None


def _norm_factors(owner: Any, projection: Any, layer_name: str) -> torch.Tensor | None:
    """The factors by the norms of queries and keys, if there are both."""
    norms = norms_of(owner)
    if norms is None:
        return None
    # All kinds of embeddings have these, those of images too. Without the pairs factors would be those of other channels.
    rotary = [module for module in owner.children() if hasattr(module, "rotary_dim") and hasattr(module, "is_neox_style")]
    if len(rotary) != 1:
        _LOG.warning("kvq: channels of keys of %s stay as their norm leaves them: their rotary embedding is not known", layer_name)
        return None
    rank, (q_norm, k_norm) = projection.tp_rank, (norm_squares(norm, projection.head_size) for norm in norms)
    queries = rows_of_heads(q_norm, projection.num_heads, projection.total_num_heads, rank)
    # Where there are more ranks than kv heads, several have each.
    keys = rows_of_heads(k_norm, projection.num_kv_heads, projection.total_num_kv_heads, rank // projection.num_kv_head_replicas)
    if queries is None or keys is None:
        _LOG.warning("kvq: channels of keys of %s stay as their norm leaves them, whose weight is not one for their heads", layer_name)
        return None
    return norm_factors(keys, queries, rotary_pairs(rotary[0]))


def rotary_pairs(embedding: Any) -> torch.Tensor:
    """The pairs of channels [n, 2] that ``embedding`` turns."""
    count = embedding.rotary_dim // 2
    index = torch.arange(count)
    return torch.stack((index, index + count) if embedding.is_neox_style else (2 * index, 2 * index + 1), 1)


def _rotary_smoothing(embedding: Any, bias: torch.Tensor) -> KeySmoothing | None:
    if embedding not in _KNOWN:
        _KNOWN[embedding] = _gain_and_rates(embedding)
    known = _KNOWN[embedding]
    if known is None:
        return None
    gain, rates = known
    pairs = rotary_pairs(embedding)
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
