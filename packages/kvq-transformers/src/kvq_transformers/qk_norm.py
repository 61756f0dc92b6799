"""What the weights of a model's norms of queries and keys (QK-norm) say of their channels: factors that balance them, without a text.

A norm leaves each channel with the size that its weight has, and a rotary embedding mixes the two channels of a pair: over many positions
both have the mean of their squares. Keys are stored over the factors and queries are multiplied by them, so that scores stay what they are
whatever the factors.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from kvq_core.errors import ArgumentError
from kvq_core.smoothing.calibration import QK_NORM, KeySmoothing, channel_factors
from kvq_transformers.key_bias import Memory, embeddings, key_biases, remembered

_KNOWN: Final[Memory] = weakref.WeakKeyDictionary()


def norms_smoothing(model: object) -> Mapping[int, KeySmoothing]:
    """The smoothing of each layer of ``model``: its key bias, if there is one, and factors by its norms.

    Raises:
        ArgumentError: no model, one without such norms, or with a rotary embedding that is not known.
    """
    if not isinstance(model, PreTrainedModel):
        raise ArgumentError("smoothing", repr(QK_NORM), "a model in the place of its config, which has no weights")
    layers = dict(_normalized(model))
    if not layers:
        need = "one whose attention layers have q_norm and k_norm with weights"
        raise ArgumentError("smoothing", f"{QK_NORM!r} for {type(model).__name__}", need)
    biases = key_biases(model)
    weights = [norm.weight for layer in layers.values() for norm in (layer.q_norm, layer.k_norm)]
    means = [tensor for one in biases.values() for tensor in one.operands]
    return remembered(_KNOWN, model, [*weights, *means], lambda: _balanced(model, layers, biases))


def _normalized(model: Any) -> Iterator[tuple[int, Any]]:
    """The attention layers that have both norms, by number."""
    for module in model.modules():
        weights = (getattr(getattr(module, name, None), "weight", None) for name in ("q_norm", "k_norm"))
        known = all(hasattr(module, name) for name in ("layer_idx", "head_dim", "num_key_value_groups", "k_proj"))
        if known and all(isinstance(weight, torch.Tensor) for weight in weights):
            yield int(module.layer_idx), module


def _balanced(model: PreTrainedModel, layers: Mapping[int, Any], biases: Mapping[int, KeySmoothing]) -> dict[int, KeySmoothing]:
    found = dict(biases)
    for number, embedding in embeddings(model).items():
        if number not in layers:
            continue
        layer = layers[number]
        size, group = int(layer.head_dim), int(layer.num_key_value_groups)
        heads = layer.k_proj.weight.shape[0] // size
        queries, keys = (_squares(norm, size) for norm in (layer.q_norm, layer.k_norm))
        if len(queries) > 1:
            queries = queries.unflatten(0, (heads, group)).mean(1)
        factors = channel_factors(*(_behind(squares.expand(heads, size), embedding.pairs) for squares in (keys, queries)))
        found[number] = replace(found.get(number, KeySmoothing(torch.zeros_like(factors))), balance=factors)
    return found


@torch.no_grad()
def _squares(norm: Any, size: int) -> torch.Tensor:
    """[heads, or 1 for all, size]: of the channels that a norm makes of 1 and -1, whose mean is 0, as some norms want it. Of families
    some add 1 to the weight."""
    signs = torch.ones_like(norm.weight)
    signs[..., 1::2] = -1
    return norm(signs[None]).double().square().view(-1, size)


def _behind(squares: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """Root mean squares behind a rotary embedding of channels ``pairs`` [n, 2]."""
    mixed = squares.clone()
    pairs = pairs.to(squares.device)
    mixed[:, pairs[:, 0]] = mixed[:, pairs[:, 1]] = squares[:, pairs].mean(-1)
    return mixed.sqrt()
