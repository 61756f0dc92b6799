"""An order of a head's channels, by what the rounding of each costs: those that cost most are stored in twice the bits, and those that
cost least not at all.

A row of d channels has d places in four parts. The first d / 4 channels of the order are in the first part, the next d / 2 in the second
and third. The fourth has the first d / 4 channels again, times FINER: a mode that takes an order stores there what is left of a channel
when its first code is taken off (residual quantization in two stages). The last d / 4 channels have no place: they are read as their means.
A score is the product over places of what is stored and of ``q * g``, over FINER in the last part: codes and kernels are those of a row
without an order, but that each part is rotated by itself.

Bits by variance are what transform coding gives (Huang and Schultheiss, 1963). A rotation over all channels leaves each the mean of their
errors; with an order, errors are nearer to their geometric mean.
"""

from __future__ import annotations

from typing import Final

import torch

from kvq_core.errors import ArgumentError

PARTS: Final = 4
"""Of a row, all of one size."""
FINER: Final = 4.0
"""By what the last part's channels are larger. What a two-bit code of a Gaussian leaves is .34 of it, rms, and half a cell of .98 at most
but for its tails: four cells of a quarter's width. A power of two, so that both codes see the same numbers."""
FIRST: Final = 0.6
"""How large the first part is stored, relative to the next two: there is room for rows whose first part is larger."""


def order_of(weights: torch.Tensor) -> torch.Tensor:
    """[num_kv_heads, head_size] int32: each head's channels from the largest of ``weights``, of that shape, to the smallest."""
    return weights.argsort(dim=-1, descending=True, stable=True).to(torch.int32)


def check(order: torch.Tensor) -> None:
    """Raise :class:`~kvq_core.ArgumentError` unless each row of ``order`` [num_kv_heads, head_size] has each channel once. Waits for the
    device."""
    every = torch.arange(order.shape[1], dtype=torch.int32, device=order.device)
    if not bool((order.sort(-1).values == every).all()):
        raise ArgumentError("order", "a channel twice, or one that no head has", "each channel of a head once")


def places_of(order: torch.Tensor) -> torch.Tensor:
    """The channel in each place of a row, [num_kv_heads, head_size] int32, of an order of that shape."""
    part = order.shape[-1] // PARTS
    return torch.cat((order[:, : 3 * part], order[:, :part]), -1)


def part_balance(balance: torch.Tensor, order: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
    """``balance`` [num_kv_heads, head_size] times a factor for the first part and one for the next two, so that keys, whose mean squares
    over ``balance`` are ``squares``, have the same in the latter, and FIRST^2 times it in the former; all float32 of that shape."""
    part = order.shape[-1] // PARTS
    index = order.to(torch.int64)
    stored = squares.gather(-1, index)
    sizes = torch.ones_like(stored)
    for places in (slice(0, part), slice(part, 3 * part)):
        sizes[:, places] = stored[:, places].mean(-1, keepdim=True).sqrt()
    sizes[:, :part] /= FIRST
    sizes = sizes / sizes[:, : 3 * part].log().mean(-1, keepdim=True).exp()
    sizes[:, 3 * part :] = 1.0
    return balance * torch.empty_like(sizes).scatter_(-1, index, sizes)


def tables(balance: torch.Tensor, order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a read and a write take, [num_kv_heads, 2, head_size] float32 each: of each place its factor, and its channel, as bits."""
    places = places_of(order)
    factor = balance.gather(-1, places.to(torch.int64))
    finer = torch.ones_like(factor)
    finer[:, -(factor.shape[-1] // PARTS) :] = FINER
    bits = places.contiguous().view(torch.float32)
    return torch.stack((factor / finer, bits), 1), torch.stack((1 / factor * finer, bits), 1)


def in_places(rows: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rows [..., num_kv_heads, head_size] as one of :func:`tables` wants them: their channels in places, times the factors."""
    places = channels(table).expand(rows.shape)
    return rows.gather(-1, places) * table[:, 0].to(rows.dtype)


def channels(table: torch.Tensor) -> torch.Tensor:
    """The channel in each place, [num_kv_heads, head_size] int64, of one of :func:`tables`."""
    return table[:, 1].contiguous().view(torch.int32).to(torch.int64)
