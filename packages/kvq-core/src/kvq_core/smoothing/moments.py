"""Sums over rows, as they come: of each head and channel what a mean and a root mean square are made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Moments:
    """How many rows of each head are finite [heads, 1], and the sums of them and of their squares [heads, size], float64."""

    count: torch.Tensor
    total: torch.Tensor
    squares: torch.Tensor

    @classmethod
    def of(cls, rows: torch.Tensor, real: torch.Tensor | None) -> Moments:
        rows = rows.detach()
        counted = rows.isfinite().all(-1, keepdim=True)
        if real is not None:
            counted = counted & real[:, None, None]
        # Not picked, which would wait for the device.
        x = rows.double().masked_fill(~counted, 0.0)
        return cls(counted.sum(0, dtype=torch.float64), x.sum(0), x.square().sum(0))

    def plus(self, other: Moments | None) -> Moments:
        if other is None:
            return self
        return Moments(self.count + other.count, self.total + other.total, self.squares + other.squares)

    @property
    def mean(self) -> torch.Tensor:
        return self.total / self.count.clamp(min=1)

    @property
    def square(self) -> torch.Tensor:
        return self.squares / self.count.clamp(min=1)
