"""kvq's entry in transformers' attention interface: ``attn_implementation="kvq"``."""

from __future__ import annotations

import logging
import weakref
from typing import Any, Final

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvq_core.errors import ArgumentError, KVQError
from kvq_core.registry import get_backend
from kvq_transformers.key_bias import key_projections
from kvq_transformers.layers import HANDLE, GrowingLayer, KVQLayer
from kvq_transformers.masks import check_reach, kvq_mask, may_wait, padding_of, reaching_too_far
from kvq_transformers.rows import GrowingForward
from kvq_transformers.storage import LayerScoring
from kvq_transformers.weights import layer_norms

NAME: Final = "kvq"
_LOG: Final = logging.getLogger(__name__)
_REFUSED: Final = {
    "output_attentions": "False: attention weights never exist as a tensor",
    "position_bias": "None: kvq adds no learned bias to scores",
    "block_indices": "None: a row sees all keys that its layer's window leaves",
    "sinks": "None: kvq takes sinks as s_aux",
    "return_shared_kv_states": "False: K and V are in kvq's pages, which no other model reads",
    "cu_seq_lens_q": "None: sequences of a KVQCache are rows of the batch",
}


def kvq_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a transformers layer over the pages of the ``KVQCache`` that ``key`` comes from.

    Without one (no cache, or another cache), over pages that live as long as this call, unquantized. Positional arguments come in the order
    of transformers' own functions: packages that wrap every registered function, such as kvpress, pass ``dropout`` that way.

    Args:
        query: [batch_size, num_query_heads, columns, head_size]; key, value: [batch_size, num_kv_heads, columns, head_size(_v)].
        attention_mask: what :func:`kvq_transformers.masks.kvq_mask` made.
        scaling, sliding_window, softcap: of the scores, as transformers names them; s_aux: [num_query_heads], the sinks.

    Returns:
        ([batch_size, columns, num_query_heads, head_size_v], None): no weights.

    Raises:
        ArgumentError: something that the kernels have no counterpart for.
    """
    layer: KVQLayer | None = getattr(key, HANDLE, None)
    if layer is not None:
        layer.arrive()
        _check_config(module, layer)
        if layer.forward.knows_no_weights and not torch.compiler.is_compiling():
            layer.forward.knows_no_weights = False
            _warn_of_weights(module)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if not is_causal:
        if layer is not None:
            raise ArgumentError("is_causal", "False", "causal attention: a token must not see later ones")
        # An encoder beside the decoder, such as a vision tower.
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, is_causal=False, **kwargs)
    for name, need in _REFUSED.items():
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise ArgumentError(name, "a value" if isinstance(kwargs[name], torch.Tensor) else repr(kwargs[name]), need)
    if dropout:
        raise ArgumentError("dropout", dropout, "0: call model.eval()")
    window = sliding_window
    if layer is None:
        layer = _passing_layer(key, value, attention_mask)
        query = _within_reach(query, attention_mask, window)
    elif layer.window is not None:
        window = layer.window if window is None else min(window, layer.window)
    scoring = LayerScoring(query.shape[-1] ** -0.5 if scaling is None else scaling, window, softcap or 0.0, s_aux)
    mask = padding_of(attention_mask, query.shape[2])
    out = layer.attend(query, key, value, mask, scoring)
    if torch.is_grad_enabled():
        trained = [x for x in (query, key, value, s_aux) if x is not None and x.requires_grad]
        if trained:
            out = _NoBackward.apply(out, *trained)
    return out, None


def _check_config(module: torch.nn.Module, layer: KVQLayer) -> None:
    """Raise :class:`ArgumentError` for a cache that was made for another number of layers than ``module``'s model has."""
    if torch.compiler.is_compiling():
        return
    count, made_for = getattr(getattr(module, "config", None), "num_hidden_layers", None), layer.forward.num_layers
    if None not in (count, made_for) and count != made_for:
        raise ArgumentError("cache", f"one made for {made_for} layers", f"one made from this model, of {count}")


