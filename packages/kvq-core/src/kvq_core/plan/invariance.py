"""The switch for bytes and results that do not depend on what else is in a batch.

A call takes its value along when it begins (:mod:`kvq_core.call.ops`): plans and kernels read that, never the switch.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from kvq_core import checks, variables


@dataclass(frozen=True, eq=False)
class _Block:
    """A ``with`` block that has not ended, and the thread that is in it."""

    on: bool
    thread: int


class _Switch:
    """What :func:`set_batch_invariant` was given last, and the blocks that have not ended, newest last."""

    def __init__(self) -> None:
        self.value: bool | None = None
        self.blocks: tuple[_Block, ...] = ()
        # Reentrant: a thread that was interrupted while it held the lock can take it again.
        self.lock = threading.RLock()


_SWITCH = _Switch()


def is_batch_invariant() -> bool:
    """Whether bytes and results must not depend on what else is in a batch: as this thread's innermost :func:`batch_invariant` says, or
    the newest one of other threads, or :func:`set_batch_invariant`, or ``KVQ_BATCH_INVARIANT=1``."""
    blocks = _SWITCH.blocks
    if blocks:
        thread = threading.get_ident()
        return next((block.on for block in reversed(blocks) if block.thread == thread), blocks[-1].on)
    return variables.flag("KVQ_BATCH_INVARIANT") if _SWITCH.value is None else _SWITCH.value


def set_batch_invariant(on: bool) -> None:
    """Make each sequence's result bit-identical whatever else is in its batch (a fixed split; a few per cent slower)."""
    _SWITCH.value = checks.flag("on", on)


@contextlib.contextmanager
def batch_invariant(on: bool = True) -> Iterator[None]:
    """:func:`set_batch_invariant` for a ``with`` block, in threads with no such block of their own, too."""
    block = _Block(checks.flag("on", on), threading.get_ident())
    with _SWITCH.lock:
        _SWITCH.blocks += (block,)
    try:
        yield
    finally:
        with _SWITCH.lock:
            _SWITCH.blocks = tuple(other for other in _SWITCH.blocks if other is not block)
