"""Smoothed keys as a call knows them: the tensors of a :class:`~kvq_core.smoothing.calibration.KeySmoothing`, and what they do to rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvq_core.checks import need, need_tensor, shape_of
from kvq_core.errors import ArgumentError
from kvq_core.smoothing.order import in_places
from kvq_core.smoothing.rotary import channel_means

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend


@dataclass(frozen=True)
class Smoothing:
    """How the keys in the pages differ from the model's (:mod:`kvq_core.smoothing.calibration`): ``mean`` and ``factor`` [Hkv, D] float32.
    With an order of channels ``factor`` is a table [Hkv, 2, D] of places (:mod:`kvq_core.smoothing.order`).

    For a write, keys become ``(k - mean - R_j b) * factor``. For a read, q becomes ``q * factor``, and ``q . mean`` is what a row's scores
    lack, and ``q . R_j b`` what each does. ``rotary`` is b's table (:class:`~kvq_core.smoothing.rotary.RotaryMean`), float32: of channels
    [Hkv, 3, D] for a write, of pairs [Hkv, 5, P] for a read.
    """

    mean: torch.Tensor
    factor: torch.Tensor | None = None
    rotary: torch.Tensor | None = None

    @classmethod
    def given(cls, mean: torch.Tensor | None, factor: torch.Tensor | None, rotary: torch.Tensor | None) -> Smoothing | None:
        return None if mean is None else cls(mean, factor, rotary)

    @property
    def ordered(self) -> bool:
        """Whether stored rows have their channels in an order."""
        return self.factor is not None and self.factor.dim() == 3

    @property
    def num_pairs(self) -> int:
        """The rotary pairs of channels, of a read; 0 without a rotary mean."""
        return 0 if self.rotary is None else self.rotary.shape[2]

    def validate(self, backend: QuantKVBackend, num_kv_heads: int, head_size: int, device: torch.device, *, of_read: bool) -> None:
        """Raise :class:`ArgumentError` unless it is for these heads on ``device``, and ``backend`` takes what it is."""
        for tensor in (self.mean, self.factor):
            if tensor is None:
                continue
            need_tensor(tensor, "smoothing", 3 if tensor is self.factor and self.ordered else 2, (torch.float32,), device)
            shape = (num_kv_heads, head_size) if tensor.dim() == 2 else (num_kv_heads, 2, head_size)
            need(
                tensor.shape == shape and tensor.is_contiguous(),
                "smoothing",
                f"one for {tensor.shape[0]} heads of {tensor.shape[-1]}, strides {tensor.stride()}",
                f"one for the {num_kv_heads} kv heads of {head_size}, contiguous",
            )
        if self.ordered:
            backend.check_order(head_size, "smoothing")
        if self.rotary is not None:
            need_tensor(self.rotary, "smoothing", 3, (torch.float32,), device)
            pairs = self.rotary.shape[2]
            fits = pairs in (16, 32, 64, 128) if of_read else pairs == head_size
            need(
                fits and self.rotary.shape[:2] == (num_kv_heads, 5 if of_read else 3) and self.rotary.is_contiguous(),
                "smoothing",
                f"a rotary table of {tuple(self.rotary.shape)}, strides {self.rotary.stride()}",
                f"[{num_kv_heads}, 5, 16 to 128] of pairs, contiguous" if of_read else f"[{num_kv_heads}, 3, {head_size}], contiguous",
            )

    def smooth(self, key: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """Of a write: keys [T, Hkv, D] at ``positions`` [T] as they are stored, in their own dtype."""
        rows = key.float() - self.mean
        if self.rotary is not None and positions is not None:
            rows = rows - channel_means(self.rotary, positions).float()
        return self._stored(rows).to(key.dtype)

    def of_queries(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a read: queries [T, Hq, D] of any float dtype as the stored keys need them, and q . mean [T, Hq]."""
        grouped = q.unflatten(1, (self.mean.shape[0], -1))
        shift = (grouped * self.mean.to(q.dtype)[:, None]).sum(-1).flatten(1)
        return self._stored(grouped.transpose(1, 2)).transpose(1, 2).flatten(1, 2), shift

    def _stored(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [..., Hkv, D] times the factors, in the order of stored ones."""
        if self.factor is None:
            return rows
        return in_places(rows, self.factor) if self.ordered else rows * self.factor.to(rows.dtype)


def checked_positions(positions: torch.Tensor | None, count: int, device: torch.device) -> torch.Tensor:
    """``positions`` of ``count`` rows, or :class:`ArgumentError` if they are none."""
    if positions is None:
        raise ArgumentError("positions", "None", "each row's position: a rotary mean is taken off its key")
    need_tensor(positions, "positions", 1, (torch.int32,), device)
    need(positions.shape[0] >= count, "positions", shape_of(positions), f"one for each of {count} rows")
    need(positions.is_contiguous(), "positions", f"strides {positions.stride()}", "a contiguous tensor")
    return positions[:count]
