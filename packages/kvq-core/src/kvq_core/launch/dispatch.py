"""Which of a mode's kernels can serve a call: the table of :mod:`.families`, asked for a call on a device."""

from __future__ import annotations

from typing import Any

import torch

from kvq_core.call.spec import Attention, NewRows
from kvq_core.kernels.formats import Kernels, Sm90Kernels
from kvq_core.launch import families
from kvq_core.launch.bundles import row_alignment, strides_of
from kvq_core.launch.device import device_facts, interpreting
from kvq_core.launch.replay import triton_is_known


def machine_of(device: torch.device) -> families.Machine:
    """What kernels run on, for tensors on ``device``."""
    known = device_facts(device)
    return families.Machine(known.arch, known.use_asm, interpreting(), triton_is_known())


def sm90_reads(kernels: Kernels, attention: Attention) -> Sm90Kernels:
    """The read kernels for sm_90 that can take this call: of a mode's, of which it has some or none, and for staged tiles."""
    keys, values = attention.keys, attention.values
    alignment = min(row_alignment(keys), row_alignment(values))
    block_reach = keys.block_size * max(strides_of(keys) + strides_of(values))
    call = families.Sm90Call(attention, not kernels.format.packed, alignment, block_reach)
    machine = machine_of(attention.q.device)
    prefill, multirow, staging = (
        family.takes(machine, call) for family in (families.SM90_PREFILL, families.SM90_DECODE_MULTIROW, families.STAGED_PREFILL)
    )
    found = kernels.sm90() if kernels.sm90 is not None and (prefill or multirow) else Sm90Kernels()
    staged = None
    if staging:
        from kvq_core.kernels.sm90.plain import attend as staged
    return Sm90Kernels(found.prefill if prefill else None, found.decode_multirow if multirow else None, staged=staged)


def sm90_write(kernels: Kernels, rows: NewRows) -> Any | None:
    """A mode's write kernel for sm_90, if it has one that can take these rows."""
    if kernels.sm90 is None or not families.STORE_MMA.takes(machine_of(rows.key.device), rows):
        return None
    return kernels.sm90().write
