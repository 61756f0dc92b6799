"""What a vLLM configuration says that concerns kvq."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from kvq_core.backend import QuantKVBackend
from kvq_core.errors import ArgumentError
from kvq_core.registry import get_backend, has_backend
from kvq_vllm.names import PLAIN_NAMES, VLLM_NAMES, mode_of, own_name
from kvq_vllm.pages import content_bytes

SECTION: Final = "kvq"
"""The key of ``--additional-config`` whose value is kvq's: ``{"mode": NAME, "smoothing": FILE or "none", "residual_length": TOKENS,
"sink_tokens": TOKENS}``, each optional."""
SMOOTHING: Final = f"--additional-config {SECTION}.smoothing"
"""What messages call the field of smoothed keys."""
RESIDUAL: Final = f"--additional-config {SECTION}.residual_length"
"""What messages call the number of a sequence's newest tokens in exact rows."""
SINKS: Final = f"--additional-config {SECTION}.sink_tokens"
"""What messages call the number of its first ones."""
NOTHING: Final = "none"
"""In place of a file: keys are stored as they are."""
_FIELDS: Final = {"mode": str, "smoothing": str, "residual_length": int, "sink_tokens": int}
_KINDS: Final = {str: "a string", int: "a whole number"}


@dataclass(frozen=True)
class Settings:
    """What kvq takes from a configuration.

    ``kv_cache_dtype``: the option's value. ``override``: the mode of layers with one of vLLM's own quantized names.
    ``smoothing``: a file of :meth:`kvq_core.smoothing.calibration.ModelSmoothing.save`, :data:`NOTHING`, or ``None``: what the weights say.
    ``residual_length``, ``sink_tokens``: how many of a sequence's newest and first tokens are read from exact rows. ``dtype``: of the
    model's K/V rows.
    """

    kv_cache_dtype: str = "auto"
    override: str | None = None
    smoothing: str | None = None
    residual_length: int = 0
    sink_tokens: int = 0
    dtype: torch.dtype = torch.bfloat16

    @classmethod
    def of(cls, config: Any) -> Settings:
        """Those of a vLLM config; :class:`ArgumentError` naming what kvq's section of ``--additional-config`` has wrong."""
        model, cache = config.model_config, config.cache_config
        found = getattr(config, "additional_config", None)
        section = found.get(SECTION, {}) if isinstance(found, dict) else {}
        argument = f"--additional-config {SECTION}"
        if not isinstance(section, dict) or set(section) - set(_FIELDS):
            raise ArgumentError(argument, repr(section), f"a mapping with some of {', '.join(_FIELDS)}")
        for name, value in section.items():
            if type(value) is not _FIELDS[name]:
                raise ArgumentError(f"{argument}.{name}", repr(value), _KINDS[_FIELDS[name]])
        override = section.get("mode")
        name = "auto" if cache is None else str(cache.cache_dtype)
        if override is not None and name not in VLLM_NAMES:
            need = f"--kv-cache-dtype {VLLM_NAMES[0]}, which marks the layers that get it"
            raise ArgumentError(f"{argument}.mode", f"{override!r} with --kv-cache-dtype {name}", need)
        full = None if override is None else _checked_override(override, name)
        if name in PLAIN_NAMES and name != "auto" and model is not None and model.dtype != getattr(torch, name):
            raise ArgumentError("--kv-cache-dtype", f"{name} with a model of {model.dtype}", "auto: mode none stores the model's own rows")
        dtype = torch.bfloat16 if model is None else model.dtype
        smoothing = section.get("smoothing")
        if smoothing not in (None, NOTHING):
            _check_smoothed_mode(smoothing, name, mode_of(name, full))
        exact = {RESIDUAL: section.get("residual_length", 0), SINKS: section.get("sink_tokens", 0)}
        for option, tokens in exact.items():
            if tokens < 0:
                raise ArgumentError(option, tokens, "0 or more tokens")
            if tokens and mode_of(name, full) in (None, "none"):
                raise ArgumentError(option, f"{tokens} with --kv-cache-dtype {name}", "a quantized --kv-cache-dtype of kvq's")
        return cls(name, full, smoothing, exact[RESIDUAL], exact[SINKS], dtype)

    @property
    def keeps_exact_rows(self) -> bool:
        return bool(self.residual_length or self.sink_tokens)

    def backend(self, kv_cache_dtype: str) -> QuantKVBackend:
        """The kvq backend of layers with this ``kv_cache_dtype``."""
        mode = mode_of(kv_cache_dtype, self.override)
        if mode is None:
            raise ArgumentError("--kv-cache-dtype", repr(kv_cache_dtype), "a name of kvq's: see `kvq doctor`")
        return get_backend(mode)


def _checked_override(mode: str, name: str) -> str:
    """The full name of ``mode``, of layers under vLLM's ``name``; :class:`ArgumentError` if its scales come with the checkpoint."""
    backend = get_backend(mode)
    if backend.takes_scales:
        way = f"--kv-cache-dtype {own_name(backend.mode)} (vLLM 0.33 and later): under other names vLLM drops the checkpoint's scales"
        raise ArgumentError(f"--additional-config {SECTION}.mode", f"{mode!r} with --kv-cache-dtype {name}", way)
    return backend.mode


def _check_smoothed_mode(file: str, name: str, mode: str | None) -> None:
    """Raise :class:`ArgumentError` if ``mode`` gains nothing from smoothed keys, or has scales for keys as they are."""
    got = f"{file!r} with --kv-cache-dtype {name}"
    if mode == "none":
        raise ArgumentError(SMOOTHING, got, "a quantized --kv-cache-dtype: mode none stores keys as they are")
    if mode is not None and get_backend(mode).takes_scales:
        raise ArgumentError(
            SMOOTHING, got, f"a mode that finds its own scales: those of {mode} come with the checkpoint, for keys as they are"
        )


def smallest_window_block(settings: Settings, head_size: int) -> int:
    """The least block size, a power of two, with which a page of packed rows holds 16 exact ones."""
    name = settings.kv_cache_dtype
    # vLLM 0.28 and later size pages for the mode, earlier ones for the name that marks its layers.
    named = {get_backend(name)} if name in VLLM_NAMES and has_backend(name) else set()
    of_pages = {settings.backend(name)} | named
    content = min(content_bytes(backend, head_size, head_size, settings.dtype) for backend in of_pages)
    need = -(-16 * content_bytes(get_backend("none"), head_size, head_size, settings.dtype) // content)
    return max(16, 1 << (need - 1).bit_length())


_LAST: list[Settings] = []


def current() -> Settings:
    """The settings of vLLM's current config; where none is set, those of the last one that was.

    vLLM asks for the size of pages inside and outside of its current config, before and after layers exist, and names no layer.
    """
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    if config is not None:
        _LAST[:] = [Settings.of(config)]
    return _LAST[0] if _LAST else Settings()


def smallest_block() -> int:
    """The least block size of vLLM's current config: with a residual window or sinks, one whose pages hold 16 exact rows."""
    from vllm.config import get_current_vllm_config_or_none

    settings, config = current(), get_current_vllm_config_or_none()
    if config is None or not settings.keeps_exact_rows:
        return 16
    return smallest_window_block(settings, config.model_config.get_head_size())
