"""Checks that look at values and therefore wait for the device: on only under ``KVQ_DEBUG=1``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvq_core import checks, variables
from kvq_core.call.spec import Attention, NewRows
from kvq_core.errors import ArgumentError
from kvq_core.scales import checked_scale

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend


def enabled() -> bool:
    """Whether ``KVQ_DEBUG=1`` is set, read at each call so that it can be switched on in a running program."""
    return variables.flag("KVQ_DEBUG")


def check_given(backend: QuantKVBackend, call: NewRows | Attention) -> None:
    """Raise for a layer's scale that the caller gives, or a number of its smoothing, with which rows would become NaN or infinite."""
    halves = {"k_scale_cache": (backend.key_half, call.keys), "v_scale_cache": (backend.value_half, call.values)}
    for name, (half, plane) in halves.items():
        if half.takes_scales and plane.scales is not None:
            checked_scale(name, None, plane.scales)
    if call.smoothing is not None:
        checks.finite("smoothing", call.smoothing.mean)
        if call.smoothing.factor is not None:
            factor = call.smoothing.factor
            checks.finite("smoothing", factor[:, 0] if call.smoothing.ordered else factor, positive=True)


def check_slots(rows: NewRows) -> None:
    """Raise for the first slot past the end of the cache (negative slots are padding) or named twice."""
    slots = rows.slot_mapping.cpu()
    num_slots = rows.keys.num_blocks * rows.keys.block_size
    outside = (slots >= num_slots).nonzero()
    if len(outside):
        row = int(outside[0])
        raise ArgumentError("slot_mapping", f"slot {int(slots[row])} in row {row}", f"a slot below {num_slots}")
    used = slots[slots >= 0]
    first, counts = torch.unique(used, return_counts=True)
    if (counts > 1).any():
        slot = int(first[counts > 1][0])
        row = int((slots == slot).nonzero()[1])
        raise ArgumentError("slot_mapping", f"slot {slot} again in row {row}", "each slot once")


def check_batch(attention: Attention) -> None:
    """Raise for the first sequence whose lengths or block ids do not fit."""
    batch, num_blocks, block_size = attention.batch, attention.keys.num_blocks, attention.keys.block_size
    starts, used, table = batch.cu_seqlens_q.cpu(), batch.seqused_k.cpu(), batch.block_table.cpu()
    if int(starts[0]) != 0 or int(starts[-1]) > attention.q.shape[0]:
        raise ArgumentError("cu_seqlens_q", f"{int(starts[0])} .. {int(starts[-1])}", f"0 .. at most {attention.q.shape[0]} query rows")
    for seq in range(batch.num_seqs):
        rows, keys = int(starts[seq + 1] - starts[seq]), int(used[seq])
        if rows < 0 or rows > batch.max_seqlen_q:
            raise ArgumentError("cu_seqlens_q", f"{rows} rows for sequence {seq}", f"0 .. max_seqlen_q = {batch.max_seqlen_q}")
        # Fewer keys than query rows are no fault: rows before the first key see nothing.
        if keys < 0:
            raise ArgumentError("seqused_k", f"{keys} for sequence {seq}", "0 or more")
        needed = -(-keys // block_size)
        if needed > table.shape[1]:
            raise ArgumentError("block_table", f"{table.shape[1]} columns", f"{needed} for sequence {seq} of {keys} keys")
        row = table[seq, :needed]
        bad = ((row < 0) | (row >= num_blocks)).nonzero()
        if len(bad):
            column = int(bad[0])
            raise ArgumentError("block_table", f"block {int(row[column])} in row {seq}, column {column}", f"0 .. {num_blocks - 1}")
