"""Prefill: thousands of query rows over a context. Limited by the tensor cores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import baselines
from bench_decode import attend, peer, row
from kvq_core import QuantKVBackend
from rows import Row, measured
from shapes import Read, Setting
from timing import Timer

OP = "prefill"


def run(backends: Sequence[QuantKVBackend], settings: Sequence[Setting], timer: Timer, *, peers: bool = True) -> Iterator[Row]:
    """A row for each mode in each setting, after the baseline's."""
    for setting in settings:
        assert isinstance(setting, Read)
        if peers and baselines.flashinfer() is not None:
            yield peer(OP, setting, timer, partial(baselines.prefill, setting, timer.device))
        for backend in backends:
            yield measured(timer, row(OP, backend, setting), partial(attend, backend, setting, timer))