def _warn_of_weights(module: torch.nn.Module) -> None:
    """Say so if keys of ``module`` have biases or a norm that a cache does not know of, which take up the levels of few bits."""
    biased = any(isinstance(getattr(projection, "bias", None), torch.Tensor) for projection in key_projections(module))
    if biased or any(layer_norms(module)):
        found = "have biases" if biased else "pass a norm"
        _LOG.warning("this model's keys %s, of which KVQCache(model.config) knows nothing: KVQCache(model) loses less accuracy", found)


class _PassingLayer(GrowingLayer):
    """A layer that lives as long as a call, which torch.compile can trace."""

    _attend = GrowingLayer._attend_rows


def _passing_layer(key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None) -> GrowingLayer:
    """A layer for keys that no ``KVQCache`` holds: all of them are in ``key``."""
    if attention_mask is not None and attention_mask.shape[-1] != key.shape[2]:
        got = f"{key.shape[2]} keys, {attention_mask.shape[-1]} of them written"
        raise ArgumentError("cache", got, "a KVQCache (with max_cache_len) in place of a static cache, under kvq's attention")
    layer = _PassingLayer(get_backend("none"), 0, None, GrowingForward({0: None}, [], block_size=64))
    layer.update(key, value)
    layer.arrive()
    return layer


def _within_reach(query: torch.Tensor, attention_mask: torch.Tensor | None, window: int | None) -> torch.Tensor:
    """``query``; padding between tokens in a window, where kvq's counts tokens and transformers' columns, is refused, as by a ``KVQCache``.
    Compiled code, which cannot refuse it, makes NaN of these rows."""
    num_queries = query.shape[2]
    mask = padding_of(attention_mask, num_queries)
    if mask is None or window is None:
        return query
    too_far = reaching_too_far(mask, torch.arange(mask.shape[1] - num_queries, mask.shape[1], device=mask.device), window)
    if not may_wait(mask.device):
        return query.masked_fill(too_far[:, None, :, None], torch.nan)
    check_reach(too_far, window)
    return query


class _NoBackward(torch.autograd.Function):
    """Passes a result on, and says so when someone asks for gradients that nothing computed."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, *trained: torch.Tensor) -> torch.Tensor:
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        raise KVQError('kvq\'s attention has no backward pass: train with another implementation (model.set_attn_implementation("sdpa"))')


class _Switched:
    """Which implementation each switched config had before. By identity: configs have no hash, and are no place for private notes."""

    def __init__(self) -> None:
        self._before: dict[int, str | None] = {}

    def on(self, config: PretrainedConfig) -> None:
        if config._attn_implementation != NAME:
            if id(config) not in self._before:
                weakref.finalize(config, self._before.pop, id(config), None)
            self._before[id(config)] = config._attn_implementation
            _set_alone(config, NAME)

    def before(self, config: PretrainedConfig) -> str | None:
        return self._before.get(id(config))

    def off(self, config: PretrainedConfig, before: str | None) -> None:
        if config._attn_implementation == NAME:
            # Eager attention is what every model has.
            _set_alone(config, self.before(config) or before or "eager")


def _set_alone(config: PretrainedConfig, name: str) -> None:
    """Not for the configs within it, which may be of a vision tower: transformers would pass a plain name on to those."""
    config._attn_implementation = {"": name}


_SWITCHED = _Switched()


def switch_on(config: PretrainedConfig) -> None:
    """Let the model of ``config`` use kvq's attention from its next forward on."""
    _SWITCHED.on(config)


def implementation_before(config: PretrainedConfig) -> str | None:
    """The attention implementation from before :func:`switch_on`; ``None``: not known, as of a copy."""
    return _SWITCHED.before(config)


def switch_off(config: PretrainedConfig, before: str | None = None) -> None:
    """Back to the attention implementation from before :func:`switch_on`, or to ``before``, where that is not known."""
    _SWITCHED.off(config, before)


def register() -> None:
    """Make ``attn_implementation="kvq"`` known to transformers: its attention and its masks."""
    AttentionInterface.register(NAME, kvq_attention)
    AttentionMaskInterface.register(NAME, kvq_mask)
