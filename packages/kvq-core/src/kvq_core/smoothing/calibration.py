"""Key smoothing: what all keys of a head share is taken off before they are quantized, and given back to the scores exactly.

For a fixed vector mu and factors g of a kv head, with ``k' = (k - mu) / g`` in the pages and ``q' = q * g``::

    q.k = q'.k' + q.mu

``q.mu`` is the same for every key of a row, so that the softmax does not see it; where something else does (a softcap, sinks), the
kernels add it back. Real keys have channels with a large mean (key biases, in Qwen2 and Qwen2.5), which would take up the levels that
should tell keys apart. mu and g must be the same for all keys of a cache: they are part of what its bytes mean. A rotary mean
is taken off beside mu (:mod:`kvq_core.smoothing.rotary`).
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Self, Union

import torch

from kvq_core import checks
from kvq_core.cache import tensorfile
from kvq_core.errors import ArgumentError, described
from kvq_core.smoothing import order as channel_order
from kvq_core.smoothing.moments import Moments
from kvq_core.smoothing.rotary import RotaryMean

FIRST_PREFILL: Final = "first_prefill"
"""In place of a :class:`ModelSmoothing`: each layer's mean is that of the first keys it is given."""
WEIGHTS: Final = "weights"
"""In place of a :class:`ModelSmoothing`, where the weights are at hand: what they say of the keys, their biases and the channels of their
norms (:mod:`kvq_core.smoothing.qk_norm`), if they have some."""
KEY_BIAS: Final = "key_bias"
"""The same of the biases alone."""
ROTARY_ORDERED: Final = "rotary_ordered"
CALIBRATED: Final = ("mean", "balanced", "rotary", "rotary_balanced", ROTARY_ORDERED)
"""Kinds of smoothing that a text is read for."""
Smoothings = Union["ModelSmoothing", str, None]
"""What a cache takes: the smoothing of a model, :data:`FIRST_PREFILL`, :data:`WEIGHTS`, :data:`KEY_BIAS`, or nothing."""
_KEY: Final = "kvq_smoothing"
_FORMAT_VERSION: Final = 1
_TENSOR: Final = re.compile(r"smoothing\.([0-9]{1,9})\.(mean|balance|order|rotary\.(channels|steps|bias))")
_LARGEST_FACTOR: Final = 16.0


