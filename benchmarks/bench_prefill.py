"""Prefill: thousands of query rows over a context. Limited by the tensor cores, whose clock follows what they did before.

So all rows of a setting are timed once there and once back, and have the mean: no kernel is always the first on a cool GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import attention
from kvq_core import QuantKVBackend
from rows import Row
from shapes import Setting
from timing import Timer


def run(backends: Sequence[QuantKVBackend], settings: Sequence[Setting], timer: Timer, *, with_peers: bool = True) -> Iterator[Row]:
    """As :func:`attention.run`, each row of two measurements."""
    for setting in settings:
        there, back = (
            list(attention.run("prefill", backends, (setting,), timer, with_peers=with_peers, backwards=backwards))
            for backwards in (False, True)
        )
        yield from map(between, there, reversed(back))


def between(one: Row, other: Row) -> Row:
    """The mean of two measurements of a row; an error where either ended in one."""
    if one.us is None or one.host_us is None:
        return one
    if other.us is None or other.host_us is None:
        return other
    return replace(one, us=(one.us + other.us) / 2, host_us=(one.host_us + other.host_us) / 2, repeats=one.repeats + other.repeats)
