"""A call like an earlier one repeats its launches.

All that happens between a door and the device (validation, the launch plan, argument bundles, Triton's choice of a compiled kernel)
depends on the *facts* of the arguments alone: the numbers, and each tensor's shape, strides, dtype, device and alignment, and its negative
bit, which torch resolves before an op gets the tensor. Where a tensor lies changes nothing. The calls of a model's layers differ in just
that, and so do those of its steps, mostly. The first call with some facts goes the whole way and notes what it launched
(:mod:`kvq_core.launch.replay`); later ones launch that again, at their own addresses.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import torch

MOST_KNOWN = 1024
"""Calls remembered for each op; at some 10 KB each."""
ALIGNMENT = 16
"""Bytes. An address that is a multiple of them is good for every access."""

Facts = tuple[object, ...]


class Repeat(Protocol):
    """The launches of a call, to be made again."""

    def __call__(self, addresses: list[int]) -> bool:
        """Launch at ``addresses``, those of the call's tensors in order; False if that cannot be now, and nothing was launched."""
        ...


def facts_of(arguments: Sequence[object]) -> tuple[Facts, list[int]]:
    """(everything about ``arguments`` but where their tensors lie, where they lie).

    Equal facts mean equal arguments up to addresses: a tensor's part starts with its ``torch.Size``, which no other argument is.
    """
    facts: list[object] = []
    addresses = []
    for x in arguments:
        # Most options are None; isinstance() takes longer for them than for a tensor.
        if x is not None and isinstance(x, torch.Tensor):
            address = x.data_ptr()
            addresses.append(address)
            facts += (x.shape, x.stride(), x.dtype, x.device, x.is_neg(), address % ALIGNMENT)
        else:
            facts.append(x)  # a number or None
    return tuple(facts), addresses


class ReplayCache:
    """The calls of one op that can be repeated, by their facts. The oldest is dropped when there are too many.

    The last call found is compared first: most are like it, and comparing facts takes a quarter of the time that their hash takes.
    """

    def __init__(self, most: int = MOST_KNOWN) -> None:
        # Reentrant: a thread that was interrupted while it held the lock can take it again.
        self._lock = threading.RLock()
        self._most = most
        self._known: dict[Facts, Repeat] = {}
        self._latest: tuple[Facts, Repeat | None] = ((), None)

    def get(self, facts: Facts) -> Repeat | None:
        # One attribute holds both: other threads put theirs there at any time.
        latest = self._latest
        if facts == latest[0]:
            return latest[1]
        found = self._known.get(facts)
        if found is not None:
            self._latest = facts, found
        return found

    def keep(self, facts: Facts, repeat: Repeat) -> None:
        with self._lock:
            self._known.pop(facts, None)
            while len(self._known) >= self._most:
                del self._known[next(iter(self._known))]
            self._known[facts] = repeat
            self._latest = facts, repeat
