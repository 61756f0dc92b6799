"""Workspaces under watch: exactly as large as asked for, full of NaN, and with poison on both sides."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from kvq_core.launch.workspace import provided
from kvq_core.testing.poison import Poisoned, lay_out

Fill = Callable[[torch.Tensor], object]
"""Given a workspace [elements] float32 to write something into."""
_FILLS: list[Fill] = []


@contextlib.contextmanager
def leftovers(fill: Fill) -> Iterator[None]:
    """Within the block ``fill`` says what guarded workspaces hold at first."""
    _FILLS.append(fill)
    try:
        yield
    finally:
        _FILLS.pop()


@contextlib.contextmanager
def guarded_workspaces(what: str) -> Iterator[None]:
    """Fail after the block if bytes beside a workspace changed. What an earlier call left there is never seen: each is new, all 0xFF unless
    :func:`leftovers` says otherwise.

    Kernels of the mode must be launched from the calling thread, and not into a CUDA graph.
    """
    given: list[Poisoned] = []

    def make(device: torch.device, size: int) -> torch.Tensor:
        given.append(lay_out({"space": (torch.float32, (size,), (1,))}, device))
        for fill in _FILLS[-1:]:
            fill(given[-1]["space"])
        return given[-1]["space"]

    with provided(make):
        yield
    for memory in given:
        memory.assert_only_changed({"space": (slice(None),)}, f"{what} (around the workspace)")
