"""The mathematics of the first-party modes that fit a scale to the codes they have chosen, for the conformance suite."""

import math

import torch

from kvq_core.backend import QuantKVBackend
from kvq_core.hadamard import LARGEST_SCALE, SCALE_BITS, block_hadamard, block_of, headroom, single_rht
from kvq_core.testing import budgets
from kvq_core.testing.scene import Scene
from kvq_core.testing.subject import Encoded, Subject
from kvq_int2 import codec as int2
from kvq_int4 import codec as int4


class Int4Bounds(Subject):
    def space(self, x: torch.Tensor) -> torch.Tensor:
        return single_rht(x.double())

    def round_trip_bound(self, x: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
        y = self.space(x)
        grid = budgets.affine_levels(y, 16, int4.MIN_SCALE, lost_bits=0, clip=int4.CLIP)
        length = self.rotated(x)[0].square().sum(-1, keepdim=True)
        is_fitted = (length >= 0.99 * int4.SMALLEST_LENGTH) & (length <= 1.01 * int4.LARGEST_LENGTH)
        bound = torch.where(is_fitted, budgets.unbiased(y, grid), grid)
        # Rows whose step is more than is stored are too long for a fitted scale.
        step = (y.amax(-1, keepdim=True).clamp(min=0) - y.amin(-1, keepdim=True).clamp(max=0)) * ((1 - 2 * int4.CLIP) / (int4.LEVELS - 1))
        return budgets.not_worse_than_zero(y, budgets.with_rounded_scale(y, bound), step * (1 + 2.0**-SCALE_BITS))

    def rotated(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows as ``encode`` rotates them, and what it multiplied them by."""
        room = headroom(x.float())
        return single_rht(x.float() * room), room

    def encoded(self, built: Scene, half: str, x: torch.Tensor, scales: torch.Tensor | None) -> Encoded:
        """On the grid whose zero point was stored, if that is as near as the other one: an end of the range may then be clipped more."""
        assert scales is not None
        y, room = self.rotated(x)
        step, zero = int4.grid(y)
        _, stored = int4.split_scale(scales)
        low, high = y.double().amin(-1, keepdim=True).clamp(max=0), y.double().amax(-1, keepdim=True).clamp(min=0)
        is_tie = (((low + int4.CLIP * (high - low)) / -step - stored[..., None]).abs() - 0.5).abs() < 1e-3
        return int4.quantize_on_grid(y, step, torch.where(is_tie, stored[..., None], zero), room)

    def levels(self, backend: QuantKVBackend, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """In the step of the grid, which the zero point alone ties to the stored word."""
        assert scales is not None
        y, room = self.rotated(x)
        step, _ = int4.grid(y)
        _, zero = int4.split_scale(scales)
        return (int4.unpack(codes).double() - zero[..., None].double()) * (step.double() / room.double())

    def fitted(self, half: str, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        y, room = self.rotated(x)
        stored, zero = int4.split_scale(scales)
        scale = (int4.fitted(y, int4.unpack(codes).float(), int4.grid(y)[0], zero[..., None]) / room).clamp(max=LARGEST_SCALE)
        return int4.join_scale(budgets.stored_scale(scale.squeeze(-1), stored, self.scale_tolerance), zero)


class Int2Bounds(Subject):
    def space(self, x: torch.Tensor) -> torch.Tensor:
        return block_hadamard(x.double())

    def round_trip_bound(self, x: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
        y = self.space(x)
        bound = budgets.as_long(y, budgets.gaussian_levels(y, (int2.BOUNDARY,), (int2.INNER, int2.OUTER)))
        bound = budgets.with_rounded_scale(y, bound)
        rms = y.norm(dim=-1, keepdim=True) / math.sqrt(x.shape[-1])
        return budgets.not_worse_than_zero(y, bound, rms / (int2.INNER * block_of(x.shape[-1])))

    def levels(self, backend: QuantKVBackend, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """At the norm's scale, by which the cells are cut."""
        negative, outer = int2.unpack(codes)
        level = torch.where(outer, int2.OUTER, int2.INNER).double()
        return torch.where(negative, -level, level) * (self.space(x).norm(dim=-1, keepdim=True) / math.sqrt(x.shape[-1]))

    def fitted(self, half: str, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        y = block_hadamard(x.double())
        _, outer = int2.unpack(codes)
        scale = int2.fitted(y, outer, half == "value") / block_of(x.shape[-1])
        return budgets.stored_scale(scale.clamp(max=LARGEST_SCALE).squeeze(-1), scales, self.scale_tolerance)
