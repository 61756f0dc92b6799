"""Write: new K and V rows into the pages. Limited by launch at decode sizes, by bytes at prefill sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import peers
import problems
from kvq_core import QuantKVBackend
from rows import Row, measured
from shapes import Setting, Write
from timing import Call, Timer

OP = "write"


def store(backend: QuantKVBackend, setting: Write, timer: Timer) -> Call:
    """The call that is timed: the door itself."""
    return problems.write_call(backend, setting, timer.device)


def run(backends: Sequence[QuantKVBackend], settings: Sequence[Setting], timer: Timer, *, with_peers: bool = True) -> Iterator[Row]:
    """A row for each mode in each setting, after FlashInfer's and the plain copy's."""
    for setting in settings:
        assert isinstance(setting, Write)
        for peer in peers.beside(OP, setting) if with_peers else ():
            yield measured(timer, peer.unmeasured(setting), partial(peer.call, setting, timer.device), allow_eager=True)
        for backend in backends:
            known = Row(OP, backend.mode, setting.name, bytes=setting.bytes(backend))
            yield measured(timer, known, partial(store, backend, setting, timer))
