"""The switch for bytes and results that do not depend on what else is in a batch.

A call takes its value along when it begins (:mod:`kvq_core.call.ops`): plans and kernels read that, never the switch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kvq_core import checks, variables


class _Switch:
    def __init__(self) -> None:
        self.value: bool | None = None


_BATCH_INVARIANT = _Switch()


def is_batch_invariant() -> bool:
    """Whether bytes and results must not depend on what else is in a batch: the switch below, or ``KVQ_BATCH_INVARIANT=1``."""
    if _BATCH_INVARIANT.value is None:
        return variables.flag("KVQ_BATCH_INVARIANT")
    return _BATCH_INVARIANT.value


def set_batch_invariant(on: bool) -> None:
    """Make each sequence's result bit-identical whatever else is in its batch (a fixed split; a few per cent slower)."""
    _BATCH_INVARIANT.value = checks.flag("on", on)


@contextlib.contextmanager
def batch_invariant(on: bool = True) -> Iterator[None]:
    """:func:`set_batch_invariant` for a ``with`` block."""
    before = _BATCH_INVARIANT.value
    set_batch_invariant(on)
    try:
        yield
    finally:
        _BATCH_INVARIANT.value = before
