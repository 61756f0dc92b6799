"""Write: new K and V rows into the pages. Limited by launch at decode sizes, by bytes at prefill sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import baselines
import problems
from kvq_core import QuantKVBackend, get_backend
from rows import COPY, Row, measured
from shapes import Setting, Write
from timing import Call, Timer

OP = "write"


def store(backend: QuantKVBackend, setting: Write, timer: Timer) -> Call:
    """The call that is timed: the door itself."""
    return problems.write_call(backend, setting, timer.device)


def run(backends: Sequence[QuantKVBackend], settings: Sequence[Setting], timer: Timer, *, peers: bool = True) -> Iterator[Row]:
    """A row for each mode in each setting, after the plain copy's."""
    for setting in settings:
        assert isinstance(setting, Write)
        if peers:
            known = Row(OP, COPY, setting.name, bytes=setting.bytes(get_backend("none")))
            yield measured(timer, known, partial(baselines.copy, setting, timer.device))
        for backend in backends:
            known = Row(OP, backend.mode, setting.name, bytes=setting.bytes(backend))
            yield measured(timer, known, partial(store, backend, setting, timer))
