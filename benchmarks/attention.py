"""What decode and prefill have in common: the read door as the call that is timed, with others' bf16 kernels beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

import baselines
import flash_attention
import problems
from kvq_core import QuantKVBackend, get_backend
from rows import FLASHATTENTION, FLASHINFER, Row, measured
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
    """A row for each mode in each setting, after those of FlashAttention 3 and of FlashInfer's ``peer``."""
    for setting in settings:
        assert isinstance(setting, Read)
        unquantized = unmeasured(op, get_backend("none"), setting)
        if peers and flash_attention.serves(setting):
            known = replace(unquantized, mode=FLASHATTENTION)
            yield measured(timer, known, partial(flash_attention.attend, setting, timer.device), allow_eager=True)
        if peers and baselines.flashinfer_serves(setting):
            yield measured(timer, replace(unquantized, mode=FLASHINFER), partial(peer, setting, timer.device), allow_eager=True)
        for backend in backends:
            yield measured(timer, unmeasured(op, backend, setting), partial(attend, backend, setting, timer.device))
