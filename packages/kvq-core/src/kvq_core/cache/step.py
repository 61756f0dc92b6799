"""One step of a batch: the tensors that tell both doors where the new tokens go and what each sequence attends to."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from kvq_core import checks
from kvq_core.cache.sequences import GrownRow, SequenceTable
from kvq_core.errors import ArgumentError

if TYPE_CHECKING:
    from kvq_core.residual.step import ResidualStep
    from kvq_core.smoothing.calibration import KeySmoothing

# Triton recompiles when a pointer or a stride stops being a multiple of 16: keep both so from one step to the next.
_ALIGNMENT = 64
_TABLE_WIDTH = 16


@dataclass(frozen=True, eq=False)
class Step:
    """What one ``append`` reserved. Rows of q, key and value follow ``sequences``, each sequence's new tokens in order.

    It serves ``write`` and ``attend``, for every layer, until one of its sequences is appended to, truncated, forked or freed.

    Attributes:
        sequences: sequence ids, in the order of the rows.
        slot_mapping: [num_tokens] int64, ``block * block_size + offset`` of each new token.
        block_table: [num_seqs, max_blocks] int32; -1 past a sequence's last block.
        cu_seqlens_q: [num_seqs + 1] int32, prefix sums of the new tokens.
        seqused_k: [num_seqs] int32, lengths with the new tokens.
        max_seqlen_q, max_seqlen_k: the largest number of new tokens, and the largest length.
        num_tokens: new tokens in all.
        residual: where exact rows go and are read, in a cache that keeps some.
        first_positions: [num_seqs] int32, dropped keys of each sequence, before its first; ``None``: none are.
        written: the layers whose rows a cache has stored with this step.
    """

    sequences: tuple[int, ...]
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seqused_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    num_tokens: int
    owner: object = field(repr=False)
    clock: int = field(repr=False)
    residual: ResidualStep | None = field(default=None, repr=False)
    first_positions: torch.Tensor | None = field(default=None, repr=False)
    written: set[int] = field(default_factory=set, repr=False)

    def positions_for(self, smoothing: KeySmoothing | None) -> torch.Tensor | None:
        """:attr:`positions` where a write with ``smoothing`` wants them."""
        return None if smoothing is None or smoothing.rotary is None else self.positions

    @cached_property
    def positions(self) -> torch.Tensor:
        """[num_tokens] int32: each new token's place among its sequence's keys, dropped ones included."""
        firsts, counts = self.seqused_k - self.cu_seqlens_q[1:], self.cu_seqlens_q.diff()
        if self.first_positions is not None:
            firsts = firsts + self.first_positions
        rows = torch.arange(self.num_tokens, dtype=torch.int32, device=firsts.device)
        return rows + firsts.repeat_interleave(counts, output_size=self.num_tokens)


def build(rows: Rows[GrownRow], block_size: int, device: torch.device, owner: object, clock: int) -> Step:
    """The :class:`Step` of a planned append. Python works per sequence, never per token; one transfer to ``device``."""
    cu_seqlens_q, seqused_k, longest = array("i", [0]), array("i"), 0
    for row in rows:
        count = row.end - row.start
        cu_seqlens_q.append(cu_seqlens_q[-1] + count)
        seqused_k.append(row.end)
        longest = max(longest, count)
    parts = (_slots(rows, block_size), padded_table([row.blocks for row in rows]), int32(cu_seqlens_q), int32(seqused_k))
    slot_mapping, table, starts, used = to_device(parts, device)
    return Step(
        sequences=tuple(row.sequence for row in rows),
        slot_mapping=slot_mapping,
        block_table=table[:, : max(len(row.blocks) for row in rows)],
        cu_seqlens_q=starts,
        seqused_k=used,
        max_seqlen_q=longest,
        max_seqlen_k=max(seqused_k),
        num_tokens=cu_seqlens_q[-1],
        owner=owner,
        clock=clock,
    )


def check(step: Step, table: SequenceTable) -> None:
    """Raise :class:`ArgumentError` unless ``step`` is the latest one of its sequences, of the cache with ``table``."""
    if checks.instance("step", step, Step).owner is not table:
        raise ArgumentError("step", "one of another cache", "one that this cache's append() returned")
    if not table.unchanged_since(step.clock, step.sequences):
        raise ArgumentError("step", "one whose sequences were appended to, truncated, forked or freed since", "their latest step")


def block_table(lists: Rows[array[int]], device: torch.device) -> torch.Tensor:
    """[len(lists), longest] int32 on ``device``; -1 past the end of each list."""
    (table,) = to_device((padded_table(lists),), device)
    return table[:, : max(map(len, lists))]


def to_device(parts: Rows[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copies of small CPU tensors on ``device``, all in one transfer, each on an aligned address."""
    firsts, total = [], 0
    for part in parts:
        firsts.append(total)
        total += -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
    host = torch.empty(total, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    for part, first in zip(parts, firsts, strict=True):
        host[first : first + part.nbytes].view(part.dtype).copy_(part.view(-1))
    moved = host.to(device, non_blocking=True)
    return [moved[first : first + part.nbytes].view(part.dtype).view(part.shape) for part, first in zip(parts, firsts, strict=True)]


def int32(values: array[int]) -> torch.Tensor:
    return torch.frombuffer(values, dtype=torch.int32)


def padded_table(lists: Rows[array[int]]) -> torch.Tensor:
    width = -(-max(1, *map(len, lists)) // _TABLE_WIDTH) * _TABLE_WIDTH
    table, padding = array("i"), array("i", [-1]) * width
    for blocks in lists:
        table += blocks
        table += padding[len(blocks) :]
    return int32(table).view(len(lists), width)


def _slots(rows: Rows[GrownRow], block_size: int) -> torch.Tensor:
    """[num_tokens] int64: the slots of every block that new tokens touch, less those before the first and after the last token."""
    if all(row.end - row.start == 1 for row in rows):
        # Of decode's rows without a tensor operation.
        places = ((row.blocks[row.start // block_size], row.start % block_size) for row in rows)
        return torch.frombuffer(array("q", (block * block_size + offset for block, offset in places)), dtype=torch.int64)
    touched, begin, end = array("i"), array("i"), array("i")
    for row in rows:
        first, last = row.start // block_size, (row.end - 1) // block_size
        begin.append(row.start % block_size)
        if first < last:
            touched += row.blocks[first:last]
            begin += array("i", [0]) * (last - first)
            end += array("i", [block_size]) * (last - first)
        touched.append(row.blocks[last])
        end.append((row.end - 1) % block_size + 1)
    offsets = torch.arange(block_size, dtype=torch.int32, device="cpu")
    kept = (offsets >= int32(begin)[:, None]) & (offsets < int32(end)[:, None])
    slots = int32(touched).to(torch.int64)[:, None] * block_size + offsets
    return slots[kept]
