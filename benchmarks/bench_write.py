"""Write: new K and V rows into the pages. Limited by launch at decode sizes, by bytes at prefill sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import baselines
import problems
from kvq_core import QuantKVBackend, get_backend
from rows import COPY, FLASHINFER, Row, measured
from shapes import Setting, Write
from timing import Call, Timer

OP = "write"


def store(backend: QuantKVBackend, setting: Write, timer: Timer) -> Call:
    """The call that is timed: the door itself."""
    return problems.write_call(backend, setting, timer.device)


def run(backends: Sequence[QuantKVBackend], settings: Sequence[Setting], timer: Timer, *, peers: bool = True) -> Iterator[Row]:
    """A row for each mode in each setting, after FlashInfer's and the plain copy's."""
    for setting in settings:
        assert isinstance(setting, Write)
        unquantized = Row(OP, COPY, setting.name, bytes=setting.bytes(get_backend("none")))
        if peers and baselines.flashinfer_serves(setting):
            known = replace(unquantized, mode=FLASHINFER)
            yield measured(timer, known, partial(baselines.append, setting, timer.device))
        if peers:
            yield measured(timer, unquantized, partial(baselines.copy, setting, timer.device))
        for backend in backends:
            known = Row(OP, backend.mode, setting.name, bytes=setting.bytes(backend))
            yield measured(timer, known, partial(store, backend, setting, timer))
