"""What the weights of a model's norms of queries and keys (QK-norm) say of their channels: factors that balance them, without a text.

A norm leaves each channel with the size that its weight has, and a rotary embedding mixes the two channels of a pair: over many positions
both have the mean of their squares. Keys are stored over the factors and queries are multiplied by them, so that scores stay what they are
whatever the factors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from kvq_core.errors import ArgumentError
from kvq_core.smoothing.calibration import QK_NORM, KeySmoothing, channel_factors
from kvq_transformers.key_bias import embeddings, key_biases


def norms_smoothing(model: object) -> Mapping[int, KeySmoothing]:
    """The smoothing of each layer of ``model``: its key bias, if there is one, and factors by its norms.

    Raises:
        ArgumentError: no model, one without such norms, or with a rotary embedding that is not known.
    """
    if not isinstance(model, PreTrainedModel):
        raise ArgumentError("smoothing", repr(QK_NORM), "a model in the place of its config, which has no weights")
    norms = dict(_norms(model))
    if not norms:
        need = "one whose attention layers have q_norm and k_norm with weights"
        raise ArgumentError("smoothing", f"{QK_NORM!r} for {type(model).__name__}", need)
    pairs = {layer: embedding.pairs for layer, embedding in embeddings(model).items()}
    found = dict(key_biases(model))
    for layer, (queries, keys) in norms.items():
        factors = channel_factors(_behind(keys, pairs.get(layer)), _behind(queries, pairs.get(layer)))
        plain = KeySmoothing(torch.zeros_like(factors))
        found[layer] = replace(found.get(layer, plain), balance=factors)
    return found


def _norms(model: Any) -> Iterator[tuple[int, tuple[torch.Tensor, torch.Tensor]]]:
    """(layer, squares of the channels of queries and of keys, [num_kv_heads, head_size] each) of layers that have both norms."""
    for module in model.modules():
        q_norm, k_norm, layer = (getattr(module, name, None) for name in ("q_norm", "k_norm", "layer_idx"))
        if all(isinstance(getattr(norm, "weight", None), torch.Tensor) for norm in (q_norm, k_norm)) and isinstance(layer, int):
            size, group = int(module.head_dim), int(module.num_key_value_groups)
            heads = module.k_proj.weight.shape[0] // size
            queries, keys = (_squares(norm, size) for norm in (q_norm, k_norm))
            if len(queries) > 1:
                queries = queries.unflatten(0, (heads, group)).mean(1)
            yield layer, (queries.expand(heads, size), keys.expand(heads, size))


@torch.no_grad()
def _squares(norm: Any, size: int) -> torch.Tensor:
    """[heads, or 1 for all, size]: of the channels that a norm makes of ones. Of families some add 1 to the weight."""
    weight = norm.weight
    ones = torch.ones(1, weight.numel(), dtype=weight.dtype, device=weight.device)
    return norm(ones).double().square().view(-1, size)


def _behind(squares: torch.Tensor, pairs: torch.Tensor | None) -> torch.Tensor:
    """Root mean squares behind a rotary embedding of channels ``pairs`` [n, 2]."""
    mixed = squares.clone()
    if pairs is not None and len(pairs):
        pairs = pairs.to(squares.device)
        mean = squares[:, pairs].mean(-1)
        mixed[:, pairs[:, 0]] = mixed[:, pairs[:, 1]] = mean
    return mixed.sqrt()
