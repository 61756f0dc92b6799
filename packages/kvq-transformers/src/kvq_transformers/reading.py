"""A text read through a model, unquantized, by cache layers that look at the rows which pass them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from kvq_core import checks
from kvq_core.errors import ArgumentError
from kvq_transformers.attention import NAME, switch_off
from kvq_transformers.cache import KVQCache
from kvq_transformers.layers import GrowingLayer
from kvq_transformers.naming import cache_argument
from kvq_transformers.support import decoder_config

Watching = TypeVar("Watching", bound=GrowingLayer)


def check_text(model: object, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
    """Raise :class:`ArgumentError` for what is no model, or no text [batch_size, num_tokens] with a token that is no padding."""
    if not isinstance(model, PreTrainedModel):
        raise ArgumentError("model", type(model).__name__, "a transformers model")
    checks.tensor("input_ids", input_ids)
    if input_ids.dim() != 2 or not input_ids.numel() or input_ids.dtype not in (torch.int64, torch.int32):
        raise ArgumentError("input_ids", f"shape {tuple(input_ids.shape)}, {input_ids.dtype}", "[batch_size, num_tokens] token ids")
    if attention_mask is not None and checks.tensor("attention_mask", attention_mask).shape != input_ids.shape:
        raise ArgumentError("attention_mask", f"shape {tuple(attention_mask.shape)}", f"{tuple(input_ids.shape)}, as input_ids")
    if attention_mask is not None and not attention_mask.any():
        raise ArgumentError("attention_mask", "0 everywhere", "a token that is no padding")


def read_through(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    chunk: int,
    watching: Callable[[GrowingLayer], Watching],
) -> list[Watching]:
    """Read a text that :func:`check_text` let pass, ``chunk`` columns at a time.

    Args:
        watching: makes the layer that takes the place of each attention layer of an unquantized cache.

    Returns:
        These layers. The model has the attention implementation that it had.
    """
    text = decoder_config(model.config)
    was_on = text._attn_implementation == NAME
    cache = KVQCache(model, "none", smoothing=None)
    layers = []
    try:
        for place, layer in enumerate(cache.layers):
            if isinstance(layer, GrowingLayer):
                layers.append(watching(layer))
                cache.layers[place] = layers[-1]
        for first in range(0, input_ids.shape[1], chunk):
            _read(model, cache, input_ids, attention_mask, slice(first, first + chunk))
    finally:
        if not was_on:
            switch_off(text)
    return layers


def _read(model: Any, cache: KVQCache, ids: torch.Tensor, mask: torch.Tensor | None, part: slice) -> None:
    # Logits, which nobody wants, may take more memory than all else.
    given: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    if mask is not None:
        # Padding takes no position: rotated keys are those that the tokens would have without it.
        given |= {"attention_mask": mask[:, : part.stop], "position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, part]}
    model(input_ids=ids[:, part], use_cache=True, **{cache_argument(model.forward): cache}, **given)
