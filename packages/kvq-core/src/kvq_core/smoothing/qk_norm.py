"""QK-norm: what the weights of norms of queries and keys say of the sizes of channels, without a text, and the factors that balance them.

A norm leaves each channel with the size that its weight has, and a rotary embedding behind it mixes the two channels of a pair: over many
positions both have the mean of their squares. Keys are stored over the factors and queries are multiplied by them, so that scores stay what
they are whatever the factors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch

from kvq_core.errors import is_out_of_memory
from kvq_core.smoothing.calibration import KeySmoothing, channel_factors

_NAMES: Final = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))
"""What attention modules call norms before their rotary embedding."""


def norms_of(attention: torch.nn.Module) -> tuple[Any, Any] | None:
    """The norms of queries and of keys of an attention module, if it has both, with weights."""
    for names in _NAMES:
        q_norm, k_norm = (getattr(attention, name, None) for name in names)
        if all(isinstance(getattr(norm, "weight", None), torch.nn.Parameter) for norm in (q_norm, k_norm)):
            return q_norm, k_norm
    return None


@torch.no_grad()
def norm_squares(norm: Any, head_size: int) -> torch.Tensor | None:
    """[heads, or 1 for all, head_size] float64: of the channels that ``norm``, a module with a weight, makes of 1 and -1, whose mean is 0,
    as some norms want it; ``None`` if it makes nothing of the kind. The norm is asked, since some families add 1 to the weight."""
    weight = norm.weight
    if weight.is_meta or weight.numel() % head_size:
        return None
    signs = torch.ones_like(weight)
    signs[..., 1::2] = -1
    try:
        # What vLLM calls a norm in plain torch, beside its kernels.
        rows = getattr(norm, "forward_native", norm)(signs[None])
    except Exception as problem:  # a model's own code, which may want more
        if is_out_of_memory(problem):
            raise
        return None
    if not isinstance(rows, torch.Tensor) or rows.numel() != weight.numel():
        return None
    return rows.double().square().view(-1, head_size)


def rows_of_heads(rows: torch.Tensor | None, num_heads: int, total: int, rank: int = 0) -> torch.Tensor | None:
    """Of :func:`norm_squares`, those of the ``rank``-th ``num_heads`` heads of ``total``, [num_heads, head_size]. ``rows`` may be one for
    all heads, one for each of ``total``, or for these alone. ``None`` if they are for other heads, or there are none."""
    if rows is not None and len(rows) == total:
        rows = rows[rank * num_heads : (rank + 1) * num_heads]
    return None if rows is None or len(rows) not in (1, num_heads) else rows.expand(num_heads, -1)


def with_factors(known: KeySmoothing | None, factors: torch.Tensor) -> KeySmoothing:
    """``known``, or no mean, and ``factors``."""
    return replace(KeySmoothing(torch.zeros_like(factors)) if known is None else known, balance=factors)


def norm_factors(keys: torch.Tensor, queries: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """The factors [num_kv_heads, head_size] float32 by the squares of the channels of ``keys`` [num_kv_heads, head_size] and ``queries``
    [num_query_heads, head_size] before a rotary embedding of channels ``pairs`` [n, 2]."""
    grouped = queries.unflatten(0, (len(keys), -1)).mean(1)
    return channel_factors(*(_behind(squares, pairs.to(squares.device)) for squares in (keys, grouped)))


def _behind(squares: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """Root mean squares behind the embedding."""
    mixed = squares.clone()
    mixed[:, pairs[:, 0]] = mixed[:, pairs[:, 1]] = squares[:, pairs].mean(-1)
    return mixed.sqrt()
