"""The modes that a command is asked for, or all that are installed."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvq_core import QuantKVBackend
from kvq_core.cli.modes import backends_of as loaded


def backends_of(names: Sequence[str] | None, *always: str) -> list[QuantKVBackend]:
    """The backends of ``always`` and of ``names``, some of which may hold several, with commas; without names every installed one.

    Of the latter, those that do not load are left out, with a line on stderr that says why.

    Raises:
        KVQError: a mode asked for is not installed, or cannot be used.
    """
    given = [name for part in names or () for name in part.split(",") if name]
    found, broken = loaded((*always, *given) if given else ())
    for fault in broken:
        print(f"broken, left out: {fault}", file=sys.stderr)
    return found
