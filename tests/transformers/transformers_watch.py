"""Checks kvq's attention where it is called, layer by layer: inside a running model, on the very rows that the model hands it.

What a mode stores depends on rounding, so that two models that differ in the seventh digit may store different codes here and there, and
then differ in the third. Held to the same rows, a layer must agree with float64 attention within the suite's derived budget, in every mode.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from kvq_core import QuantKVBackend
from kvq_core.hadamard import block_of
from kvq_core.testing import budgets, oracle
from kvq_transformers.attention import kvq_attention
from kvq_transformers.fixed import FixedLayer
from kvq_transformers.layers import HANDLE
from kvq_transformers.masks import padding_of

Encode = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


@dataclass
class Past:
    """What one layer was given so far, after its mode's ``encode`` and ``decode``: [batch, heads, columns, size], and which are real.

    ``keys`` are float64: those of smoothed rows do not fit less. ``exact``: K and V as a residual window keeps them.
    """

    keys: torch.Tensor
    values: torch.Tensor
    real: torch.Tensor
    exact: tuple[torch.Tensor, torch.Tensor]


@dataclass
class Watch:
    """Stands in for kvq's attention and notes its largest error against float64, as a share of what its arithmetic may lose."""

    worst: float = 0.0
    calls: int = 0
    past: dict[int, Past] = field(default_factory=dict)

    def attention(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        layer = getattr(key, HANDLE)
        out, nothing = kvq_attention(module, query, key, value, attention_mask, **kwargs)
        past = self._remember(layer, key, value, padding_of(attention_mask, query.shape[2]))
        for row in range(query.shape[0]):
            self.worst = max(self.worst, _share(out[row], query[row], past, row, layer, **kwargs))
        self.calls += 1
        return out, nothing

    def _remember(self, layer: Any, key: torch.Tensor, value: torch.Tensor, padding: torch.Tensor | None) -> Past:
        real = torch.ones(key.shape[0], key.shape[2], dtype=torch.bool) if padding is None else padding
        backend, given = layer.backend, layer.given
        smooth, back = smoothing_of(layer)
        keys = back(through_mode(backend, backend.encode, smooth(key), given.k_scale))
        exact, rows = (key, value), layer.pages.exact_backend
        if rows is not None and rows.mode != "none":
            exact = back(through_mode(rows, rows.encode, smooth(key))), through_mode(rows, rows.encode_value, value)
        new = Past(keys, through_mode(backend, backend.encode_value, value, given.v_scale), real, exact)
        old = self.past.get(layer.index)
        if old is not None:
            keys, values = (torch.cat(pair, -2) for pair in ((old.keys, new.keys), (old.values, new.values)))
            exact = torch.cat([old.exact[0], new.exact[0]], -2), torch.cat([old.exact[1], new.exact[1]], -2)
            new = Past(keys, values, torch.cat([old.real, real], 1), exact)
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


def _share(
    out: torch.Tensor,
    query: torch.Tensor,
    past: Past,
    row: int,
    layer: Any,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> float:
    """The largest error of ``out`` [columns, heads, size] for one row of the batch, over its bound.

    Positions count real tokens, so that padding anywhere takes none.
    """
    real = past.real[row]
    new = real[-query.shape[1] :]
    if not new.any():
        return 0.0
    k, v = (x[row][:, real].transpose(0, 1).double() for x in (past.keys, past.values))
    exact = read_exact(layer, row, k.shape[0])
    k, v = (torch.where(exact[:, None, None], x[row][:, real].transpose(0, 1), y) for x, y in zip(past.exact, (k, v), strict=True))
    window = min(filter(None, (layer.window, sliding_window)), default=None)
    arguments = {
        "softmax_scale": scaling,
        "softcap": softcap or 0.0,
        "window_size": (-1 if window is None else window - 1, 0),
        "sinks": s_aux,
        "alibi_slopes": None,
        "qq_bias": None,
        "mm_prefix_range": None,
    }
    expected = oracle.attend(query[:, new].transpose(0, 1), k, v, torch.ones(k.shape[0], dtype=torch.bool), 0, arguments)
    lost = decoding_error(k.shape[-1], v.shape[-1])
    bound = budgets.read(expected, scaling, softcap or 0.0, 0.0, budgets.LevelError(lost, lost))
    bound = budgets.stored(bound, expected.out, out.dtype, torch.finfo(out.dtype).eps / 2)
    return float(((out[new].double().transpose(0, 1) - expected.out).abs() / bound).max())


def read_exact(layer: Any, row: int, length: int) -> torch.Tensor:
    """[length] bool: which real tokens of a row the layer's last call read from exact rows, as its plan says."""
    positions = torch.arange(length)
    if layer.pages.exact_backend is None:
        return positions < 0
    if isinstance(layer, FixedLayer):
        residual, at, dropped = layer.exact.last, row, 0
    else:
        table = layer.forward._planned.get(layer.window, layer.table)
        (piece,) = table.pieces
        step = piece.step(layer.table.block_size, layer.device)
        at = [grown.sequence for grown in piece.growth.rows].index(table._rows[row])
        residual, dropped = step.residual, length - int(step.seqused_k[at])
    if residual.packed is None:
        return positions >= 0
    sinks = length - dropped - int(residual.packed.seqused_k[at])
    return (positions - dropped >= sinks + int(residual.key_stops[at])) | (positions < sinks)


def decoding_error(*head_sizes: int) -> float:
    """How far two float32 decodings of a row may be apart, relative to its root mean square: here rows one by one, there in pages.

    A rotated row is a transform over blocks of b of levels y. An element is a sum of b of them, which loses at most (log2 b + 4) f sum |y|
    (:func:`kvq_core.testing.budgets.rotation`), that is (log2 b + 4) f times the norm of its part of the row; both may.
    """
    return max(2 * (math.log2(block_of(size)) + 4) * budgets.F32 * math.sqrt(size) for size in head_sizes)
