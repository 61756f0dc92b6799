"""Which rows a step reads of a residual window and its sinks: plain arithmetic on a batch's lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class WindowShape:
    """Blocks of ``block_size`` exact rows, the window's newest ``length`` tokens, and the first ``sink_tokens``, whole blocks."""

    block_size: int
    length: int
    sink_tokens: int

    @property
    def sink_blocks(self) -> int:
        return self.sink_tokens // self.block_size


class WindowStep(NamedTuple):
    """What the two reads of a step take.

    ``table`` [num_seqs, width] and ``seqused_k`` [num_seqs] int32: of the exact read, sinks first. ``packed``: options of the packed
    read, which begins behind the sinks, each [num_seqs] int32: ``key_stops``, at which key it ends, and with sinks ``seqused_k``, the
    number of keys behind them, and ``first_positions``, the position of the first.
    """

    table: torch.Tensor
    seqused_k: torch.Tensor
    packed: dict[str, torch.Tensor]


def blocks_read(length: int, block_size: int, rows: int) -> int:
    """The most blocks of exact rows that a step reads of a sequence with ``rows`` new tokens: theirs and those of the ``length`` before."""
    return -(-(length + block_size - 1 + rows) // block_size)


def window_step(
    shape: WindowShape, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor, width: int
) -> WindowStep:
    """The reads of a batch with ``query_start_loc`` [num_seqs + 1], the exact one over ``width`` blocks a sequence.

    ``seq_lens`` and ``block_table`` may have rows of padding behind the batch's. Waits for no device.
    """
    count, size, sinks = len(query_start_loc) - 1, shape.block_size, shape.sink_blocks
    lengths = seq_lens[:count]
    before = lengths - (query_start_loc[1:] - query_start_loc[:-1])
    # Blocks between the sinks and the window.
    between = (before.sub(shape.length).clamp(min=0) // size - sinks).clamp(min=0)
    column = torch.arange(width, dtype=between.dtype, device=between.device)
    index = column + torch.where(column < sinks, 0, between[:, None])
    table = block_table[:count].gather(1, index.clamp(max=block_table.shape[1] - 1).long())
    stops = between * size
    packed = {"key_stops": stops}
    if sinks:
        packed["seqused_k"] = (lengths - shape.sink_tokens).clamp(min=0)
        packed["first_positions"] = torch.full_like(stops, shape.sink_tokens)
    return WindowStep(table, lengths - stops, packed)
