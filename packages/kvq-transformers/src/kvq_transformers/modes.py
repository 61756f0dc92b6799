"""Which mode each layer is stored in: one for all, or by layer."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral

from kvq_core.backend import QuantKVBackend
from kvq_core.errors import ArgumentError, described
from kvq_core.registry import compose, get_backend

Mode = str | QuantKVBackend | tuple[str | QuantKVBackend, str | QuantKVBackend]
Modes = Mode | Mapping[int | str, Mode]
"""A mode's name, alias or backend; a pair of them for K and V; or a mapping of layer numbers (negative: from the end) and "default"."""


def layer_modes(mode: Modes, layers: list[int], num_layers: int) -> dict[int, QuantKVBackend]:
    """The backend of each of ``layers``, the attention layers of a model of ``num_layers``.

    Raises:
        ArgumentError: a layer that is not there or has no K and V, no default for some layer, or modes for K and V that do not compose.
        UnknownModeError: no installed package provides a mode.
    """
    if not isinstance(mode, Mapping):
        backend = _backend(mode, "mode")
        return dict.fromkeys(layers, backend)
    chosen: dict[int, Mode] = {}
    for key, value in mode.items():
        if key == "default":
            continue
        if not isinstance(key, Integral) or isinstance(key, bool) or not -num_layers <= key < num_layers:
            raise ArgumentError("mode", f"layer {described(key)}", f'"default" or a layer from {-num_layers} to {num_layers - 1}')
        layer = int(key) % num_layers
        if layer not in layers:
            raise ArgumentError("mode", f"layer {int(key)}", f"a layer that keeps K and V: one of {layers}")
        if chosen.setdefault(layer, value) != value:
            raise ArgumentError("mode", f"two modes for layer {layer}", "one")
    missing = [layer for layer in layers if layer not in chosen]
    if missing and "default" not in mode:
        raise ArgumentError("mode", f"no mode for layers {missing}", 'one for each, or a "default"')
    return {layer: _backend(chosen.get(layer, mode.get("default", "none")), f"mode[{layer}]") for layer in layers}


def _backend(mode: Mode, argument: str) -> QuantKVBackend:
    if isinstance(mode, tuple):
        if len(mode) != 2:
            raise ArgumentError(argument, f"{len(mode)} modes", "one, or a pair for K and V")
        try:
            return compose(_backend(mode[0], argument), _backend(mode[1], argument))
        except ArgumentError as problem:
            raise ArgumentError(argument, problem.got, problem.need) from problem
    return mode if isinstance(mode, QuantKVBackend) else get_backend(mode)
