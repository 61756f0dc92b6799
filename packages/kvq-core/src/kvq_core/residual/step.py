"""The tensors of a call under a residual window: where exact rows go, and the two reads' lengths and block tables."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvq_core.cache.layout import LayerCaches
from kvq_core.cache.sequences import GrownRow
from kvq_core.cache.step import int32, padded_table, to_device
from kvq_core.residual.table import ExactGrowth


@dataclass(frozen=True, eq=False)
class ReadBatch:
    """What one of the two reads is told of the sequences: int32 tensors as the read door takes them.

    ``first_positions`` [num_seqs]: of their first keys, in a read of exact rows that begin with no sinks.
    """

    block_table: torch.Tensor
    seqused_k: torch.Tensor
    max_seqlen_k: int
    first_positions: torch.Tensor | None = None


@dataclass(eq=False)
class Staging:
    """Blocks that live as long as a call, in which it is read: ``num_blocks`` of them, of one layer at a time.

    ``sources`` [n] int64: the blocks of exact rows to copy into blocks ``targets`` [n] before a layer's rows are written.
    ``slot_mapping`` [num_tokens] int64: of the call's rows.
    ``num_lasting``: the first so many sources keep their rows as long as the call. The others are given up by it: their rows are in
    ``held`` [num_layers, n - num_lasting, ...], by the names of the pages' tensors; ``None``: the caller keeps them where they are.
    ``written``: the pages and the layer that were written last, and where that layer is read.
    """

    num_blocks: int
    sources: torch.Tensor
    targets: torch.Tensor
    slot_mapping: torch.Tensor
    num_lasting: int = 0
    held: Mapping[str, torch.Tensor] | None = None
    written: tuple[object, int, LayerCaches] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"written": None}


@dataclass(frozen=True, eq=False)
class ResidualStep:
    """A planned call. Rows of its tensors follow the sequences of the call, as those of its :class:`~kvq_core.cache.step.Step` do.

    Attributes:
        copies: blocks of exact rows (from, to) to copy before anything is written.
        slot_mapping: [num_tokens] int64, where the new rows stay exact; -1 for those that do not.
        staging: where the call is read, if it is not read where its rows stay.
        exact: the read of exact rows.
        packed: the read of packed rows, without the sinks; ``None`` if no sequence has any.
        key_stops, first_positions: [num_seqs] int32, of the packed read.
    """

    copies: tuple[tuple[int, int], ...]
    slot_mapping: torch.Tensor
    staging: Staging | None
    exact: ReadBatch
    packed: ReadBatch | None
    key_stops: torch.Tensor
    first_positions: torch.Tensor

    def release(self) -> None:
        """Give back what the layer written last is read from, if that is not where its rows stay."""
        if self.staging is not None:
            self.staging.written = None


def build(
    rows: Sequence[GrownRow],
    planned: Sequence[ExactGrowth],
    block_size: int,
    packed_block_size: int,
    device: torch.device,
    dropped: Sequence[int] = (),
) -> ResidualStep:
    """The :class:`ResidualStep` of ``rows`` and what is ``planned`` for them; one transfer to ``device``.

    ``dropped``: keys of each row that came before those it has; empty: none."""
    kept = [slot for growth, row in zip(planned, rows, strict=True) for slot in _kept_slots(growth, row, block_size)]
    copies = tuple(growth.copy for growth in planned if growth.copy is not None)
    lasting: list[tuple[int, int]] = []
    given_up: list[tuple[int, int]] = []
    staged: list[int] = []
    tables, lengths = [], array("i")
    is_staged, num_blocks = not all(growth.appends for growth in planned), 0
    for growth, row in zip(planned, rows, strict=True):
        before, count = growth.before, row.end - row.start
        lengths.append(before.count + count)
        if not is_staged:
            tables.append(growth.after.blocks)
            continue
        blocks = range(num_blocks, num_blocks + -(-lengths[-1] // block_size))
        num_blocks = blocks.stop
        if growth.appends:
            # Where the past stays, in the copy of a block that was shared.
            lasting.extend(zip(growth.after.blocks[: len(before.blocks)], blocks, strict=False))
        else:
            given_up.extend(zip(before.blocks, blocks, strict=False))
        start = blocks.start * block_size + before.count
        staged.extend(range(start, start + count))
        tables.append(array("i", blocks))
    shifts = [growth.before.sinks for growth in planned]
    packed_tables = [row.blocks[shift // packed_block_size :] for row, shift in zip(rows, shifts, strict=True)]
    packed_lengths = array("i", [row.end - shift for row, shift in zip(rows, shifts, strict=True)])
    stops = array("i", [growth.before.first - shift for growth, shift in zip(planned, shifts, strict=True)])
    skipped = dropped or [0] * len(rows)
    parts = (
        torch.tensor(kept, dtype=torch.int64, device="cpu"),
        padded_table(tables),
        int32(lengths),
        padded_table(packed_tables),
        int32(packed_lengths),
        int32(stops),
        int32(array("i", [shift + before for shift, before in zip(shifts, skipped, strict=True)])),
        int32(array("i", [growth.before.first + before for growth, before in zip(planned, skipped, strict=True)])),
        torch.tensor(lasting + given_up, dtype=torch.int64, device="cpu").view(-1, 2).t().contiguous(),
        torch.tensor(staged, dtype=torch.int64, device="cpu"),
    )
    slots, table, used, packed_table, packed_used, key_stops, firsts, exact_firsts, blocks_copied, staged_slots = to_device(parts, device)
    exact = ReadBatch(table[:, : max(map(len, tables))], used, max(lengths), exact_firsts)
    packed = ReadBatch(packed_table[:, : max(map(len, packed_tables))], packed_used, max(packed_lengths)) if max(stops) > 0 else None
    staging = Staging(num_blocks, blocks_copied[0], blocks_copied[1], staged_slots, len(lasting)) if is_staged else None
    return ResidualStep(copies, slots, staging, exact, packed, key_stops, firsts)


def _kept_slots(growth: ExactGrowth, row: GrownRow, block_size: int) -> list[int]:
    """Where each of a sequence's new tokens stays exact, or -1."""
    after = growth.after

    def slot(index: int) -> int:
        return after.blocks[index // block_size] * block_size + index % block_size

    sinks_end = min(max(after.sinks, row.start), row.end)
    first = min(max(after.first, sinks_end), row.end)
    in_sinks = [slot(position) for position in range(row.start, sinks_end)]
    return [*in_sinks, *[-1] * (first - sinks_end), *(slot(after.sinks + position - after.first) for position in range(first, row.end))]
