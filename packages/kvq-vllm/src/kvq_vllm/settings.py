"""What a vLLM configuration says that concerns kvq."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from kvq_core.backend import QuantKVBackend
from kvq_core.errors import ArgumentError
from kvq_core.registry import get_backend
from kvq_vllm.names import VLLM_NAMES, mode_of

SECTION: Final = "kvq"
"""The key of ``--additional-config`` whose value is kvq's: ``{"mode": NAME, "smoothing": FILE or "none"}``, both optional."""
SMOOTHING: Final = f"--additional-config {SECTION}.smoothing"
"""What messages call the second."""
NOTHING: Final = "none"
"""In place of a file: keys are stored as they are."""


@dataclass(frozen=True)
class Settings:
    """What kvq takes from a configuration.

    ``kv_cache_dtype``: the option's value. ``override``: the mode of layers with one of vLLM's own quantized names.
    ``smoothing``: a file of :meth:`kvq_core.smoothing.calibration.ModelSmoothing.save`, :data:`NOTHING`, or ``None``: what the weights say.
    ``dtype``: of the model's K/V rows.
    """

    kv_cache_dtype: str = "auto"
    override: str | None = None
    smoothing: str | None = None
    dtype: torch.dtype = torch.bfloat16

    @classmethod
    def of(cls, config: Any) -> Settings:
        """Those of a vLLM config; :class:`ArgumentError` naming what kvq's section of ``--additional-config`` has wrong."""
        model, cache = config.model_config, config.cache_config
        found = getattr(config, "additional_config", None)
        section = found.get(SECTION, {}) if isinstance(found, dict) else {}
        argument = f"--additional-config {SECTION}"
        if not isinstance(section, dict) or set(section) - {"mode", "smoothing"}:
            raise ArgumentError(argument, repr(section), 'a mapping with "mode", "smoothing" or both')
        for name, value in section.items():
            if not isinstance(value, str):
                raise ArgumentError(f"{argument}.{name}", repr(value), "a string")
        override = section.get("mode")
        name = "auto" if cache is None else str(cache.cache_dtype)
        if override is not None and name not in VLLM_NAMES:
            need = f"--kv-cache-dtype {VLLM_NAMES[0]}, which marks the layers that get it"
            raise ArgumentError(f"{argument}.mode", f"{override!r} with --kv-cache-dtype {name}", need)
        full = None if override is None else get_backend(override).mode
        dtype = torch.bfloat16 if model is None else model.dtype
        smoothing = section.get("smoothing")
        if smoothing not in (None, NOTHING):
            _check_smoothed_mode(smoothing, name, mode_of(name, full))
        return cls(name, full, smoothing, dtype)

    def backend(self, kv_cache_dtype: str) -> QuantKVBackend:
        """The kvq backend of layers with this ``kv_cache_dtype``."""
        mode = mode_of(kv_cache_dtype, self.override)
        if mode is None:
            raise ArgumentError("--kv-cache-dtype", repr(kv_cache_dtype), "a name of kvq's: see `kvq doctor`")
        return get_backend(mode)


def _check_smoothed_mode(file: str, name: str, mode: str | None) -> None:
    """Raise :class:`ArgumentError` if ``mode`` gains nothing from smoothed keys, or has scales for keys as they are."""
    got = f"{file!r} with --kv-cache-dtype {name}"
    if mode == "none":
        raise ArgumentError(SMOOTHING, got, "a quantized --kv-cache-dtype: mode none stores keys as they are")
    if mode is not None and get_backend(mode).takes_scales:
        raise ArgumentError(
            SMOOTHING, got, f"a mode that finds its own scales: those of {mode} come with the checkpoint, for keys as they are"
        )


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
