"""What decode and prefill have in common: the read door as the call that is timed, with others' kernels beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

import peers
import problems
from kvq_core import QuantKVBackend
from rows import Row, measured
from shapes import Read, Setting
from timing import Call, Timer


def attend(backend: QuantKVBackend, setting: Read, device: torch.device) -> Call:
    """The call that is timed: the door itself."""
    arguments = problems.read(backend, setting, device)
    return lambda: backend.unified_attention(**arguments)


def unmeasured(op: str, backend: QuantKVBackend, setting: Read) -> Row:
    """What is known of a line before it is measured."""
    return Row(op, backend.mode, setting.name, bytes=setting.bytes(backend), flops=setting.flops)


def run(
    op: str,
    backends: Sequence[QuantKVBackend],
    settings: Sequence[Setting],
    timer: Timer,
    *,
    with_peers: bool = True,
    backwards: bool = False,
) -> Iterator[Row]:
    """A row for each mode in each setting, after those of others' kernels; ``backwards``: the other way round within a setting."""
    for setting in settings:
        assert isinstance(setting, Read)
        others = peers.beside(op, setting) if with_peers else []
        lines = [(peer.unmeasured(setting), partial(peer.call, setting, timer.device), True) for peer in others]
        lines += [(unmeasured(op, backend, setting), partial(attend, backend, setting, timer.device), False) for backend in backends]
        for row, build, is_peer in reversed(lines) if backwards else lines:
            yield measured(timer, row, build, allow_eager=is_peer)
