"""``calibrate``: from a text to the key smoothing of a model's layers, and to the scales that ``fp8_per_tensor`` wants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from kvq_core.errors import ArgumentError
from kvq_core.scales import TensorRange
from kvq_core.smoothing.calibration import CALIBRATED, KeyStatistics, ModelSmoothing
from kvq_core.smoothing.rotary import RotaryMean, RotaryStatistics
from kvq_transformers.given import whole
from kvq_transformers.key_bias import Embedding, embeddings
from kvq_transformers.layers import GrowingLayer
from kvq_transformers.reading import check_text, read_through
from kvq_transformers.rows import token_rows
from kvq_transformers.storage import LayerScoring


@dataclass(frozen=True)
class Calibration:
    """What :func:`calibrate` found, as :class:`KVQCache` and :func:`enable` take it.

    ``smoothing``: of the keys, if it was asked for. ``k_scale``, ``v_scale``: by layer, of keys smoothed with just that, for layers in a
    mode that takes scales.
    """

    smoothing: ModelSmoothing | None
    k_scale: dict[int, float]
    v_scale: dict[int, float]


class _CountingLayer(GrowingLayer):
    """Pages whose rows, and the queries that meet them, are counted on their way in: less ``rotary``, or before ``embedding``."""

    def __init__(self, layer: GrowingLayer, rotary: RotaryMean | None, embedding: Embedding | None) -> None:
        super().__init__(layer.backend, layer.index, layer.window, layer.forward)
        self.statistics, self.key_range, self.value_range = KeyStatistics(), TensorRange(), TensorRange()
        self.rotary, self.before = rotary, None if embedding is None else RotaryStatistics(embedding.pairs, embedding.rates)
        self._seen: torch.Tensor | int = 0

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scoring: LayerScoring
    ) -> torch.Tensor:
        real = torch.ones(key.shape[0], key.shape[2], dtype=torch.bool, device=key.device) if mask is None else mask
        q, k, v = (token_rows(x)[real.flatten()] for x in (query, key, value))
        positions = (self._seen + real.cumsum(1) - 1)[real]
        self._seen = self._seen + real.sum(1, keepdim=True)
        if self.before is not None:
            self.before.add(k, positions)
        self.statistics.add(k if self.rotary is None else k.float() - self.rotary.at(positions).float(), q)
        self.key_range.add(k)
        self.value_range.add(v)
        return super()._attend(query, key, value, mask, scoring)


@torch.no_grad()
def calibrate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    smoothing: ModelSmoothing | str | None = "mean",
    chunk: int = 512,
) -> Calibration:
    """Read a text through ``model``, unquantized, and find what its keys and values are stored with best.

    A few thousand tokens of the kind that will be served are enough; none of them should be part of an evaluation.

    Args:
        model: a decoder that a :class:`KVQCache` can serve. It keeps the attention implementation that it has.
        input_ids: [batch_size, num_tokens]; attention_mask: the same shape, 0 where there is padding, which does not count.
        smoothing: ``"mean"`` takes each head's mean key off; ``"balanced"`` divides the channels by factors as well. ``"rotary"`` and
            ``"rotary_balanced"``: and before that the rotary mean, of keys before their rotary embedding, for which the text is read
            twice. ``"rotary_ordered"``: and an order of channels as well, for modes that take one (int2). ``None``: nothing. A smoothing
            that is there already is kept, and scales are found for it.
        chunk: tokens of each row that are read at once.

    Raises:
        ArgumentError: no text, an unknown ``smoothing``, or a model that kvq cannot serve.
    """
    check_text(model, input_ids, attention_mask)
    if smoothing is not None and smoothing not in CALIBRATED and not isinstance(smoothing, ModelSmoothing):
        raise ArgumentError("smoothing", repr(smoothing), f"{' or '.join(map(repr, CALIBRATED))}, a ModelSmoothing, or None")
    chunk = whole("chunk", chunk)

    def counted(rotary: Mapping[int, RotaryMean], rotary_embeddings: Mapping[int, Embedding]) -> list[_CountingLayer]:
        def counting(layer: GrowingLayer) -> _CountingLayer:
            return _CountingLayer(layer, rotary.get(layer.index), rotary_embeddings.get(layer.index))

        return read_through(model, input_ids, attention_mask, chunk, counting)

    rotary: dict[int, RotaryMean] = {}
    if isinstance(smoothing, str) and smoothing.startswith("rotary"):
        rotary_embeddings = {index: embedding for index, embedding in embeddings(model).items() if len(embedding.pairs)}
        rotary = {layer.index: layer.before.mean() for layer in counted({}, rotary_embeddings) if layer.before is not None}
    layers = counted(rotary, {})
    if isinstance(smoothing, str):
        kind = smoothing
        smoothing = ModelSmoothing({x.index: replace(x.statistics.of_kind(kind), rotary=rotary.get(x.index)) for x in layers})
    smoothed = (
        dict.fromkeys(layers) if smoothing is None else dict(zip(layers, smoothing.for_layers([x.index for x in layers]), strict=True))
    )
    return Calibration(
        smoothing,
        {layer.index: float(layer.key_range.scale(one)) for layer, one in smoothed.items()},
        {layer.index: float(layer.value_range.scale()) for layer in layers},
    )
