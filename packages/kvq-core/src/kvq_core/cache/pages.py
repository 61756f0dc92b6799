"""``Pages``: the memory of one cache. Buffers, their per-layer views, and the scales a caller gives."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, Self

import torch

from kvq_core import checks
from kvq_core.backend import QuantKVBackend
from kvq_core.cache import layout
from kvq_core.cache.layout import Geometry
from kvq_core.cache.step import to_device
from kvq_core.call.gradients import refuse_gradients
from kvq_core.call.spec import FLOATS
from kvq_core.errors import ArgumentError, described
from kvq_core.registry import get_backend
from kvq_core.scales import checked_scale, is_scale

Scale = float | torch.Tensor
_PLANES: Final = ("k_scale", "v_scale")


def contents(backend: QuantKVBackend, geometry: Geometry) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of every tensor of :class:`Pages`, by name; :class:`ArgumentError` if ``backend`` cannot hold ``geometry``."""
    cells = layout.buffers_of(backend, geometry)
    found = {name: (torch.uint8, geometry.buffer_shape(layout.cell_size(cell))) for name, cell in cells.items()}
    scales = _PLANES if backend.takes_scales else ()
    return found | {name: (torch.float32, (geometry.num_layers,)) for name in scales}


class Pages:
    """Zeroed buffers for ``geometry`` in the bytes of ``backend``, on ``device``.

    Attributes:
        layers: per layer, the :class:`LayerCaches` the doors take.
        tensors: everything that a copy of the cache needs, by name: the buffers [L, B, ..., bytes] uint8, and the given scales [L] float32.
        bytes_per_slot: over all layers and heads.
        viewed: layers of which a caller was handed the views, to write through as well.
    """

    def __init__(
        self,
        backend: QuantKVBackend,
        geometry: Geometry,
        device: torch.device | str,
        k_scale: Scale | Sequence[Scale] | None,
        v_scale: Scale | Sequence[Scale] | None,
    ) -> None:
        stored = contents(backend, geometry)
        device = checks.device("device", device)
        given = {"k_scale": k_scale, "v_scale": v_scale}
        scales = {name: _per_layer(name, given[name], geometry.num_layers, backend) for name in _PLANES}
        # Zeros rather than whatever was in that memory, since a snapshot holds every byte. Never inference tensors, which only inference
        # mode may write to.
        try:
            with torch.inference_mode(False):
                tensors = {name: torch.zeros(shape, dtype=dtype, device=device) for name, (dtype, shape) in stored.items()}
        except torch.OutOfMemoryError:
            raise  # what engines catch, and it tells what the device has left
        except RuntimeError as problem:
            if device.type != "cpu":
                raise
            size = sum(dtype.itemsize * math.prod(shape) for dtype, shape in stored.values())
            raise ArgumentError("num_blocks", f"{geometry.num_blocks}, {size} bytes of pages", "as many as memory holds") from problem
        self._take(backend, geometry, tensors)
        for name in self.tensors.keys() & _PLANES:
            self.tensors[name].copy_(scales[name])

    @torch.inference_mode(False)
    def _take(self, backend: QuantKVBackend, geometry: Geometry, tensors: dict[str, torch.Tensor]) -> None:
        """Make ``tensors`` the memory, and all else views of it."""
        cells = layout.buffers_of(backend, geometry)
        self.backend, self.geometry, self.tensors = backend, geometry, tensors
        self.viewed: set[int] = set()
        self._buffers = {name: tensors[name] for name in cells}
        self.device = next(iter(self._buffers.values())).device
        self.layers = [layout.layer_views(geometry, self._buffers, cells, layer) for layer in range(geometry.num_layers)]
        if backend.takes_scales:
            for name in _PLANES:
                rows = tensors[name].unsqueeze(1)
                self.layers = [replace(caches, **{f"{name}_cache": row}) for caches, row in zip(self.layers, rows, strict=True)]
        self.bytes_per_slot = geometry.num_layers * geometry.num_kv_heads * sum(map(layout.cell_size, cells.values()))

    def check_rows(self, argument: str, rows: torch.Tensor, shape: tuple[int, ...]) -> None:
        """Raise :class:`ArgumentError` unless ``rows`` are of that ``shape``, here, and of a dtype that these pages were made for."""
        if checks.tensor(argument, rows).shape != shape:
            raise ArgumentError(argument, f"shape {tuple(rows.shape)}", f"{shape} = [num_tokens, heads, head size]")
        if rows.device != self.device:
            raise ArgumentError(argument, f"a tensor on {rows.device}", f"one on {self.device}")
        stored, half = self.geometry.dtype, self.backend.key_half
        if rows.dtype not in FLOATS or half.cache_dtype(rows.dtype) != half.cache_dtype(stored):
            taken = [str(dtype) for dtype in FLOATS if half.cache_dtype(dtype) == half.cache_dtype(stored)]
            raise ArgumentError(argument, rows.dtype, f"{' or '.join(taken)}, as rows in mode {self.backend.mode} are stored here")
        if torch.is_grad_enabled():
            refuse_gradients((argument,), (rows,))

    def check_scales(self) -> None:
        """Raise :class:`ArgumentError` if a scale for a whole layer is none. Waits for the device."""
        for name in self.tensors.keys() & _PLANES:
            for layer, scale in enumerate(self.tensors[name].tolist()):
                checked_scale(name, layer, scale)

    def __getstate__(self) -> dict[str, Any]:
        # Arrays, since torch.multiprocessing would share a tensor's memory with the process it is sent to.
        arrays = {name: tensor.cpu().numpy() for name, tensor in self.tensors.items()}
        return {"backend": self.backend, "geometry": self.geometry, "device": self.device, "arrays": arrays, "viewed": self.viewed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        device = checks.device("device", state["device"])
        with torch.inference_mode(False):
            tensors = {name: torch.from_numpy(array).to(device, copy=True) for name, array in state["arrays"].items()}
        self._take(state["backend"], state["geometry"], tensors)
        self.viewed = set(state["viewed"])

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        twin = self.enlarged(self.geometry.num_blocks)
        twin.viewed = set(self.viewed)
        return twin

    def enlarged(self, num_blocks: int) -> Self:
        """A copy with room for ``num_blocks``, no fewer than there are; those there are keep their numbers and bytes."""
        geometry, twin = replace(self.geometry, num_blocks=num_blocks), type(self).__new__(type(self))
        with torch.inference_mode(False):
            tensors = {name: tensor.clone() for name, tensor in self.tensors.items() if name not in self._buffers}
            for name, buffer in self._buffers.items():
                tensors[name] = buffer.new_zeros((buffer.shape[0], num_blocks, *buffer.shape[2:]))
                tensors[name][:, : buffer.shape[1]] = buffer
        twin._take(self.backend, geometry, tensors)
        return twin

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (from, to) in every layer, codes and scales. No block is both read and written."""
        (pairs,) = to_device((torch.tensor(copies, dtype=torch.int64, device="cpu").t().contiguous(),), self.device)
        source, target = pairs.unbind()
        for buffer in self._buffers.values():
            buffer.index_copy_(1, target, buffer.index_select(1, source))

    def gather_blocks(self, blocks: torch.Tensor) -> None:
        """Block i becomes what block ``blocks[i]`` was, in every layer, at the same addresses; ``blocks`` [n] int64, n at most
        ``num_blocks``."""
        for buffer in self._buffers.values():
            buffer[:, : len(blocks)] = buffer.index_select(1, blocks)


def backend_of(argument: str, mode: str | QuantKVBackend) -> QuantKVBackend:
    """The backend that ``mode`` names, or is."""
    if not isinstance(mode, str | QuantKVBackend):
        raise ArgumentError(argument, described(mode), "a mode's name or alias, or a backend")
    return mode if isinstance(mode, QuantKVBackend) else get_backend(mode)


def _per_layer(name: str, given: Scale | Sequence[Scale] | None, num_layers: int, backend: QuantKVBackend) -> torch.Tensor:
    """``given`` as [num_layers] float32 on the CPU. Its values are checked, for which it may wait for the device, once."""
    if given is not None and not backend.takes_scales:
        raise ArgumentError(name, "a scale", f"None: mode {backend.mode} takes no scale from the caller")
    one = 1.0 if given is None else given
    per_layer = [one] * num_layers if is_scale(one) else _listed(name, one)
    if len(per_layer) != num_layers:
        raise ArgumentError(name, f"{len(per_layer)} scales", f"one, or one for each of {num_layers} layers")
    values = [checked_scale(name, layer, scale) for layer, scale in enumerate(per_layer)]
    return torch.tensor(values, dtype=torch.float32, device="cpu")


def _listed(name: str, given: object) -> list[object]:
    """The elements of ``given``, in its order: of a sequence, an array or a tensor."""
    # A mapping would be taken by its keys, and a set has no order.
    if isinstance(given, Iterable) and not isinstance(given, Mapping | Set | str | bytes):
        with suppress(TypeError, RuntimeError):  # of no dimensions, say
            return list(given)
    raise ArgumentError(name, described(given), "a number or a one-element tensor, or a sequence of one for each layer")
