"""Random smoothings for cases, and rotary positions for their keys."""

from __future__ import annotations

import torch

from kvq_core.smoothing import order
from kvq_core.smoothing.calibration import KeySmoothing
from kvq_core.smoothing.rotary import RotaryMean
from kvq_core.testing.cases import Case


def draw_smoothing(case: Case, seed: int, device: torch.device) -> KeySmoothing | None:
    """A mean of about thirty in every seventh channel, factors around one, and as much again in rotary pairs of channels, each at a rate
    of its own. From a generator of their own: other values stay."""
    if not case.smoothing:
        return None
    generator = torch.Generator().manual_seed(seed + 1)
    shape = (case.num_kv_heads, case.head_size)
    mean = 30 * torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < 1 / 7)
    balance = torch.exp(0.5 * torch.randn(shape, generator=generator)) if case.smoothing != "mean" else None
    rotary = channels = None
    if case.has_rotary_mean:
        bias = 20 * torch.randn(shape, generator=generator)
        pairs = torch.randperm(case.head_size, generator=generator)[: case.head_size // 2 * 2].view(-1, 2)
        rates = torch.pi * torch.rand(len(pairs), generator=generator) ** 3
        rotary = RotaryMean.of_bias(bias, pairs, rates, num_pairs=16 << seed % 2)
    if case.smoothing == "ordered":
        channels = order.order_of(torch.rand(shape, generator=generator))
    return KeySmoothing(mean, balance, rotary, channels).to(device)


def first_positions(case: Case, seed: int) -> list[int]:
    """Rotary positions of the sequences' first keys: of sequences that share blocks the same."""
    if not case.has_rotary_mean:
        return [0] * case.num_seqs
    drawn = torch.randint(-9, 10**5, (case.num_seqs,), generator=torch.Generator().manual_seed(seed + 2)).tolist()
    return drawn[:1] * case.num_seqs if case.shared else drawn
