"""Decode: one or a few query rows a sequence over long contexts. Limited by the bytes of the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import baselines
import problems
from kvq_core import QuantKVBackend, get_backend
from rows import FLASHINFER, Row, measured
from shapes import Read, Setting
from timing import Call, Timer

OP = "decode"


def attend(backend: QuantKVBackend, setting: Read, timer: Timer) -> Call:
    """The call that is timed: the door itself."""
    arguments = problems.read(backend, setting, timer.device)
    return lambda: backend.unified_attention(**arguments)


def row(op: str, backend: QuantKVBackend, setting: Read) -> Row:
    """What is known of a line before it is measured."""
    return Row(op, backend.mode, setting.name, bytes=setting.bytes(backend), flops=setting.flops)


def peer(op: str, setting: Read, timer: Timer, build: Callable[[], Call | None]) -> Row:
    """FlashInfer's line. Its caller has seen that it imports."""

    def needed() -> Call:
        call = build()
        if call is None:
            raise ImportError("flashinfer")
        return call

    known = row(op, get_backend("none"), setting)
    return measured(timer, Row(op, FLASHINFER, setting.name, bytes=known.bytes, flops=known.flops), needed, allow_eager=True)


def run(backends: Sequence[QuantKVBackend], settings: Sequence[Setting], timer: Timer, *, peers: bool = True) -> Iterator[Row]:
    """A row for each mode in each setting, after the baseline's."""
    for setting in settings:
        assert isinstance(setting, Read)
        if peers and baselines.flashinfer() is not None:
            yield peer(OP, setting, timer, partial(baselines.decode, setting, timer.device))
        for backend in backends:
            yield measured(timer, row(OP, backend, setting), partial(attend, backend, setting, timer))
