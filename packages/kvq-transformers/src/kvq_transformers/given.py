"""What a layer's rows are stored with besides its mode: the smoothing of its keys, and the scales of modes that the caller gives them."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from kvq_core.backend import QuantKVBackend
from kvq_core.errors import ArgumentError
from kvq_core.scales import checked_scale
from kvq_core.smoothing.calibration import FIRST_PREFILL, KEY_BIAS, WEIGHTS, KeySmoothing, ModelSmoothing, Smoothings
from kvq_core.smoothing.rotary import RotaryMean

LayerSmoothing = KeySmoothing | str | None
Scale = float | torch.Tensor
Scales = Scale | Mapping[int, Scale] | None
"""One scale for all layers whose mode takes one, or each layer's by its number; ``None``: 1."""


@dataclass(frozen=True)
class LayerGiven:
    """One layer's; ``None``: keys as they are, a scale of 1. ``rotary``: beside a mean that is yet to be found."""

    smoothing: LayerSmoothing = None
    k_scale: float | None = None
    v_scale: float | None = None
    rotary: RotaryMean | None = None

    @property
    def subtracted_rotary(self) -> RotaryMean | None:
        """The rotary mean that is taken off its keys."""
        return self.smoothing.rotary if isinstance(self.smoothing, KeySmoothing) else self.rotary


NOTHING = LayerGiven()


def whole(argument: str, value: object, *, least: int | None = 1, most: int | None = None, step: int = 1) -> int:
    """``value`` as an int: any kind of whole number, a tensor's included, but no bool.

    Raises:
        ArgumentError: it is none, or not a multiple of ``step`` from ``least`` to ``most``.
    """
    is_number = not isinstance(value, bool) and getattr(value, "dtype", None) != torch.bool and not getattr(value, "ndim", 0)
    try:
        found = operator.index(value) if is_number else None  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        found = None
    if found is None or (least is not None and found < least) or (most is not None and found > most) or found % step:
        kind = "an integer" if least is None else "a positive integer" if step == 1 else f"a positive multiple of {step}"
        raise ArgumentError(argument, repr(value), kind if most is None else f"{kind} up to {most}")
    return found


def usable_device(device: torch.device | str) -> torch.device:
    """``device``, or :class:`ArgumentError` if it names none."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as cause:
        raise ArgumentError("device", repr(device), "a torch device") from cause


def layers_given(
    smoothing: Smoothings, known: Mapping[int, KeySmoothing], k_scale: Scales, v_scale: Scales, backends: Mapping[int, QuantKVBackend]
) -> dict[int, LayerGiven]:
    """What each layer of ``backends``, all that keep K and V, is given. ``known``: what the model's weights say.

    Raises:
        ArgumentError: a smoothing or scales that are missing for a layer, for layers that are not there, or of the wrong kind.
    """
    smoothings = _smoothings(smoothing, known, backends)
    keys, values = (_scales(name, given, backends) for name, given in (("k_scale", k_scale), ("v_scale", v_scale)))
    rotary = {index: known[index].rotary for index in known if smoothings.get(index) == FIRST_PREFILL}
    return {index: LayerGiven(smoothings[index], keys.get(index), values.get(index), rotary.get(index)) for index in backends}


def _smoothings(given: Smoothings, known: Mapping[int, KeySmoothing], backends: Mapping[int, QuantKVBackend]) -> dict[int, LayerSmoothing]:
    if isinstance(given, ModelSmoothing):
        found = zip(backends, given.for_layers(list(backends)), strict=True)
        return {layer: _taken(one, backends[layer]) for layer, one in found}
    if given in (WEIGHTS, KEY_BIAS):
        return {layer: _fitting(known.get(layer), backend) for layer, backend in backends.items()}
    if given not in (None, FIRST_PREFILL):
        need = f'a ModelSmoothing, as kvq_transformers.calibrate finds it on a text, "{WEIGHTS}", "{KEY_BIAS}", "{FIRST_PREFILL}" or None'
        raise ArgumentError("smoothing", repr(given), need)
    return dict.fromkeys(backends, given)


def _taken(one: KeySmoothing, backend: QuantKVBackend) -> KeySmoothing:
    """``one`` as ``backend`` stores keys with it; exact rows need no order of channels, and other modes that take none refuse it."""
    if one.order is None or backend.mode == "none":
        return one.unordered
    backend.check_order(one.order.shape[1], "smoothing")
    return one


def _fitting(known: KeySmoothing | None, backend: QuantKVBackend) -> KeySmoothing | None:
    """What ``backend`` gains from what the weights say: nothing if it keeps rows as they are, and no factors if it has scales for channels
    that are not divided by them, which could be exceeded."""
    if known is None or backend.mode == "none" or (backend.takes_scales and not known.mean.any() and known.rotary is None):
        return None
    return replace(known, balance=None) if backend.takes_scales else known


def _scales(argument: str, given: Scales, backends: Mapping[int, QuantKVBackend]) -> dict[int, float]:
    """The scale of each layer whose mode takes one. A mapping may name the other layers, too."""
    if given is None:
        return {}
    takers = [layer for layer, backend in backends.items() if backend.takes_scales]
    if not takers:
        modes = ", ".join(sorted({backend.mode for backend in backends.values()}))
        raise ArgumentError(argument, "a scale", f"None: no layer's mode takes one from the caller ({modes})")
    if not isinstance(given, Mapping):
        return {layer: checked_scale(argument, layer, given) for layer in takers}
    unknown = [layer for layer in given if layer not in backends]
    if unknown:
        raise ArgumentError(argument, f"one for layers {unknown}", f"numbers of layers that keep K and V: {list(backends)}")
    missing = [layer for layer in takers if layer not in given]
    if missing:
        raise ArgumentError(argument, f"none for layers {missing}", f"one for each of {takers}: kvq_transformers.calibrate finds them")
    return {layer: checked_scale(argument, layer, given[layer]) for layer in takers}
