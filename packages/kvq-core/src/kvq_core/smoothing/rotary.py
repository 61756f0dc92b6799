"""Rotary key means: a mean key before its rotary embedding, which it goes through as keys do.

A key bias b (``k_proj``'s, or the mean of keys before RoPE) is in the key at position j as R_j b: a mean that no fixed vector takes off.
With ``k' = k - R_j b`` in the pages::

    q.k = q.k' + q.R_j b

Phases are whole numbers of turns / 2^32, so that R_j is the same for whoever computes it: what a write takes off a read gives back, whether
or not the rates are exactly the model's. The rotations of a few pairs of channels, those with the most of b, are taken off; what is left of
the others stays in the keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import torch

from kvq_core import checks
from kvq_core.errors import ArgumentError

NUM_PAIRS: Final = 16
"""Rotary pairs of channels, of each kv head: what one step of a matrix product takes."""
TURN: Final = 2**32
"""Phases in a turn."""


@dataclass(frozen=True, eq=False)
class RotaryMean:
    """One layer's mean key before RoPE, in ``num_pairs`` pairs of channels a kv head; in the other channels it is 0.

    Attributes:
        channels: [num_kv_heads, num_pairs, 2] int32: the two channels of a pair; a positive phase goes from the first towards the second.
        steps: [num_kv_heads, num_pairs] int32: by how much a pair's phase grows from one position to the next, in turns / 2^32.
        bias: [num_kv_heads, num_pairs, 2] float32: the mean in the two channels at position 0.
        head_size: channels of a head.
        channel_table: [num_kv_heads, 3, head_size] float32, what a write takes: of each channel what it has of the cosine of its phase, of
            the sine, and its step, as bits.
        pair_table: [num_kv_heads, 5, num_pairs] float32, what a read takes: both channels, as bits, both biases, the step, as bits.

    Tensors are copied.

    Raises:
        ArgumentError: a tensor has another shape or dtype, ``num_pairs`` is no power of two from 16 to 128, a channel is none of a head's,
            two pairs with a bias share one, or ``bias`` is not finite.
    """

    channels: torch.Tensor
    steps: torch.Tensor
    bias: torch.Tensor
    head_size: int
    channel_table: torch.Tensor = field(init=False)
    pair_table: torch.Tensor = field(init=False)

    # Never inference tensors, which only inference mode may write to.
    @torch.inference_mode(False)
    def __post_init__(self) -> None:
        checks.integer("head_size", self.head_size, 1)
        shape = checks.tensor("steps", self.steps).shape
        if len(shape) != 2 or shape[1] not in (16, 32, 64, 128) or self.steps.dtype != torch.int32:
            raise ArgumentError("steps", f"shape {tuple(shape)}, {self.steps.dtype}", "[num_kv_heads, 16, 32, 64 or 128] int32")
        for name, tensor, dtype in (("channels", self.channels, torch.int32), ("bias", self.bias, torch.float32)):
            if checks.tensor(name, tensor).shape != (*shape, 2) or tensor.dtype != dtype or tensor.device != self.steps.device:
                need = f"{(*shape, 2)} {dtype} on {self.steps.device}"
                raise ArgumentError(name, f"shape {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}", need)
        for name in ("channels", "steps", "bias"):
            object.__setattr__(self, name, getattr(self, name).detach().clone(memory_format=torch.contiguous_format))
        if checks.has_values(self.steps):
            self._check_numbers()
        object.__setattr__(self, "channel_table", self._channel_table())
        object.__setattr__(self, "pair_table", self._pair_table())

    @classmethod
    def of_bias(cls, bias: torch.Tensor, pairs: torch.Tensor, rates: torch.Tensor, num_pairs: int = NUM_PAIRS) -> RotaryMean:
        """The ``num_pairs`` pairs of each head that have the most of ``bias`` [num_kv_heads, head_size].

        ``pairs`` [rotary_dim // 2, 2]: pairs of channels; ``rates`` [rotary_dim // 2]: radians from one position to the next.
        """
        heads, size = checks.floats("bias", bias, 2, "[num_kv_heads, head_size]").shape
        if pairs.dim() != 2 or pairs.shape[1] != 2 or rates.shape != pairs.shape[:1]:
            raise ArgumentError("rates", f"{tuple(rates.shape)} for pairs {tuple(pairs.shape)}", "a rate for each pair of channels")
        pairs = pairs.to(bias.device, torch.int64)
        pair_bias = bias.float()[:, pairs]
        count = min(num_pairs, len(pairs))
        most = pair_bias.square().sum(-1).topk(count, dim=-1).indices
        steps = (rates.double() / (2 * torch.pi) * TURN).round().to(torch.int64).remainder(TURN)
        steps = torch.where(steps >= TURN // 2, steps - TURN, steps).to(bias.device, torch.int32)
        chosen = torch.arange(heads, device=bias.device)[:, None]
        missing = num_pairs - count
        pad = torch.nn.functional.pad
        return cls(
            pad(pairs[most], (0, 0, 0, missing)).to(torch.int32),
            pad(steps[most], (0, missing)),
            pad(pair_bias[chosen, most], (0, 0, 0, missing)),
            size,
        )

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What it is made of, by name."""
        return {"channels": self.channels, "steps": self.steps, "bias": self.bias}

    def to(self, device: torch.device | str) -> RotaryMean:
        """The same on ``device``, in tensors of its own."""
        return RotaryMean(self.channels.to(device), self.steps.to(device), self.bias.to(device), self.head_size)

    def of_heads(self, heads: slice) -> RotaryMean:
        """That of some kv heads."""
        return RotaryMean(self.channels[heads], self.steps[heads], self.bias[heads], self.head_size)

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """R_j b at ``positions`` [n], any integers: [n, num_kv_heads, head_size] float64."""
        return channel_means(self.channel_table, positions)

    def _check_numbers(self) -> None:
        checks.finite("bias", self.bias)
        outside = (self.channels < 0) | (self.channels >= self.head_size)
        if bool(outside.any()):
            raise ArgumentError("channels", f"{int(self.channels[outside][0])}", f"channels of a head: 0 to {self.head_size - 1}")
        used = torch.zeros(len(self.steps), self.head_size, dtype=torch.int64, device=self.steps.device)
        has_bias = (self.bias != 0).any(-1, keepdim=True).expand_as(self.channels).to(torch.int64)
        used.scatter_add_(1, self.channels.flatten(1).to(torch.int64), has_bias.flatten(1))
        if bool((used > 1).any()):
            raise ArgumentError("channels", "a channel in two pairs with a bias", "each in one")

    def _channel_table(self) -> torch.Tensor:
        heads, _ = self.steps.shape
        table = self.bias.new_zeros(heads, 3, self.head_size)
        index = self.channels.flatten(1).to(torch.int64)
        first, second = self.bias.unbind(-1)
        has_bias = (self.bias != 0).any(-1, keepdim=True)
        table[:, 0].scatter_add_(1, index, self.bias.flatten(1))
        table[:, 1].scatter_add_(1, index, torch.stack((-second, first), -1).flatten(1))
        steps = torch.zeros(heads, self.head_size, dtype=torch.int32, device=self.steps.device)
        steps.scatter_add_(1, index, (self.steps[..., None] * has_bias).expand_as(self.channels).flatten(1))
        table[:, 2] = steps.view(torch.float32)
        return table

    def _pair_table(self) -> torch.Tensor:
        channels, bias = self.channels.view(torch.float32).unbind(-1), self.bias.unbind(-1)
        return torch.stack((*channels, *bias, self.steps.view(torch.float32)), 1).contiguous()


class RotaryStatistics:
    """The mean of keys before RoPE, from keys behind it: channels ``pairs`` [n, 2], ``rates`` [n] radians a position.

    From any number of :meth:`add` to one :class:`RotaryMean`. A row of a head with a NaN or an infinity does not count for that head."""

    def __init__(self, pairs: torch.Tensor, rates: torch.Tensor) -> None:
        self.pairs, self.rates = pairs, rates
        nothing = torch.zeros((), dtype=torch.float64, device="cpu")
        self._num_tokens, self._count, self._total = 0, nothing, nothing

    def add(self, keys: torch.Tensor, positions: torch.Tensor) -> None:
        """Count keys [num_tokens, num_kv_heads, head_size] at ``positions`` [num_tokens]."""
        keys = checks.floats("keys", keys, 3, "[num_tokens, num_kv_heads, head_size]").double()
        finite = keys.isfinite().all(-1, keepdim=True)
        keys = keys.masked_fill(~finite, 0.0)
        angle = (positions.double()[:, None] * self.rates.double().to(keys.device))[:, None]
        x, y = keys[..., self.pairs.to(keys.device)].unbind(-1)
        total = keys.new_zeros(keys.shape[1:])
        total[:, self.pairs[:, 0]] = (x * angle.cos() + y * angle.sin()).sum(0)
        total[:, self.pairs[:, 1]] = (y * angle.cos() - x * angle.sin()).sum(0)
        self._num_tokens += len(keys)
        self._count = self._count.to(keys.device) + finite.sum(0, dtype=torch.float64)
        self._total = self._total.to(keys.device) + total

    def mean(self, num_pairs: int = NUM_PAIRS) -> RotaryMean:
        """What has been counted, in the ``num_pairs`` pairs of each head that have the most of it."""
        if not self._num_tokens:
            raise ArgumentError("keys", "none so far", "keys to estimate a mean from")
        return RotaryMean.of_bias((self._total / self._count.clamp(min=1)).float(), self.pairs, self.rates, num_pairs)


def channel_means(table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """R_j b [n, num_kv_heads, head_size] float64 from a :attr:`RotaryMean.channel_table` at ``positions`` [n]."""
    cosine, sine, steps = table[:, 0].double(), table[:, 1].double(), table[:, 2].contiguous().view(torch.int32)
    phase = phases(steps, positions[:, None, None])
    return cosine * phase.cos() + sine * phase.sin()


def pair_scores(table: torch.Tensor, q: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """q.R_j b [num_query_heads, rows, n] in q's dtype, for q [rows, num_query_heads, head_size], from a :attr:`RotaryMean.pair_table`."""
    heads = len(table)
    channels = table[:, :2].contiguous().view(torch.int32).to(torch.int64)
    first, second = table[:, 2].to(q.dtype), table[:, 3].to(q.dtype)
    steps = table[:, 4].contiguous().view(torch.int32)
    grouped = q.unflatten(1, (heads, -1))
    rows, _, group, _ = grouped.shape
    index = channels[None, :, None].expand(rows, heads, group, 2, -1)
    x, y = (grouped.gather(-1, index[..., half, :]) for half in range(2))
    along, across = x * first[:, None] + y * second[:, None], y * first[:, None] - x * second[:, None]
    phase = phases(steps, positions[:, None, None])
    cosine, sine = phase.cos().to(q.dtype), phase.sin().to(q.dtype)
    scores = torch.einsum("ihgp,jhp->hgij", along, cosine) + torch.einsum("ihgp,jhp->hgij", across, sine)
    return scores.flatten(0, 1)


def phases(steps: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The phases of ``steps`` int32 at ``positions``, in radians from -pi to pi, float64."""
    phase = (steps.to(torch.int64) * positions.to(torch.int64)).remainder(TURN)
    phase = torch.where(phase >= TURN // 2, phase - TURN, phase)
    return phase.double() * (2 * torch.pi / TURN)
