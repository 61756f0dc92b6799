"""From two reads to the launch that combines them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Final

import torch
import triton

from kvq_core.kernels.combine_reads import combine_reads_kernel
from kvq_core.launch.replay import LaunchRecord

_VALUES: Final = 2048
"""Values of a program, in rows of a head each: enough to have all loads of a warp in flight at once."""


def combine_reads(result: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> torch.Tensor:
    """What :func:`kvq_core.combine` does with checked tensors, in one launch. Fills ``result``, returns its log-sum-exp."""
    result_lse = torch.empty_like(lse, memory_format=torch.contiguous_format)
    size, num_rows = out.shape[2], lse.numel()
    if num_rows:
        width = triton.next_power_of_2(size)
        rows = max(1, _VALUES // width)
        # Triton launches on the current device.
        with torch.cuda.device(out.device) if out.is_cuda else nullcontext():
            LaunchRecord(out.device).start(
                combine_reads_kernel,
                (triton.cdiv(num_rows, rows), 1),
                result,
                result_lse,
                out.contiguous(),
                lse.contiguous(),
                other.contiguous(),
                other_lse.contiguous(),
                num_rows,
                SIZE=size,
                WIDTH=width,
                ROWS=rows,
                num_warps=4,
            )
    return result_lse
