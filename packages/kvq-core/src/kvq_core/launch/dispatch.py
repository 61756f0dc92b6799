"""Which of a mode's kernels can serve a call: the table of :mod:`.families`, asked for a call on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvq_core.call.spec import Attention, NewRows
from kvq_core.kernels.formats import Format, Kernels, Sm90Kernels
from kvq_core.launch import families
from kvq_core.launch.bundles import row_alignment, strides_of
from kvq_core.launch.device import device_facts, interpreting
from kvq_core.launch.replay import triton_is_known


def machine_of(device: torch.device) -> families.Machine:
    """What kernels run on, for tensors on ``device``."""
    known = device_facts(device)
    return families.Machine(known.arch, known.use_asm, interpreting(), triton_is_known())


def sm90_kernels(kernels: Kernels, fit: Callable[..., bool], *call: Any) -> Sm90Kernels:
    """A mode's kernels for sm_90, if it has some and they can take a call."""
    return kernels.sm90() if kernels.sm90 is not None and fit(*call) else Sm90Kernels()


def sm90_fits(attention: Attention, form: Format) -> bool:
    """Whether kernels of warp groups can take this call."""
    keys, values = attention.keys, attention.values
    row_bytes = min(row_alignment(keys), row_alignment(values))
    call = families.Sm90Call(attention, not form.packed, row_bytes, keys.block_size * max(strides_of(keys) + strides_of(values)))
    return families.SM90_PREFILL.takes(machine_of(attention.q.device), call)


def store_mma_fits(rows: NewRows) -> bool:
    """Whether a mode's sm_90 write kernel can take these rows."""
    return families.STORE_MMA.takes(machine_of(rows.key.device), rows)
