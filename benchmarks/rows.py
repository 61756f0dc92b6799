"""One line of the table, and how a line comes about whatever goes wrong in it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from timing import Call, Timer

FLASHATTENTION, FLASHINFER, COPY = "flash_attention 3 bf16", "flashinfer bf16", "torch copy bf16"
TURBOMIND = ("turbomind bf16", "turbomind int8", "turbomind int4")
OTHERS = (FLASHATTENTION, FLASHINFER, *TURBOMIND, COPY)
"""Rows of the table that are no mode of ours."""


@dataclass(frozen=True)
class Row:
    """One measurement. ``bytes`` must cross the memory bus once, ``flops`` be done (0: none counted). ``temporary``: bytes that a
    call takes beside its arguments. ``error``: why there is no time."""

    op: str
    mode: str
    setting: str
    us: float | None = None
    host_us: float | None = None
    bytes: int = 0
    flops: int = 0
    temporary: int | None = None
    repeats: int = 0
    method: str = ""
    error: str = ""


class DeviceLostError(RuntimeError):
    """A kernel's fault after which nothing runs on the device in this process; ``row`` says where."""

    def __init__(self, row: Row) -> None:
        super().__init__(row.error)
        self.row = row


def measured(timer: Timer, row: Row, build: Callable[[], Call], *, allow_eager: bool = False) -> Row:
    """``row`` with the times of what ``build`` returns, or with the error; the memory is free again either way.

    :class:`DeviceLostError` if the device is of no more use.
    """
    error = ""
    call: Call | None = None
    try:
        call = build()
        temporary = timer.temporary(call)
        timing = timer.measure(call, row.bytes, allow_eager=allow_eager)
        known = replace(row, repeats=timing.repeats, method=timing.method, temporary=temporary)
        return replace(known, us=timing.device_us, host_us=timing.host_us)
    except Exception as caught:  # out of memory, a kernel that does not compile: the other rows still count
        error = brief(caught)
    finally:
        call = None
        release(timer.device)
    failed = replace(row, error=error)
    if is_lost(timer.device):
        raise DeviceLostError(failed)
    return failed


def brief(error: Exception) -> str:
    """The kind of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def release(device: torch.device) -> None:
    """Give memory that nothing refers to back to the device."""
    gc.collect()
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # after a kernel's fault everything fails
            torch.cuda.empty_cache()


def is_lost(device: torch.device) -> bool:
    """Whether a kernel's fault has ended this process's use of the device."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False
