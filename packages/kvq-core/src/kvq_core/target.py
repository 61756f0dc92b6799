"""What takes the launches of the doors: the GPU of a call's tensors or, within :func:`launching_to`, a :class:`Target`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvq_core.device import DeviceFacts


@dataclass(frozen=True)
class Target:
    """Stands for a GPU, with tensors on any device.

    ``facts``, ``overlaps``: what plans depend on; whether a launch may start before the one it depends on has ended. ``start``: is given
    each kernel with its grid, arguments and options, in the place of a launch. ``spaces``: gets the float32 elements of each workspace.
    """

    facts: DeviceFacts
    overlaps: bool
    start: Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], object]
    spaces: list[int] = field(default_factory=list)


class _Current:
    target: Target | None = None


def current() -> Target | None:
    """The target of this process, if it has one."""
    return _Current.target


@contextlib.contextmanager
def launching_to(target: Target) -> Iterator[None]:
    """Within the block, ``target`` takes the launches of the whole process."""
    before = _Current.target
    _Current.target = target
    try:
        yield
    finally:
        _Current.target = before
