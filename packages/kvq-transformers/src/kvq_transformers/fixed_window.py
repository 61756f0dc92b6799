"""``FixedWindow``: the bookkeeping of a layer's exact rows on the device, so that a forward compiles and a CUDA graph can replay it.

A row of the batch owns blocks for its sinks and a ring, in which token j behind the sinks lies in slot ``j % ring``. The ring holds the
window, the new tokens of a call of up to a block, and a block more, so that tokens that are taken back leave the window whole. A call of
more tokens is read from blocks of its own (:class:`~kvq_core.residual.step.Staging`), and leaves its newest in the ring.
"""

from __future__ import annotations

from typing import Any

import torch

from kvq_core.residual.step import ReadBatch, ResidualStep, Staging
from kvq_core.residual.window import ResidualWindow


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """``state`` with tensors of its own, which a copy that was made in inference mode may write to outside of it."""
    with torch.inference_mode(False):
        return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


class FixedWindow:
    """Exact rows of ``batch_size`` rows whose packed blocks are in ``block_table`` [batch_size, blocks] int32.

    ``valid_from`` [batch_size] int32: the first token of each row whose slot in the ring no later one has taken, of whole blocks.
    """

    def __init__(self, window: ResidualWindow, batch_size: int, block_table: torch.Tensor, packed_block_size: int) -> None:
        device = block_table.device
        self.size, self.length, self.sinks = window.block_size, window.length, window.sinks
        self.ring_blocks = -(-(window.length + 2 * window.appended + self.size - 1) // self.size)
        self.blocks = window.sink_blocks + self.ring_blocks
        self.appended = window.appended
        self.packed_table = block_table[:, window.sinks // packed_block_size :].contiguous()
        self.packed_len = self.packed_table.shape[1] * packed_block_size
        self.first_block = torch.arange(batch_size, device=device, dtype=torch.int32)[:, None] * self.blocks
        self.valid_from = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.first_positions = torch.full((batch_size,), window.sinks, dtype=torch.int32, device=device)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(copied(state))

    @property
    def num_blocks(self) -> int:
        """Blocks of all rows."""
        return len(self.valid_from) * self.blocks

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What stays at its address."""
        return self.packed_table, self.first_block, self.valid_from, self.first_positions

    def select(self, rows: torch.Tensor) -> torch.Tensor:
        """Row i goes on as row ``rows[i]``. Returns the blocks [n] int64 that its blocks must become, in order."""
        self.valid_from.copy_(self.valid_from[rows])
        return (self.first_block[rows].long() + torch.arange(self.blocks, device=rows.device)).flatten()

    def plan(
        self, position: torch.Tensor, mask: torch.Tensor | None, start: torch.Tensor, end: torch.Tensor, *, is_first: bool
    ) -> ResidualStep:
        """The call that adds tokens at ``position`` [batch_size, columns], real ones as ``mask`` of that shape says.

        ``start`` and ``end`` [batch_size] int32: lengths before and after. ``is_first``: all of ``start`` are 0.
        """
        ring, columns = self.ring_blocks * self.size, position.shape[1]
        # Where tokens were taken back beyond what the ring still has, its next whole block is the first valid one.
        valid = torch.minimum(torch.where(start == 0, 0, self.valid_from), self._up(start))
        first = torch.maximum((start - self.length).clamp(min=0) // self.size * self.size, valid).clamp(min=self.sinks)
        used = torch.where(end > self.sinks, self.sinks + end - torch.minimum(first, end), end)
        self.valid_from.copy_(torch.maximum(valid, self._up((end - ring).clamp(min=0))))
        in_sinks = position < self.sinks
        kept = in_sinks | (position >= (end - ring)[:, None])
        kept = kept if mask is None else kept & mask
        slot = torch.where(in_sinks, position, self.sinks + position % ring) + self.first_block * self.size
        slots = torch.where(kept, slot, -1).flatten()
        if columns <= self.appended:
            read, staging = ReadBatch(self._table(first, self.blocks), used, self.blocks * self.size, first), None
        else:
            read, staging = self._staged(position, mask, first, used)
        # Sinks may take all blocks that a row has.
        packed = None if is_first or not self.packed_len else ReadBatch(self.packed_table, (end - self.sinks).clamp(min=0), self.packed_len)
        stops = torch.minimum(first, end) - self.sinks
        return ResidualStep((), slots.long(), staging, read, packed, stops, self.first_positions)

    def _up(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens``, rounded up to whole blocks."""
        return -(-tokens // self.size) * self.size

    def _table(self, first: torch.Tensor, num_blocks: int) -> torch.Tensor:
        """[batch_size, num_blocks] int32: a row's sinks, then its ring from token ``first`` on."""
        index = torch.arange(num_blocks, dtype=torch.int32, device=first.device)
        sink_blocks = self.sinks // self.size
        in_ring = sink_blocks + (first[:, None] // self.size + index - sink_blocks) % self.ring_blocks
        return (self.first_block + torch.where(index < sink_blocks, index, in_ring)).to(torch.int32)

    def _staged(
        self, position: torch.Tensor, mask: torch.Tensor | None, first: torch.Tensor, used: torch.Tensor
    ) -> tuple[ReadBatch, Staging]:
        """Blocks for this call alone: the exact rows of before, and the new ones behind them."""
        batch_size, columns = position.shape
        device = position.device
        before = self.sinks // self.size + -(-(self.length + self.size - 1) // self.size)
        each = -(-(self.sinks + self.length + self.size - 1 + columns) // self.size)
        rows = torch.arange(batch_size, device=device)[:, None] * each
        table = (rows + torch.arange(each, device=device)).to(torch.int32)
        index = torch.where(position < self.sinks, position, self.sinks + position - first[:, None])
        slots = rows * self.size + index
        slots = slots if mask is None else torch.where(mask, slots, -1)
        sources, targets = self._table(first, before).long().flatten(), table[:, :before].long().flatten()
        staging = Staging(batch_size * each, sources, targets, slots.flatten().long())
        return ReadBatch(table, used, each * self.size, first), staging
