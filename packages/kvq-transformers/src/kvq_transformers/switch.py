"""``enable`` and ``disable``: plain ``model.generate(...)`` with a ``KVQCache``, and back."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

from transformers import GenerationMixin, PreTrainedModel

from kvq_core.errors import ArgumentError
from kvq_transformers.attention import NAME
from kvq_transformers.cache import KVQCache
from kvq_transformers.modes import Modes
from kvq_transformers.support import decoder_config

M = TypeVar("M", bound=PreTrainedModel)
_BEFORE = "_kvq_before"


def enable(model: M, mode: Modes = "int4", *, max_cache_len: int | None = None, block_size: int = 16) -> M:
    """From now on ``model.generate(...)`` keeps K and V in a new :class:`KVQCache` each time. Returns ``model``.

    Calls that bring ``past_key_values``, ask for a ``cache_implementation`` or say ``use_cache=False`` are left alone. Enabling again
    changes the settings; :func:`disable` takes them back.

    Args:
        model: a decoder with ``generate``.
        mode, max_cache_len, block_size: as for :class:`KVQCache`.

    Raises:
        ArgumentError: the model's attention cannot run over kvq's pages, or an argument does not fit; the model is left as it was.
        UnknownModeError: no installed package provides the mode.
    """
    if not isinstance(model, PreTrainedModel) or not isinstance(model, GenerationMixin):
        raise ArgumentError("model", type(model).__name__, "a transformers model with generate()")
    text = decoder_config(model.config)
    before = text._attn_implementation
    make = functools.partial(KVQCache, mode=mode, max_cache_len=max_cache_len, block_size=block_size)
    make(model.config)  # refuses here rather than at the first generate
    if not _follows(model, text):
        text._attn_implementation = before
        raise ArgumentError("model", type(model).__name__, "one whose attention layers use transformers' AttentionInterface")
    disable(model)
    text._attn_implementation = NAME
    setattr(model, _BEFORE, before if before != NAME else None)
    plain = model.generate

    @functools.wraps(plain)
    def generate(*args: Any, **kwargs: Any) -> Any:
        if _wants_cache(kwargs):
            kwargs["past_key_values"] = make(model.config)
        return plain(*args, **kwargs)

    model.__dict__["generate"] = generate
    return model


def disable(model: M) -> M:
    """Take :func:`enable` back: transformers' own cache and the attention implementation from before. Returns ``model``."""
    if model.__dict__.pop("generate", None) is not None:
        before = model.__dict__.pop(_BEFORE, None)
        if before is not None:
            decoder_config(model.config)._attn_implementation = before
    return model


def _wants_cache(kwargs: dict[str, Any]) -> bool:
    config = kwargs.get("generation_config")
    asked = kwargs.get("cache_implementation") or getattr(config, "cache_implementation", None)
    uses = kwargs.get("use_cache", getattr(config, "use_cache", None))
    return kwargs.get("past_key_values") is None and asked is None and uses is not False


def _follows(model: PreTrainedModel, text: Any) -> bool:
    """Whether some of the model's modules look up their attention in the interface, by the very config that was switched."""
    owners = [module for module in model.modules() if isinstance(module, PreTrainedModel) and module.config is text]
    return bool(owners) and all(owner._can_set_attn_implementation() for owner in owners)
