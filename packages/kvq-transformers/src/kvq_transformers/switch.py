"""``enable`` and ``disable``: plain ``model.generate(...)`` with a ``KVQCache``, and back."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from copy import deepcopy
from types import MethodType
from typing import Any, Final, TypeVar

from transformers import GenerationMixin, PreTrainedModel

from kvq_core.errors import ArgumentError
from kvq_core.smoothing.calibration import WEIGHTS, ModelSmoothing, Smoothings
from kvq_transformers.attention import NAME, implementation_before, switch_off
from kvq_transformers.cache import KVQCache
from kvq_transformers.given import Scales
from kvq_transformers.modes import Modes
from kvq_transformers.naming import GENERATE, NAMES
from kvq_transformers.support import decoder_config

M = TypeVar("M", bound=PreTrainedModel)
_DEFAULT: Final = "_kvq_default_cache_implementation"
_BEFORE: Final = "_kvq_attention_before"
"""In a model's own dictionary, so that its copies have them, too."""


def enable(
    model: M,
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
) -> M:
    """From now on ``model.generate(...)`` keeps K and V in a new :class:`KVQCache` each time. Returns ``model``.

    Calls that bring a cache or ask for a ``cache_implementation`` are left alone, and so are those that do without: ``use_cache=False`` is
    looked for in the call, its ``generation_config``, ``model.generation_config`` and ``model.config``; the first to say anything counts.
    ``model.generation_config.cache_implementation``, the default that kvq replaces, is cleared. Enabling again changes the settings;
    :func:`disable` takes them back.

    Args:
        model: a decoder with ``generate``.
        mode, max_cache_len, block_size, residual_length, sink_tokens, residual_mode, smoothing, k_scale, v_scale: as for
            :class:`KVQCache`. Copied: later changes have no effect.

    Raises:
        ArgumentError: the model's attention cannot run over kvq's pages, or an argument does not fit; the model is left as it was.
        UnknownModeError: no installed package provides the mode.
    """
    if not isinstance(model, PreTrainedModel) or not isinstance(model, GenerationMixin):
        raise ArgumentError("model", type(model).__name__, "a transformers model with generate()")
    text = decoder_config(model.config)
    was_on = text._attn_implementation == NAME
    options: dict[str, Any] = {"max_cache_len": max_cache_len, "block_size": block_size, "smoothing": smoothing}
    options |= {"residual_length": residual_length, "sink_tokens": sink_tokens, "residual_mode": residual_mode}
    # Refuses here rather than at the first generate, and settles what mappings say.
    settled = KVQCache(model, mode, k_scale=k_scale, v_scale=v_scale, **options).settled | options | {"smoothing": deepcopy(smoothing)}
    if not _follows(model, text):
        if not was_on:
            switch_off(text)
        raise ArgumentError("model", type(model).__name__, "one whose attention layers use transformers' AttentionInterface")
    _take_default(model)
    present = model.__dict__.get("generate")
    replaced = present.replaced if isinstance(present, _Generate) else present
    model.__dict__["generate"] = _Generate(model, settled, replaced)
    model.__dict__.setdefault(_BEFORE, implementation_before(text))
    return model


def disable(model: M) -> M:
    """Take :func:`enable` back: transformers' own cache, and the attention implementation from before kvq's. Returns ``model``."""
    if not isinstance(model, PreTrainedModel):
        raise ArgumentError("model", type(model).__name__, "a transformers model")
    present = model.__dict__.get("generate")
    if isinstance(present, _Generate):
        del model.__dict__["generate"]
        if present.replaced is not None:
            model.__dict__["generate"] = present.replaced
    default = model.__dict__.pop(_DEFAULT, None)
    if default is not None and model.generation_config.cache_implementation is None:
        model.generation_config.cache_implementation = default
    switch_off(decoder_config(model.config), model.__dict__.pop(_BEFORE, None))
    return model


class _Generate:
    """``model.generate`` of an enabled model. Copies of the model, pickled ones included, have one of their own.

    ``settled``: the arguments of the caches. ``replaced``: the instance's own ``generate`` of before, if it had one.
    """

    def __init__(self, model: Any, settled: dict[str, Any], replaced: Callable[..., Any] | None) -> None:
        self.model, self.settled, self.replaced = model, settled, replaced

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(MethodType(type(self.model).generate, self.model))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        generate = self.replaced or MethodType(type(self.model).generate, self.model)
        named = self.__signature__.bind_partial(*args, **kwargs).arguments
        config = named.get("generation_config", kwargs.get("generation_config"))
        given = _given_cache(kwargs)
        kwargs = {
            name: value for name, value in kwargs.items() if name not in NAMES and not (name == "use_cache" and value is None)
        } | given
        if _wants_cache(self.model, config, kwargs):
            cache = KVQCache(self.model, **self._of_layers(decoder_config(self.model.config)))
            if getattr(config, "is_assistant", None):  # its drafts are rolled back
                cache.activate_past_recording()
            kwargs[GENERATE] = cache
        return generate(*args, **kwargs)

    def _of_layers(self, text: Any) -> dict[str, Any]:
        """:attr:`settled` for the layers that there are: drafts of an early exit come from the first ones alone."""
        count = getattr(text, "num_hidden_layers", None)
        if not isinstance(count, int):
            return self.settled

        def part(value: Any) -> Any:
            kept = {layer: one for layer, one in value.items() if layer < count} if isinstance(value, Mapping) else value
            return ModelSmoothing(kept) if isinstance(value, ModelSmoothing) else kept

        return {name: part(value) for name, value in self.settled.items()}


def _take_default(model: Any) -> None:
    """Clear the model's default ``cache_implementation``, which :func:`disable` brings back; a later one is a wish of its own."""
    config = getattr(model, "generation_config", None)
    if config is not None and getattr(config, "cache_implementation", None) is not None:
        model.__dict__[_DEFAULT] = config.cache_implementation
        config.cache_implementation = None


def _given_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The cache that a call of ``generate`` brings, under a name that this transformers knows."""
    given = {name: kwargs[name] for name in NAMES if kwargs.get(name) is not None}
    if len(given) > 1:
        raise ArgumentError(GENERATE, f"caches as {' and '.join(given)}", "one of them")
    return {GENERATE if name == NAMES[0] else name: cache for name, cache in given.items()}


def _wants_cache(model: Any, config: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call leaves the cache to :func:`enable`: it brings none, asks for none by name, and does not do without."""
    asked = kwargs.get("cache_implementation")
    for source in (config, model.generation_config):
        asked = asked or getattr(source, "cache_implementation", None)
    sources = (config, model.generation_config, model.config, decoder_config(model.config))
    said = [kwargs.get("use_cache"), *(getattr(source, "use_cache", None) for source in sources)]
    uses = next((value for value in said if value is not None), True)
    if not isinstance(uses, bool):
        raise ArgumentError("use_cache", repr(uses), "True or False")
    given = any(name in kwargs for name in NAMES)
    if given and not uses:
        raise ArgumentError("use_cache", "False, and a cache", "one or the other: every step would store the whole text again")
    return uses and not given and asked is None


def _follows(model: PreTrainedModel, text: Any) -> bool:
    """Whether the modules that hold the switched config look their attention up in transformers' interface."""
    owners = [module for module in model.modules() if isinstance(module, PreTrainedModel) and module.config is text]
    return bool(owners) and all(owner._can_set_attn_implementation() for owner in owners)
