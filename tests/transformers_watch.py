"""Checks kvq's attention where it is called, layer by layer: inside a running model, on the very rows that the model hands it.

What a mode stores depends on rounding, so that two models that differ in the seventh digit may store different codes here and there, and
then differ in the third. Held to the same rows, a layer must agree with dense attention to rounding, in every mode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from kvq_core import QuantKVBackend
from kvq_transformers.attention import kvq_attention
from kvq_transformers.layers import HANDLE
from kvq_transformers.masks import padding_of

Encode = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


@dataclass
class Past:
    """What one layer was given so far, after its mode's ``encode`` and ``decode``: [batch, heads, columns, size], and which are real.

    ``keys`` are float64: those of smoothed rows do not fit less.
    """

    keys: torch.Tensor
    values: torch.Tensor
    real: torch.Tensor


@dataclass
class Watch:
    """Stands in for kvq's attention and notes the largest errors of kvq and of float32 dense attention against float64."""

    kvq: float = 0.0
    dense: float = 0.0
    calls: int = 0
    past: dict[int, Past] = field(default_factory=dict)

    def attention(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        layer = getattr(key, HANDLE)
        padding = padding_of(attention_mask, query.shape[2])
        out, nothing = kvq_attention(module, query, key, value, attention_mask, **kwargs)
        past = self._remember(layer, key, value, padding)
        new = past.real[:, -query.shape[2] :]
        exact = dense_attention(query.double(), past.keys, past.values.double(), past.real, layer.window, **kwargs)
        single = dense_attention(query.float(), past.keys.float(), past.values, past.real, layer.window, **kwargs)
        self.kvq = max(self.kvq, _largest((out - exact)[new]))
        self.dense = max(self.dense, _largest((single.to(out.dtype) - exact)[new]))
        self.calls += 1
        return out, nothing

    def _remember(self, layer: Any, key: torch.Tensor, value: torch.Tensor, padding: torch.Tensor | None) -> Past:
        real = torch.ones(key.shape[0], key.shape[2], dtype=torch.bool) if padding is None else padding
        backend, given = layer.backend, layer.given
        smooth, back = smoothing_of(layer)
        keys = back(through_mode(backend, backend.encode, smooth(key), given.k_scale))
        new = Past(keys, through_mode(backend, backend.encode_value, value, given.v_scale), real)
        old = self.past.get(layer.index)
        if old is not None:
            new = Past(*(torch.cat(pair, -2) for pair in ((old.keys, new.keys), (old.values, new.values))), torch.cat([old.real, real], 1))
        self.past[layer.index] = new
        return new


def smoothing_of(layer: Any) -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]:
    """What a layer does to keys [batch, heads, columns, size] before they are stored, and how to undo it."""
    if layer.pages.smoothing is None:
        return lambda rows: rows, lambda rows: rows.double()
    mean = layer.pages.smoothing.mean[:, None]
    factor = torch.ones_like(mean) if layer.pages.smoothing.balance is None else layer.pages.smoothing.balance[:, None]
    return lambda rows: (rows - mean) * (1 / factor), lambda rows: rows.double() * factor + mean


def through_mode(backend: QuantKVBackend, encode: Encode, rows: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """Float32 rows as ``backend`` gives them back, encoded as K or as V; ``scale``: of modes that take one."""
    given = torch.tensor([scale or 1.0]) if backend.takes_scales else None
    codes, scales = encode(rows, scale=given)
    return backend.decode(codes, scales if given is None else given)


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    real: torch.Tensor,
    window: int | None,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """[batch, q columns, heads, size] from dense scores; positions count real tokens, so that padding anywhere takes none."""
    window = min(filter(None, (window, sliding_window)), default=None)
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    position = real.cumsum(1) - 1
    p, j = position[:, None, -query.shape[2] :, None], position[:, None, None, :]
    seen = real[:, None, None, :] & (j <= p)
    if window is not None:
        seen = seen & (p - j < window)
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    sinks = scores.new_full((1, 1, 1, 1), -torch.inf) if s_aux is None else s_aux.to(scores.dtype).view(1, -1, 1, 1)
    sinks = sinks.expand(scores.shape[0], scores.shape[1], scores.shape[2], 1)
    weights = torch.cat([scores, sinks], -1).softmax(-1).nan_to_num(0.0)[..., :-1]
    return (weights @ value).transpose(1, 2)


def _largest(errors: torch.Tensor) -> float:
    return float(errors.abs().max()) if errors.numel() else 0.0
