"""Redirected launches: within :func:`launching_to`, the doors hand each kernel launch of this thread to a :class:`Target`, not to a GPU.

Plans, the warm-up and the compile matrix use it to see or compile what a call would launch.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvq_core.launch.device import DeviceFacts


@dataclass(frozen=True)
class Target:
    """A stand-in for a GPU, for tensors on any device.

    ``facts``: what launch plans depend on. ``overlaps``: whether a launch may start before the one it depends on has ended. ``start``:
    called with each kernel, its grid, arguments and options, in place of the launch. ``spaces``: collects the size of each workspace, in
    float32 elements. ``beside``: reads are launched as beside another one, where they can be.
    """

    facts: DeviceFacts
    overlaps: bool
    start: Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], object]
    spaces: list[int] = field(default_factory=list)
    beside: bool = False


_TARGETS: dict[int, Target] = {}
"""By thread: calls of other threads go to their GPU meanwhile."""


def current() -> Target | None:
    """The target of this thread, if it has one."""
    # The first test alone decides in nearly all calls, and is all that torch.compile traces.
    return _TARGETS.get(threading.get_ident()) if _TARGETS else None


@contextlib.contextmanager
def launching_to(target: Target) -> Iterator[None]:
    """Within the block, ``target`` takes the launches of this thread."""
    thread = threading.get_ident()
    before = _TARGETS.get(thread)
    _TARGETS[thread] = target
    try:
        yield
    finally:
        if before is None:
            del _TARGETS[thread]
        else:
            _TARGETS[thread] = before


@contextlib.contextmanager
def beside_another() -> Iterator[None]:
    """Within the block, this thread's target is one with ``beside``."""
    here = current()
    with contextlib.nullcontext() if here is None else launching_to(replace(here, beside=True)):
        yield
