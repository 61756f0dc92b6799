"""What transformers calls the argument that a cache is given by: ``cache`` from 5.24 on, ``past_key_values`` before."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

from transformers import GenerationMixin

NAMES: Final = ("cache", "past_key_values", "cache_params")
"""Every name of it that some version of ``generate`` takes; the newest first."""


def cache_argument(call: Callable[..., Any]) -> str:
    """The name by which ``call``, a model's forward, takes a cache."""
    return next(name for name in NAMES[:2] if name in inspect.signature(call).parameters or name == NAMES[1])


GENERATE: Final = cache_argument(GenerationMixin.prepare_inputs_for_generation)
"""The name that ``generate`` takes, among its keyword arguments."""
