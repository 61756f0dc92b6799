"""The smoothings of a cache's layers: given, or found from the first keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvq_core.errors import ArgumentError, described
from kvq_core.smoothing.calibration import FIRST_PREFILL, KeySmoothing, KeyStatistics, ModelSmoothing, Smoothings

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend


class LayerSmoothings:
    """What the layers of a cache are written and read with: given, found from the first keys, or nothing.

    Args:
        given: ``None``, a :class:`ModelSmoothing` with all of ``layers``, or :data:`FIRST_PREFILL`.
        layers: numbers of the layers, as the model counts them.
        backend: the mode of the pages. heads: (num_kv_heads, head_size).

    Raises:
        ArgumentError: it is for other layers, heads or head sizes, or nothing that the mode takes.
    """

    def __init__(
        self,
        given: Smoothings,
        layers: list[int],
        backend: QuantKVBackend,
        heads: tuple[int, int],
        device: torch.device,
        argument: str = "smoothing",
    ) -> None:
        self._found: dict[int, KeySmoothing] = {}
        self._backend = backend
        self._layers, self._heads, self._device = layers, heads, device
        self._estimates = given == FIRST_PREFILL if isinstance(given, str) else False
        if isinstance(given, ModelSmoothing):
            given.for_layers(layers, argument)
            self._take(given, layers, argument)
        elif given is not None and not self._estimates:
            raise ArgumentError(argument, described(given), f'a ModelSmoothing, "{FIRST_PREFILL}" or None')

    def get(self, layer: int) -> KeySmoothing | None:
        return self._found.get(layer)

    def for_write(self, layer: int, key: torch.Tensor, real: torch.Tensor | None = None) -> KeySmoothing | None:
        """The layer's; if it is yet to be found, from keys [num_tokens, num_kv_heads, head_size], those that are ``real`` and finite.

        What was found holds for good after :meth:`keep`, which follows a write that was not refused.
        """
        if not self._estimates or layer in self._found:
            return self._found.get(layer)
        statistics = KeyStatistics()
        statistics.add(key, real=real)
        return statistics.smoothing()

    def keep(self, layer: int, smoothing: KeySmoothing | None) -> None:
        """From now on the layer's is ``smoothing``, with which keys have been written: what :meth:`for_write` returned."""
        if smoothing is not None:
            self._found.setdefault(layer, smoothing)

    def restore(self, found: ModelSmoothing) -> None:
        """Those of the layers that had found one when the cache was saved; the others wait on. Raises as the constructor does."""
        unknown = sorted(found.keys() - set(self._layers))
        if unknown:
            raise ArgumentError("smoothing", f"one for layers {unknown}", f"for layers of {self._layers}")
        self._take(found, list(found), "smoothing")

    def _take(self, given: ModelSmoothing, layers: list[int], argument: str) -> None:
        for layer in layers:
            given[layer].check(*self._heads, f"{argument} (layer {layer})")
            self._backend.check_smoothing(given[layer], f"{argument} (layer {layer})")
            self._found[layer] = given[layer].to(self._device)

    @property
    def waiting(self) -> bool:
        """Whether there are layers that are yet to find theirs."""
        return self._estimates and len(self._found) < len(self._layers)

    @property
    def found(self) -> ModelSmoothing | None:
        """Those of all layers that have one by now; ``None`` if there are none."""
        return ModelSmoothing(dict(sorted(self._found.items()))) if self._found else None
