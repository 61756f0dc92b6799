"""What decode and prefill have in common: the read door as the call that is timed, with FlashInfer's bf16 kernel beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

import baselines
import problems
from kvq_core import QuantKVBackend, get_backend
from rows import FLASHINFER, Row, measured
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
    peer: Callable[[Read, torch.device], Call],
    backends: Sequence[QuantKVBackend],
    settings: Sequence[Setting],
    timer: Timer,
    *,
    peers: bool = True,
) -> Iterator[Row]:
    """A row for each mode in each setting, after that of FlashInfer's ``peer``."""
    for setting in settings:
        assert isinstance(setting, Read)
        if peers and baselines.flashinfer_serves(setting):
            known = replace(unmeasured(op, get_backend("none"), setting), mode=FLASHINFER)
            yield measured(timer, known, partial(peer, setting, timer.device), allow_eager=True)
        for backend in backends:
            yield measured(timer, unmeasured(op, backend, setting), partial(attend, backend, setting, timer.device))
