"""``KVQCache``: a transformers ``Cache`` whose attention layers lie in kvq's pages."""

from __future__ import annotations

from collections.abc import Callable, Collection
from copy import deepcopy
from typing import Any, Final, NoReturn

import torch
from transformers import Cache, PretrainedConfig, PreTrainedModel

from kvq_core.call.spec import FLOATS
from kvq_core.errors import ArgumentError, KVQError
from kvq_core.residual.window import ResidualWindow
from kvq_core.smoothing.calibration import KEY_BIAS, WEIGHTS, ModelSmoothing, Smoothings
from kvq_transformers.attention import switch_on
from kvq_transformers.fixed import FixedForward, FixedLayer
from kvq_transformers.forward import CacheStateError
from kvq_transformers.given import Scales, layers_given, usable_device, whole
from kvq_transformers.layers import GrowingLayer, KVQLayer
from kvq_transformers.modes import Modes, layer_modes
from kvq_transformers.rows import GrowingForward, row_indices
from kvq_transformers.support import check_head_sizes, check_layers, decoder_config, default_layers
from kvq_transformers.weights import known_smoothing

# Slots are counted in int32, rows by launch grids.
_MOST_TOKENS: Final = 2**31 - 1
_LARGEST_BLOCK: Final = 2**16
_MOST_ROWS: Final = 2**16


