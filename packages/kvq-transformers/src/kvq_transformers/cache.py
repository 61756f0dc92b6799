"""``KVQCache``: a transformers ``Cache`` whose attention layers lie in kvq's pages."""

from __future__ import annotations

import operator
from collections.abc import Callable
from copy import deepcopy
from typing import Any, NoReturn

import torch
from transformers import Cache, DynamicCache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from kvq_core.calibration import ModelSmoothing, Smoothings
from kvq_core.errors import ArgumentError, KVQError
from kvq_transformers.attention import switch_on
from kvq_transformers.fixed import FixedLayer
from kvq_transformers.given import Scales, layers_given
from kvq_transformers.layers import GrowingLayer, KVQLayer
from kvq_transformers.modes import Modes, layer_modes
from kvq_transformers.rows import RowTable, row_indices
from kvq_transformers.support import check_head_sizes, decoder_config


class KVQCache(Cache):
    """A quantized, paged KV cache for ``generate(cache=...)`` and for a model's own forward.

    ::

        cache = KVQCache(model.config, mode="int4")
        model.generate(**inputs, cache=cache)  # before transformers 5.24: past_key_values=cache

    Making one sets the attention implementation of ``config`` to ``kvq``, which a model follows from its next forward on: attention runs
    over the packed pages. Other caches still work under it (``kvq_transformers.disable(model)`` goes back).

    Args:
        config: the model's own config object (``model.config``).
        mode: the mode of all layers: a name or alias (``int4``), a backend, or a pair of them for K and V; or a mapping by layer,
            such as ``{"default": "int4", 0: "none", -1: "none"}``.
        max_cache_len: ``None``: pages grow with the text. A number: pages for that many tokens a row are allocated at the first forward
            and stay where they are, so that ``generate`` can compile its decode step.
        block_size: tokens a block, a multiple of 8.
        smoothing: a :class:`~kvq_core.calibration.ModelSmoothing` with this model's attention layers, or ``"first_prefill"``: each layer
            takes the mean of the first prompt's keys off all that it stores. Scores stay what they are.
        k_scale, v_scale: for layers in mode ``fp8_per_tensor``: a number for all of them, or a mapping by layer (default: 1). What
            :func:`kvq_transformers.calibrate` finds, or the scales that a checkpoint brings.

    Raises:
        ArgumentError: the model's attention cannot run over these pages, or an argument does not fit; the message says why.
        UnknownModeError: no installed package provides the mode.

    A row's padding takes no space. A cache is not safe to use from several threads at once.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        mode: Modes = "int4",
        *,
        max_cache_len: int | None = None,
        block_size: int = 16,
        smoothing: Smoothings = None,
        k_scale: Scales = None,
        v_scale: Scales = None,
    ) -> None:
        text = decoder_config(config)
        for name, value, step in (("max_cache_len", max_cache_len, 1), ("block_size", block_size, 8)):
            if (value is not None or name == "block_size") and (
                not isinstance(value, int) or isinstance(value, bool) or value < 1 or value % step
            ):
                raise ArgumentError(name, repr(value), "a positive integer" if step == 1 else f"a positive multiple of {step}")
        try:
            layers = DynamicCache(config=text).layers
        except KeyError as unknown:
            raise ArgumentError(
                "config", f"{text.model_type} with layers of type {unknown}", "types that transformers' caches know"
            ) from None
        windows = {index: _window(layer, index, text) for index, layer in enumerate(layers) if isinstance(layer, CacheLayerMixin)}
        if not windows:
            raise ArgumentError("config", f"{text.model_type}, whose layers keep no K and V", "a model with attention layers")
        backends = layer_modes(mode, list(windows), len(layers))
        check_head_sizes(text, backends)
        given = layers_given(smoothing, k_scale, v_scale, backends)
        tables = {window: RowTable(block_size, window) for window in set(windows.values())}
        for index, window in windows.items():
            layers[index] = (
                GrowingLayer(backends[index], index, tables[window], given[index])
                if max_cache_len is None
                else FixedLayer(backends[index], index, window, max_cache_len, block_size, given[index])
            )
        super().__init__(layers=layers)
        self._tables = [] if max_cache_len is not None else list(tables.values())
        switch_on(text)

    def __deepcopy__(self, memo: dict[int, Any]) -> KVQCache:
        for layer in self._pages_layers:
            memo[id(layer.backend)] = layer.backend  # shared: a mode has one instance
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update({name: deepcopy(value, memo) for name, value in self.__dict__.items()})
        for layer in twin._pages_layers:
            if isinstance(layer, FixedLayer) and layer.is_initialized:
                layer.pin()
        return twin

    # -- facts ----------------------------------------------------------------------------------------------------------

    @property
    def modes(self) -> dict[int, str]:
        """The full name of each attention layer's mode, by layer."""
        return {layer.index: layer.backend.mode for layer in self._pages_layers}

    @property
    def settled(self) -> dict[str, Any]:
        """The ``mode`` and scales of another cache like this one, by layer, whatever mappings they came from."""
        layers = self._pages_layers
        k_scale, v_scale = ({layer.index: getattr(layer.given, name) for layer in layers} for name in ("k_scale", "v_scale"))
        given = {"k_scale": k_scale, "v_scale": v_scale}
        return {"mode": {layer.index: layer.backend for layer in layers}} | {
            name: {layer: scale for layer, scale in scales.items() if scale is not None} or None for name, scales in given.items()
        }

    @property
    def smoothing(self) -> ModelSmoothing | None:
        """What keys are smoothed with, as far as it is known. Before the first prefill nothing is, unless it was given."""
        made = {layer.index: layer.pages for layer in self._pages_layers if layer.is_initialized}
        found = {index: pages.smoothing for index, pages in made.items() if pages.smoothing is not None and not pages.waits}
        return ModelSmoothing(found) if found else None

    @property
    def nbytes(self) -> int:
        """Bytes of all pages allocated so far, scales and free blocks included."""
        return sum(layer.pages.nbytes for layer in self._pages_layers if layer.is_initialized)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token of one row takes in all attention layers, scales included; 0 before the first forward."""
        return sum(layer.pages.bytes_per_token for layer in self._pages_layers if layer.is_initialized)

    # -- rows and lengths, for all layers at once -----------------------------------------------------------------------

    def reset(self) -> None:
        """Forget all tokens; the pages stay allocated."""
        for table in self._tables:
            table.reset()
        for layer in self.layers:
            if isinstance(layer, GrowingLayer):
                layer.columns, layer.is_pending = 0, False
            else:
                layer.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens of every row.

        Raises:
            ArgumentError: ``tokens_to_remove`` is positive (transformers' old, absolute meaning).
            RuntimeError: behind a sliding window they are gone already: call :meth:`activate_past_recording` before writing them.
        """
        # transformers passes a tensor here; an int must not become one that is shared and added to in place.
        count = -operator.index(tokens_to_remove)
        if count < 0:
            raise ArgumentError("tokens_to_remove", -count, "minus the number of tokens to remove from the end")
        others = self._others("crop")
        for table in self._tables:
            table.crop(count)
        for layer in self._pages_layers:
            if isinstance(layer, GrowingLayer):
                layer.columns = layer.table.columns
            elif isinstance(layer, FixedLayer):
                layer.crop(count)
        for crop in others:
            crop(-count)

    def activate_past_recording(self) -> None:
        """Keep tokens behind sliding windows until :meth:`crop`, so that it can bring them back into view."""
        for table in self._tables:
            table.keeps_past = True
        super().activate_past_recording()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i goes on from row ``beam_idx[i]``; beams share the blocks of what they have in common."""
        others = self._others("reorder_cache")
        self._select(row_indices(beam_idx, self._num_rows, "beam_idx"))
        for reorder in others:
            reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """``repeats`` copies of each row, side by side; they share blocks until they write."""
        if not isinstance(repeats, int) or repeats < 1:
            raise ArgumentError("repeats", repr(repeats), "a positive integer")
        others = self._others("batch_repeat_interleave")
        self._select([row for row in range(self._num_rows) for _ in range(repeats)])
        for repeat in others:
            repeat(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep rows ``indices``, in that order."""
        rows = indices.nonzero() if indices.dtype == torch.bool else indices
        others = self._others("batch_select_indices")
        self._select(row_indices(rows, self._num_rows, "indices"))
        for select in others:
            select(indices)

    def _select(self, rows: list[int]) -> None:
        for table in self._tables:
            if table.batch_size:
                table.select(rows)
        for layer in self._pages_layers:
            if isinstance(layer, FixedLayer):
                layer.select(rows)
            elif layer.is_initialized:
                layer.batch_size = len(rows)

    @property
    def _pages_layers(self) -> list[KVQLayer]:
        return [layer for layer in self.layers if isinstance(layer, KVQLayer)]

    def _others(self, method: str) -> list[Callable[..., None]]:
        """``method`` of the layers that keep no K and V; an error, before anything changes, if one of them has none."""
        layers = [layer for layer in self.layers if not isinstance(layer, KVQLayer)]
        for layer in layers:
            if not hasattr(layer, method):
                raise KVQError(f"{method}: layers of type {type(layer).__name__}, which this model has, too, cannot do that")
        return [getattr(layer, method) for layer in layers]

    @property
    def _num_rows(self) -> int:
        return max(0, max(layer.batch_size for layer in self._pages_layers))


def _window(layer: CacheLayerMixin, index: int, config: PretrainedConfig) -> int | None:
    """The sliding window of what transformers would keep this layer in."""
    if type(layer) is DynamicLayer:
        return None
    if type(layer) is DynamicSlidingWindowLayer:
        return layer.sliding_window
    _refuse_layer(layer, index, config)


def _refuse_layer(layer: CacheLayerMixin, index: int, config: PretrainedConfig) -> NoReturn:
    got = f"{config.model_type}, whose layer {index} needs a {type(layer).__name__}"
    raise ArgumentError("config", got, "layers of full or sliding-window attention, or without K and V")
