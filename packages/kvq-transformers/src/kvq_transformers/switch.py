"""``enable`` and ``disable``: plain ``model.generate(...)`` with a ``KVQCache``, and back."""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any, TypeVar

from transformers import GenerationMixin, PreTrainedModel

from kvq_core.calibration import Smoothings
from kvq_core.errors import ArgumentError
from kvq_transformers.attention import NAME, switch_off
from kvq_transformers.cache import KVQCache
from kvq_transformers.given import Scales
from kvq_transformers.modes import Modes
from kvq_transformers.support import decoder_config

M = TypeVar("M", bound=PreTrainedModel)


def enable(
    model: M,
    mode: Modes = "int4",
    *,
    max_cache_len: int | None = None,
    block_size: int = 16,
    smoothing: Smoothings = None,
    k_scale: Scales = None,
    v_scale: Scales = None,
) -> M:
    """From now on ``model.generate(...)`` keeps K and V in a new :class:`KVQCache` each time. Returns ``model``.

    Calls that bring ``past_key_values``, ask for a ``cache_implementation`` or say ``use_cache=False`` are left alone. Enabling again
    changes the settings; :func:`disable` takes them back.

    Args:
        model: a decoder with ``generate``.
        mode, max_cache_len, block_size, smoothing, k_scale, v_scale: as for :class:`KVQCache`.

    Raises:
        ArgumentError: the model's attention cannot run over kvq's pages, or an argument does not fit; the model is left as it was.
        UnknownModeError: no installed package provides the mode.
    """
    if not isinstance(model, PreTrainedModel) or not isinstance(model, GenerationMixin):
        raise ArgumentError("model", type(model).__name__, "a transformers model with generate()")
    text = decoder_config(model.config)
    was_on = text._attn_implementation == NAME
    options: dict[str, Any] = {"max_cache_len": max_cache_len, "block_size": block_size, "smoothing": smoothing}
    make = functools.partial(KVQCache, mode=mode, k_scale=k_scale, v_scale=v_scale, **options)
    make(model.config)  # refuses here rather than at the first generate
    if not _follows(model, text):
        if not was_on:
            switch_off(text)
        raise ArgumentError("model", type(model).__name__, "one whose attention layers use transformers' AttentionInterface")

    @functools.wraps(type(model).generate)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _wants_cache(kwargs):
            kwargs["past_key_values"] = make(self.config)
            if self.generation_config.cache_implementation is not None:  # the model's default, which nobody asked for
                kwargs["cache_implementation"] = None
        return type(self).generate(self, *args, **kwargs)

    # A bound method, so that a deep copy of the model calls itself and not the original.
    model.__dict__["generate"] = MethodType(generate, model)
    return model


def disable(model: M) -> M:
    """Take :func:`enable` back: transformers' own cache, and the attention implementation from before kvq's. Returns ``model``."""
    model.__dict__.pop("generate", None)
    switch_off(decoder_config(model.config))
    return model


def _wants_cache(kwargs: dict[str, Any]) -> bool:
    config = kwargs.get("generation_config")
    asked = kwargs.get("cache_implementation") or getattr(config, "cache_implementation", None)
    uses = kwargs.get("use_cache", getattr(config, "use_cache", None))
    return kwargs.get("past_key_values") is None and asked is None and uses is not False


def _follows(model: PreTrainedModel, text: Any) -> bool:
    """Whether the modules that hold the switched config look their attention up in transformers' interface."""
    owners = [module for module in model.modules() if isinstance(module, PreTrainedModel) and module.config is text]
    return bool(owners) and all(owner._can_set_attn_implementation() for owner in owners)