class KVQCache(Cache):
    """A quantized, paged KV cache for ``generate(cache=...)`` and for a model's own forward.

    ::

        cache = KVQCache(model, mode="int4")
        model.generate(**inputs, cache=cache)  # before transformers 5.24: past_key_values=cache

    Making one sets the attention implementation of the model's config to ``kvq``, which the model follows from its next forward on:
    attention runs over the packed pages. Other caches still work under it (``kvq_transformers.disable(model)`` goes back).

    Args:
        config: the model, or its own config object (``model.config``), which leaves its weights unknown.
        mode: the mode of all layers: a name or alias (``int4``), a backend, or a pair of them for K and V; or a mapping by layer,
            such as ``{"default": "int4", 0: "none", -1: "none"}``.
        max_cache_len: ``None``: pages grow with the text. A number: pages for that many tokens a row are allocated at the first forward
            and stay where they are, so that ``generate`` can compile its decode step.
        block_size: tokens a block, a multiple of 8.
        residual_length, sink_tokens: read the newest and the first so many tokens of a row from exact rows, at least
            (:mod:`kvq_core.residual`). Sinks are refused in a model with sliding windows.
        residual_mode: the mode of exact rows: ``none``, as they are given, or one that quantizes each, such as ``int8``.
        smoothing: what is taken off keys before they are stored; scores stay what they are. ``"weights"``, the default: what the
            model's weights say, the biases of keys behind its rotary embeddings and the sizes that norms of queries and keys give their
            channels (:mod:`kvq_core.smoothing.qk_norm`); of a ``config`` alone nothing. ``"key_bias"``: the biases alone.
            ``"first_prefill"``: the mean of the first prompt's keys as well, layer by layer. A
            :class:`~kvq_core.smoothing.calibration.ModelSmoothing` with this model's attention layers; ``None``: nothing.
        k_scale, v_scale: for layers in mode ``fp8_per_tensor``: a number for all of them, or a mapping by layer (default: 1). What
            :func:`kvq_transformers.calibrate` finds, or the scales that a checkpoint brings.

    Raises:
        ArgumentError: the model's attention cannot run over these pages, or an argument does not fit; the message says why.
        UnknownModeError: no installed package provides the mode.

    A row's padding takes no space. A forward's tokens are in the cache once all layers have stored them: after one that failed before,
    the cache is what it was. Copies of all kinds, pickled ones included, are caches of their own. A cache is not safe to use from
    several threads at once.
    """

    def __init__(
        self,
        config: PretrainedConfig | PreTrainedModel,
        mode: Modes = "int4",
        *,
        max_cache_len: int | None = None,
        block_size: int = 16,
        residual_length: int = 0,
        sink_tokens: int = 0,
        residual_mode: str = "none",
        smoothing: Smoothings = WEIGHTS,
        k_scale: Scales = None,
        v_scale: Scales = None,
    ) -> None:
        model = config if isinstance(config, PreTrainedModel) else None
        text = decoder_config(config.config if isinstance(config, PreTrainedModel) else config)
        if max_cache_len is not None:
            max_cache_len = whole("max_cache_len", max_cache_len, most=_MOST_TOKENS)
        block_size = whole("block_size", block_size, most=_LARGEST_BLOCK, step=8)
        default = default_layers(text)
        if model is not None:
            check_layers(model, text, default.windows)
        backends = layer_modes(mode, list(default.windows), len(default.layers))
        check_head_sizes(text, backends)
        residual = ResidualWindow.of(residual_length, sink_tokens, block_size, residual_mode)
        given = layers_given(smoothing, known_smoothing(model, smoothing), k_scale, v_scale, backends)
        if residual is not None:
            _check_sinks(sink_tokens, default.windows.values())
            residual.check_rotary(given[index].subtracted_rotary for index, backend in backends.items() if residual.serves(backend.mode))
        self._forward: GrowingForward | FixedForward
        layers = dict(enumerate(default.layers))
        if max_cache_len is None:
            self._forward = growing = GrowingForward(default.windows, default.recurrent, block_size, residual)
            for index, window in default.windows.items():
                layers[index] = GrowingLayer(backends[index], index, window, growing, given[index])
        else:
            self._forward = fixed = FixedForward(list(default.windows), default.recurrent, max_cache_len)
            for index, window in default.windows.items():
                layers[index] = FixedLayer(backends[index], index, window, fixed, block_size, given[index], residual)
        gains = smoothing in (WEIGHTS, KEY_BIAS) and any(backend.mode != "none" for backend in backends.values())
        self._forward.knows_no_weights = model is None and gains
        self._forward.num_layers = getattr(text, "num_hidden_layers", None)
        super().__init__(layers=list(layers.values()))
        switch_on(text)

    def __copy__(self) -> KVQCache:
        # Two caches that share pages, but not their lengths, would write over each other's tokens.
        return deepcopy(self)

    def __getstate__(self) -> dict[str, Any]:
        self._forward.settle()
        for layer in self._other_layers:
            for name in ("conv_states", "recurrent_states"):
                # Layers of some models have no state at all.
                for index in range(getattr(layer, "number_of_states", 0)):
                    _own(layer, name, index)
        return self.__dict__

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
        made = {layer.index: layer.pages for layer in self._made_layers}
        known = {index: pages for index, pages in made.items() if not (pages.estimates and self._forward.is_fresh)}
        found = {index: pages.smoothing for index, pages in known.items() if pages.smoothing is not None}
        return ModelSmoothing(found) if found else None

    @property
    def nbytes(self) -> int:
        """Bytes of all pages allocated so far, scales and free blocks included."""
        return sum(layer.pages.nbytes for layer in self._made_layers)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token of one row takes in all attention layers, scales included; 0 before the first forward."""
        return sum(layer.pages.bytes_per_token for layer in self._made_layers)

    @property
    def batch_size(self) -> int:
        """Rows of the batch; -1 before the first forward."""
        self._forward.check_read()
        return self._forward.batch_size

    # -- what a model asks in each forward ------------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that all layers have stored, padding included: with ``max_cache_len`` a tensor, after the first forward."""
        self._forward.check_read()
        return super().get_seq_length(self._layer(layer_idx))

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Keys that a mask must cover, and how many come before them."""
        self._forward.check_read()
        return super().get_mask_sizes(query_length, self._layer(layer_idx))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Announce new K and V of a layer; kvq's attention stores them."""
        if not 0 <= whole("layer_idx", layer_idx, least=None) < len(self.layers) or not isinstance(self.layers[layer_idx], KVQLayer):
            raise ArgumentError("layer_idx", layer_idx, f"a layer that keeps K and V: one of {sorted(self._forward.layers)}")
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """What a recurrent layer goes on from, and may write to."""
        self._forward.touch(layer_idx, f"conv {state_idx}")
        _own(self.layers[layer_idx], "conv_states", state_idx)
        return super().get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """What a recurrent layer goes on from, and may write to."""
        self._forward.touch(layer_idx, f"recurrent {state_idx}")
        _own(self.layers[layer_idx], "recurrent_states", state_idx)
        return super().get_recurrent_state(layer_idx, state_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether a recurrent layer goes on from a state: what it asks first in transformers 5.17, before it may write to it."""
        if layer_idx is not None:
            self._forward.touch(layer_idx, f"previous {state_idx}")
        return super().has_previous_state(layer_idx, state_idx)

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Take a recurrent layer's new inputs of its convolution."""
        found = super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)
        _own(self.layers[layer_idx], "conv_states", state_idx)
        return found

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Take a recurrent layer's new state."""
        found = super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)
        _own(self.layers[layer_idx], "recurrent_states", state_idx)
        return found

    # -- rows and lengths, for all layers at once -----------------------------------------------------------------------

    def reset(self) -> None:
        """Forget all tokens; the pages stay allocated."""
        self._forward.restart()
        for layer in self._other_layers:
            layer.reset()
        self._forward.restarted()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens of every row, padding included.

        Raises:
            ArgumentError: ``tokens_to_remove`` is positive (transformers' old, absolute meaning), or no whole number.
            CacheStateError: behind a sliding window they are gone already: call :meth:`activate_past_recording` before writing them.
        """
        # transformers passes a tensor here; an int must not become one that is shared and added to in place.
        count = -whole("tokens_to_remove", tokens_to_remove, least=None)
        if count < 0:
            raise ArgumentError("tokens_to_remove", -count, "minus the number of tokens to remove from the end")
        self._forward.settle()
        others = self._others("crop")
        for layer in self._other_layers:
            if not (getattr(layer, "record_past", True) and layer.is_croppable):
                got = f"{-count}: layers of type {type(layer).__name__}, which this model has, too, keep no past states"
                raise CacheStateError("tokens_to_remove", got, "activate_past_recording() before, and no recurrent states")
        cropped: Any = self._forward.cropped(count)
        with self._forward.changing(at_once=not others):
            for crop in others:
                crop(-count)
            self._forward.take(cropped)

    def activate_past_recording(self) -> None:
        """From now on, drop tokens behind sliding windows in :meth:`crop` alone, so that it can bring them back into view."""
        if isinstance(self._forward, GrowingForward):
            self._forward.keep_past()
        super().activate_past_recording()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i goes on from row ``beam_idx[i]``; beams share the blocks of what they have in common."""
        rows = row_indices(beam_idx, self._num_rows, "beam_idx")
        self._select("reorder_cache", rows, "beam_idx", torch.tensor(rows, device="cpu"))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """``repeats`` copies of each row, side by side; they share blocks until they write."""
        repeats = whole("repeats", repeats, most=_MOST_ROWS // max(self._num_rows, 1))
        if self._num_rows:
            rows = [row for row in range(self._num_rows) for _ in range(repeats)]
            self._select("batch_repeat_interleave", rows, "repeats", repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep rows ``indices``, in that order; or those with a true one of as many bools as there are rows."""
        rows = row_indices(indices, self._num_rows, "indices", takes_mask=True)
        self._select("batch_select_indices", rows, "indices", torch.tensor(rows, device="cpu"))

    def early_initialization(
        self, batch_size: int, num_heads: int | list[int], head_dim: int | list[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate the first pages of all layers before any forward: all of them, with ``max_cache_len``."""
        self._forward.settle()
        count = whole("batch_size", batch_size, most=_MOST_ROWS)
        for argument, sizes in (("num_heads", num_heads), ("head_dim", head_dim)):
            if isinstance(sizes, list) and len(sizes) != len(self.layers):
                raise ArgumentError(argument, f"{len(sizes)} of them", f"one, or one for each of {len(self.layers)} layers")
            for size in sizes if isinstance(sizes, list) else [sizes]:
                whole(argument, size)
        if dtype not in FLOATS:
            raise ArgumentError("dtype", repr(dtype), " or ".join(map(str, FLOATS)))
        super().early_initialization(count, num_heads, head_dim, dtype, usable_device(device))

    def offload(self, *args: object, **kwargs: object) -> NoReturn:
        """Refused: the pages stay where the model's layers are."""
        raise KVQError("offload: a KVQCache keeps its pages where the model's layers are")

    prefetch = offload

    def _select(self, method: str, rows: list[int], argument: str, given: object) -> None:
        others, forward = self._others(method), self._forward
        forward.settle()
        if isinstance(forward, FixedForward):
            if len(rows) != forward.batch_size:
                need = f"{forward.batch_size}: a cache with max_cache_len keeps its number of rows"
                raise ArgumentError(argument, f"{len(rows)} rows", need)
            with forward.changing(at_once=False):
                for layer in self._made_layers:
                    layer.select(rows)
                forward.select(rows)
                for select in others:
                    select(given)
            return
        selected = forward.selected(rows)
        with forward.changing(at_once=not others):
            for select in others:
                select(given)
            forward.take(selected)

    @property
    def _pages_layers(self) -> list[KVQLayer]:
        return [layer for layer in self.layers if isinstance(layer, KVQLayer)]

    @property
    def _made_layers(self) -> list[Any]:
        """Those that have pages."""
        self._forward.check_read()
        return [layer for layer in self._pages_layers if layer.is_initialized]

    @property
    def _other_layers(self) -> list[Any]:
        return [layer for layer in self.layers if not isinstance(layer, KVQLayer)]

    def _others(self, method: str) -> list[Callable[..., None]]:
        """``method`` of the layers that keep no K and V; an error, before anything changes, if one of them has none."""
        for layer in self._other_layers:
            if not hasattr(layer, method):
                raise KVQError(f"{method}: layers of type {type(layer).__name__}, which this model has, too, cannot do that")
        return [getattr(layer, method) for layer in self._other_layers]

    @property
    def _num_rows(self) -> int:
        return max(0, self.batch_size)

    def _layer(self, layer_idx: int) -> int:
        """``layer_idx`` if it names a layer that keeps K and V; 0 is the first of them, whatever its number."""
        index = whole("layer_idx", layer_idx, least=None)
        if not -len(self.layers) <= index < len(self.layers) or (index and not isinstance(self.layers[index], KVQLayer)):
            raise ArgumentError("layer_idx", index, f"a layer that keeps K and V: one of {sorted(self._forward.layers)}")
        return index


def _own(layer: Any, name: str, index: int) -> None:
    """Take a recurrent layer's state out of autograd and of inference mode: the next forward writes to it in a mode of its own."""
    states = getattr(layer, name)
    state = states[index]
    if state is None or torch.compiler.is_compiling():
        return
    if state.is_inference():
        with torch.inference_mode(False):
            states[index] = state.clone()
        torch._dynamo.mark_static_address(states[index])
    elif state.requires_grad:
        states[index] = state.detach()


def _check_sinks(sinks: int, windows: Collection[int | None]) -> None:
    """Raise :class:`ArgumentError` for sinks in a model with sliding windows."""
    sliding = [window for window in windows if window is not None]
    if sinks and sliding:
        got = f"{sinks} in a model with sliding windows of {min(sliding)} tokens"
        raise ArgumentError("sink_tokens", got, "0: a sliding window does not see the first tokens")