@dataclass(frozen=True, eq=False)
class KeySmoothing:
    """One layer's mean key ``mean`` [num_kv_heads, head_size] and channel factors ``balance`` (the same shape, positive), float32.

    ``balance`` is optional, and so is ``rotary``, a rotary mean that is taken off as well, and beside a balance ``order`` [num_kv_heads,
    head_size] int32, each head's channels by what their rounding costs (:mod:`kvq_core.smoothing.order`), for modes that take one.
    ``read_factor`` and ``write_factor`` are what q and keys are multiplied by: balance and 1 / balance, with an order tables of places.
    Tensors are copied: the pages' bytes mean something else with other ones.

    Raises:
        ArgumentError: a tensor has another shape or dtype, or they differ in heads or device; an order without a balance, of heads that
            four does not divide, or without each channel once. Of tensors on the CPU also: ``mean`` is not finite, or ``balance`` is
            not positive and finite. On a GPU :meth:`check_numbers` tells, for which it waits.
    """

    mean: torch.Tensor
    balance: torch.Tensor | None = None
    rotary: RotaryMean | None = None
    order: torch.Tensor | None = None
    read_factor: torch.Tensor | None = field(init=False)
    write_factor: torch.Tensor | None = field(init=False)

    # Never inference tensors, which only inference mode may write to.
    @torch.inference_mode(False)
    def __post_init__(self) -> None:
        for name, given in (("mean", self.mean), ("balance", self.balance), ("order", self.order)):
            if given is None and name != "mean":
                continue
            tensor = checks.tensor(name, given)
            dtype = torch.int32 if name == "order" else torch.float32
            if tensor.dim() != 2 or tensor.dtype != dtype:
                raise ArgumentError(name, f"shape {tuple(tensor.shape)}, {tensor.dtype}", f"[num_kv_heads, head_size] {dtype}")
            if tensor.shape != self.mean.shape or tensor.device != self.mean.device:
                raise ArgumentError(name, f"{tuple(tensor.shape)} on {tensor.device}", f"{tuple(self.mean.shape)} on {self.mean.device}")
            object.__setattr__(self, name, tensor.detach().clone(memory_format=torch.contiguous_format))
        if self.rotary is not None:
            rotary = checks.instance("rotary", self.rotary, RotaryMean)
            got, wanted = (len(rotary.steps), rotary.head_size), tuple(self.mean.shape)
            if got != wanted or rotary.steps.device != self.mean.device:
                need = f"{wanted} on {self.mean.device}: heads, and their size"
                raise ArgumentError("rotary", f"{got} on {rotary.steps.device}", need)
        read = write = None
        if self.balance is not None:
            read, write = self.balance, 1 / self.balance
        if self.order is not None:
            if self.balance is None or self.order.shape[1] % channel_order.PARTS:
                beside = "no balance" if self.balance is None else f"heads of {self.order.shape[1]}"
                raise ArgumentError("order", f"one with {beside}", f"a balance beside it, and heads that {channel_order.PARTS} divides")
            if checks.has_values(self.order):
                # On any device: kernels take channels from where it says.
                channel_order.check(self.order)
            read, write = channel_order.tables(self.balance, self.order)
        object.__setattr__(self, "read_factor", read)
        object.__setattr__(self, "write_factor", write)
        if self.mean.device.type == "cpu":  # elsewhere it would wait, also in the middle of a forward
            self.check_numbers()

    @classmethod
    def estimate(cls, keys: torch.Tensor, queries: torch.Tensor | None = None) -> Self:
        """The mean of keys [num_tokens, num_kv_heads, head_size]; with queries [any, num_query_heads, head_size] the balance, too."""
        statistics = KeyStatistics()
        statistics.add(keys, queries)
        found = statistics.smoothing(balanced=queries is not None)
        return cls(found.mean, found.balance)

    @classmethod
    def of_bias(cls, bias: torch.Tensor, pairs: torch.Tensor, rates: torch.Tensor) -> Self:
        """What keys share by a ``bias`` [num_kv_heads, head_size] that comes before a rotary embedding of channels ``pairs``
        [n, 2], ``rates`` [n] radians a position: a rotary mean, and the mean of the other channels."""
        mean = bias.float().clone()
        mean[:, pairs.flatten()] = 0.0
        return cls(mean, None, RotaryMean.of_bias(bias.float(), pairs, rates) if len(pairs) else None)

    @property
    def operands(self) -> tuple[torch.Tensor, ...]:
        """The tensors that the doors take."""
        rotary = () if self.rotary is None else (self.rotary.channel_table, self.rotary.pair_table)
        return tuple(tensor for tensor in (self.mean, self.read_factor, self.write_factor, *rotary) if tensor is not None)

    @property
    def fingerprint(self) -> str:
        """What the numbers are, in 16 hexadecimal digits. Waits for the device."""
        digest = hashlib.sha256(str(tuple(self.mean.shape)).encode())
        ordered = () if self.order is None else (self.order,)
        for tensor in (self.mean, self.balance, *(self.rotary.tensors.values() if self.rotary else ()), *ordered):
            digest.update(b"none" if tensor is None else tensor.cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    @functools.cached_property
    def unordered(self) -> KeySmoothing:
        """The same without an order, for rows beside this layer's in a mode that takes none."""
        return self if self.order is None else KeySmoothing(self.mean, self.balance, self.rotary)

    def to(self, device: torch.device | str) -> KeySmoothing:
        """The same on ``device``, in tensors of its own."""
        device = checks.device("device", device)
        return self._each(lambda tensor: tensor.to(device), lambda rotary: rotary.to(device))

    def of_heads(self, heads: slice) -> KeySmoothing:
        """That of some kv heads."""
        return self._each(lambda tensor: tensor[heads], lambda rotary: rotary.of_heads(heads))

    def _each(self, tensor: Callable[[torch.Tensor], torch.Tensor], rotary: Callable[[RotaryMean], RotaryMean]) -> KeySmoothing:
        balance, mean, order = self.balance, self.rotary, self.order
        return KeySmoothing(
            tensor(self.mean),
            None if balance is None else tensor(balance),
            None if mean is None else rotary(mean),
            None if order is None else tensor(order),
        )

    def check_numbers(self, owner: str = "") -> None:
        """Raise :class:`~kvq_core.ArgumentError`, with ``owner`` before the tensor's name, for numbers that keys cannot be smoothed with.
        Waits for the device. Tensors without values, of meta or of a tracer, pass."""
        if not checks.has_values(self.mean):
            return
        checks.finite(f"{owner}mean", self.mean)
        if self.balance is not None:
            checks.finite(f"{owner}balance", self.balance, positive=True)

    def check(self, num_kv_heads: int, head_size: int, argument: str = "smoothing") -> None:
        """Raise :class:`~kvq_core.ArgumentError` naming ``argument`` unless this is for so many heads of that size."""
        if self.mean.shape != (num_kv_heads, head_size):
            heads, size = self.mean.shape
            raise ArgumentError(argument, f"one for {heads} heads of {size}", f"one for {num_kv_heads} heads of {head_size}")


def tensor_dtype(name: str) -> torch.dtype:
    """Of the tensor called ``name`` in :meth:`ModelSmoothing.tensors`."""
    return torch.int32 if name.endswith((".rotary.channels", ".rotary.steps", ".order")) else torch.float32


class KeyStatistics:
    """Sums over keys, and over queries, as they come: from any number of :meth:`add` to one :class:`KeySmoothing`.

    A row of a head with a NaN or an infinity does not count for that head; a head without any row that counts has mean 0.
    """

    def __init__(self) -> None:
        self._keys: Moments | None = None
        self._queries: Moments | None = None

    def add(self, keys: torch.Tensor, queries: torch.Tensor | None = None, real: torch.Tensor | None = None) -> None:
        """Count keys [num_tokens, num_kv_heads, head_size], those ``real`` [num_tokens] bool, and queries [any, heads, head_size]."""
        heads, size = checks.floats("keys", keys, 3, "[num_tokens, num_kv_heads, head_size]").shape[1:]
        known = self._keys
        if known is not None and known.total.shape != (heads, size):
            raise ArgumentError("keys", f"{heads} heads of {size}", "the {} heads of {} of earlier ones".format(*known.total.shape))
        if real is not None and (checks.tensor("real", real).dtype != torch.bool or real.shape != keys.shape[:1]):
            raise ArgumentError("real", f"shape {tuple(real.shape)}, {real.dtype}", f"[{len(keys)}] bool, one for each token")
        if queries is not None:
            checks.floats("queries", queries, 3, "[num_tokens, num_query_heads, head_size]")
            if not heads or queries.shape[1] % heads or queries.shape[2] != size:
                raise ArgumentError("queries", f"shape {tuple(queries.shape)}", f"[num_tokens, a multiple of {heads}, {size}]")
        for name, x in (("real", real), ("queries", queries)):
            if x is not None and x.device != keys.device:
                raise ArgumentError(name, f"a tensor on {x.device}", f"one on {keys.device}")
        self._keys = Moments.of(keys, real).plus(known)
        if queries is None:
            return
        grouped = queries.unflatten(1, (heads, -1)).transpose(1, 2).flatten(0, 1)
        self._queries = Moments.of(grouped, None).plus(self._queries)

    def of_kind(self, kind: str) -> KeySmoothing:
        """The :meth:`smoothing` of one of ``CALIBRATED``, but for a rotary mean."""
        return self.smoothing(balanced=kind.endswith("balanced"), ordered=kind.endswith("ordered"))

    def smoothing(self, *, balanced: bool = False, ordered: bool = False) -> KeySmoothing:
        """The mean of the keys counted; ``balanced``: and factors that make a channel's rounding matter alike in every channel.

        A channel of keys with standard deviation s_k, met by queries of root mean square s_q, has the factor sqrt(s_k / s_q), relative to
        the geometric mean of its head: quantization spreads its error evenly over k', and the scores see it times q'.
        ``ordered``: channels by s_k s_q, too, and factors that make the parts of a row alike (:mod:`kvq_core.smoothing.order`).
        """
        balanced = checks.flag("balanced", balanced) or checks.flag("ordered", ordered)
        if self._keys is None:
            raise ArgumentError("keys", "none so far", "keys to estimate a mean from")
        mean = self._keys.mean
        if not balanced:
            return KeySmoothing(mean.float())
        if self._queries is None:
            raise ArgumentError("queries", "none so far", "queries to balance the channels by")
        spread = (self._keys.square - mean.square()).clamp(min=0).sqrt()
        sizes = self._queries.square.sqrt()
        balance = channel_factors(spread, sizes)
        if not ordered:
            return KeySmoothing(mean.float(), balance)
        order = channel_order.order_of(spread * sizes)
        squares = (spread / balance).square().clamp(min=1e-12).float()
        return KeySmoothing(mean.float(), channel_order.part_balance(balance, order, squares), None, order)


def channel_factors(spread: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """The factors [num_kv_heads, head_size] float32 of channels in which keys have standard deviations ``spread``, and queries root mean
    squares ``queries``, both of that shape."""
    ratio = (spread.double() / queries.double().clamp(min=1e-12)).clamp(min=1e-12).sqrt().log()
    return (ratio - ratio.mean(-1, keepdim=True)).exp().clamp(1 / _LARGEST_FACTOR, _LARGEST_FACTOR).float()


@dataclass(frozen=True, eq=False)
class ModelSmoothing(Mapping[int, KeySmoothing]):
    """The :class:`KeySmoothing` of each layer of a model that has one, by layer."""

    layers: Mapping[int, KeySmoothing]

    def __post_init__(self) -> None:
        if not isinstance(self.layers, Mapping):
            raise ArgumentError("layers", described(self.layers), "a mapping from layers to KeySmoothing")
        for layer, one in self.layers.items():
            checks.integer("layers", layer)
            checks.instance(f"layers[{layer}]", one, KeySmoothing)

    def __getitem__(self, layer: int) -> KeySmoothing:
        return self.layers[layer]

    def __iter__(self) -> Iterator[int]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def fingerprint(self) -> str:
        """Of all layers. Caches with the same bytes and another fingerprint hold other keys. Waits for the device."""
        every = [(layer, self.layers[layer].fingerprint) for layer in sorted(self.layers)]
        return hashlib.sha256(json.dumps(every).encode()).hexdigest()[:16]

    def for_layers(self, layers: list[int], argument: str = "smoothing") -> list[KeySmoothing]:
        """Those of ``layers``, in order; :class:`~kvq_core.ArgumentError` naming ``argument`` and the ones that are missing, or whose
        numbers do not serve (:meth:`KeySmoothing.check_numbers`)."""
        missing = [layer for layer in layers if layer not in self.layers]
        if missing:
            others = f", but for {sorted(self.layers)}" if self.layers else ""
            need = f"one for each of {layers}: calibrate on the model it is used with"
            raise ArgumentError(argument, f"none for layers {missing}{others}", need)
        found = [self.layers[layer] for layer in layers]
        for layer, one in zip(layers, found, strict=True):
            one.check_numbers(f"{argument}[{layer}].")
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name: ``smoothing.LAYER.mean``, ``.balance``, ``.order`` and ``.rotary.{channels,steps,bias}``."""
        found = {}
        for layer, one in self.layers.items():
            found[f"smoothing.{layer}.mean"] = one.mean
            if one.balance is not None:
                found[f"smoothing.{layer}.balance"] = one.balance
            if one.order is not None:
                found[f"smoothing.{layer}.order"] = one.order
            if one.rotary is not None:
                found |= {f"smoothing.{layer}.rotary.{name}": tensor for name, tensor in one.rotary.tensors.items()}
        return found

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> ModelSmoothing:
        """Undo :meth:`tensors`; :class:`~kvq_core.ArgumentError` if they have other names, or do not fit each other."""
        layers = sorted({int(match[1]) for match in map(_TENSOR.fullmatch, tensors) if match})

        def layer_of(layer: int) -> KeySmoothing:
            name = f"smoothing.{layer}"
            mean, rotary = tensors[f"{name}.mean"], None
            if f"{name}.rotary.steps" in tensors:
                parts = {part: tensors[f"{name}.rotary.{part}"] for part in ("channels", "steps", "bias")}
                rotary = RotaryMean(**parts, head_size=mean.shape[-1])
            return KeySmoothing(mean, tensors.get(f"{name}.balance"), rotary, tensors.get(f"{name}.order"))

        try:
            found = cls({layer: layer_of(layer) for layer in layers})
        except KeyError as cause:
            raise ArgumentError("tensors", f"no {cause}", "a mean for each layer, and three tensors of a rotary mean") from None
        if found.tensors().keys() != tensors.keys():
            raise ArgumentError("tensors", sorted(tensors), "smoothing.LAYER.mean, .balance, .order and .rotary.{channels,steps,bias}")
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, with the fingerprint in its metadata.

        Raises:
            OSError: the file cannot be written.
        """
        checks.path("path", path)
        header = {"format_version": _FORMAT_VERSION, "fingerprint": self.fingerprint}
        stored = {name: tensor.cpu().contiguous() for name, tensor in self.tensors().items()}
        tensorfile.write(path, stored, {_KEY: json.dumps(header)})

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, device: torch.device | str = "cpu") -> ModelSmoothing:
        """What :meth:`save` wrote.

        Raises:
            SnapshotError: the file is damaged, or no such file of this format version.
            OSError: there is no file, or it cannot be read.
        """
        checks.path("path", path)
        device = checks.device("device", device)
        with tensorfile.opened(path) as file:
            text = file.metadata.get(_KEY)
            if text is None:
                raise file.error("no key smoothing")
            try:
                header = tensorfile.parse_json(text)
                version, fingerprint = header["format_version"], header["fingerprint"]
            except (ValueError, KeyError, TypeError) as cause:
                raise file.error(f"its header is damaged: {type(cause).__name__} {cause}") from cause
            if type(version) is not int or version != _FORMAT_VERSION:
                raise file.error(f"format version {version!r}, this kvq reads version {_FORMAT_VERSION}")
            tensors = {name: file.empty(name, tensor_dtype(name)) for name in file.entries}
            for name, tensor in tensors.items():
                file.read_into(name, tensor)
            try:
                found = cls.of_tensors(tensors)
            except ArgumentError as cause:
                raise file.damaged(str(cause)) from cause
            if found.fingerprint != fingerprint:
                raise file.error("damaged: its numbers are not those that were saved")
        return cls({layer: one.to(device) for layer, one in found.layers.items()})
