"""What a model's weights say of its keys, without a text: their biases, and the sizes that norms give their channels."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from kvq_core.errors import ArgumentError
from kvq_core.smoothing.calibration import FIRST_PREFILL, KEY_BIAS, WEIGHTS, KeySmoothing, Smoothings
from kvq_core.smoothing.qk_norm import norm_factors, norm_squares, norms_of, rows_of_heads, with_factors
from kvq_transformers.key_bias import Memory, embeddings, key_biases, remembered

_LOG: Final = logging.getLogger(__name__)
_KNOWN: Final[Memory] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _Norms:
    """A layer's norms of queries and keys, for so many heads of ``head_size``."""

    layer: int
    q_norm: Any
    k_norm: Any
    num_query_heads: int
    num_kv_heads: int
    head_size: int

    def factors(self, pairs: torch.Tensor) -> torch.Tensor | None:
        """Behind an embedding of channels ``pairs``; ``None`` if a norm's weight is elsewhere, or not one for these heads."""
        parts = ((self.q_norm, self.num_query_heads), (self.k_norm, self.num_kv_heads))
        queries, keys = (rows_of_heads(norm_squares(norm, self.head_size), count, count) for norm, count in parts)
        return None if queries is None or keys is None else norm_factors(keys, queries, pairs)


def known_smoothing(model: PreTrainedModel | None, smoothing: Smoothings) -> Mapping[int, KeySmoothing]:
    """What ``smoothing`` takes from the weights of ``model``, by layer; nothing of a model that is not known."""
    if model is None or smoothing not in (WEIGHTS, KEY_BIAS, FIRST_PREFILL):
        return {}
    return weights_smoothing(model) if smoothing == WEIGHTS else key_biases(model)


def weights_smoothing(model: PreTrainedModel) -> Mapping[int, KeySmoothing]:
    """The smoothing of each layer of ``model`` of which the weights say something: its key bias, and factors by its norms.

    What cannot be told is left out, with a warning.
    """
    biases, norms = key_biases(model), list(layer_norms(model))
    if not norms:
        return biases
    weights = [norm.weight for one in norms for norm in (one.q_norm, one.k_norm)]
    means = [tensor for one in biases.values() for tensor in one.operands]
    return remembered(_KNOWN, model, [*weights, *means], lambda: _balanced(model, norms, biases))


def layer_norms(model: torch.nn.Module) -> Iterator[_Norms]:
    """Of the attention layers in ``model`` that have both."""
    module: Any
    for module in model.modules():
        norms, width = norms_of(module), getattr(getattr(module, "k_proj", None), "out_features", 0)
        if norms is not None and width and all(hasattr(module, name) for name in ("layer_idx", "head_dim", "num_key_value_groups")):
            num_kv_heads = width // module.head_dim
            yield _Norms(module.layer_idx, *norms, num_kv_heads * module.num_key_value_groups, num_kv_heads, module.head_dim)


def _balanced(model: PreTrainedModel, norms: list[_Norms], biases: Mapping[int, KeySmoothing]) -> dict[int, KeySmoothing]:
    found = dict(biases)
    try:
        known = embeddings(model)
    except ArgumentError as problem:
        _LOG.warning("channels of keys stay as the norms of %s leave them: %s", type(model).__name__, problem)
        return found
    for one in norms:
        if one.layer not in known:
            continue
        factors = one.factors(known[one.layer].pairs)
        if factors is None:
            _LOG.warning("channels of keys of layer %d stay as its norm leaves them, whose weight is not one for its heads", one.layer)
            continue
        found[one.layer] = with_factors(found.get(one.layer), factors)
    return found
