"""What Gluon's kernels compute with beside tensors, on numpy arrays: shared memory, copies, barriers. The rest: gluon_interpreted.py."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


class Layout:
    """Any layout."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.value = self


class MBarrierLayout(Layout):
    """Of what is no array, but barriers."""


class Shared:
    """Shared memory: an array, or a view of one."""

    def __init__(self, dtype: Any, array: np.ndarray) -> None:
        self.dtype, self.array = dtype, array

    def index(self, i: Any) -> Shared:
        i = _integer(i)
        assert 0 <= i < self.array.shape[0], f"place {i} of {self.array.shape[0]}"
        return Shared(self.dtype, self.array[i])

    def permute(self, order: Any) -> Shared:
        return Shared(self.dtype, self.array.transpose([int(i) for i in order]))

    def slice(self, start: Any, length: Any) -> Shared:
        return Shared(self.dtype, self.array[_integer(start) : _integer(start) + _integer(length)])

    def _reinterpret(self, dtype: Any, shape: Any, layout: Any) -> Shared:
        assert self.array.flags.c_contiguous
        return Shared(dtype, self.array.view(interpreter._get_np_dtype(dtype)).reshape([_integer(size) for size in shape]))

    @property
    def numbers(self) -> np.ndarray:
        return _numbers(self.array, self.dtype)

    def load(self, layout: Any = None) -> Any:
        return _tensor(self.array.copy(), self.dtype)

    def store(self, value: Any) -> None:
        assert value.handle.data.shape == self.array.shape and value.dtype == self.dtype, (value.type, self.dtype, self.array.shape)
        self.array[...] = value.handle.data

    def spoil(self) -> None:
        """NaN in floats, the largest number in others, which as a code or a bfloat16 is often NaN."""
        self.array[...] = np.nan if self.array.dtype.kind == "f" else np.iinfo(self.array.dtype).max


class Turns:
    """Of a program's groups one runs at a time. It hands on at barriers, to whichever ``chance`` says."""

    def __init__(self, groups: int, chance: random.Random) -> None:
        self.chance = chance
        self.changed = threading.Condition()
        self.running = list(range(groups))
        self.turn = groups - 1
        self.waiting: set[int] = set()
        """Those that have waited in vain since a group last got on."""

    def take(self, group: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.turn == group)

    def hand_on(self, group: int, *, in_vain: bool = False) -> bool:
        """Until it is this group's turn again; False: nobody gets on any more."""
        self.waiting = self.waiting | {group} if in_vain else set()
        if self.waiting >= set(self.running):
            return False
        self._choose()
        self.take(group)
        return True

    def leave(self, group: int) -> None:
        self.running.remove(group)
        self.waiting = set()
        if self.running:
            self._choose()

    def _choose(self) -> None:
        with self.changed:
            self.turn = self.chance.choice(self.running)
            self.changed.notify_all()


_own = threading.local()
"""A thread's group, and the turns it takes."""


class Barrier:
    """Of a program's groups: its phase is over once ``count`` have arrived."""

    def __init__(self) -> None:
        self.count, self.arrived, self.phases = 0, 0, 0

    def init(self, count: Any) -> None:
        self.count = _integer(count)

    def arrive(self, count: Any = 1) -> None:
        self.arrived += _integer(count)
        assert self.arrived <= self.count, f"{self.arrived} arrive at a barrier of {self.count}"
        if self.arrived == self.count:
            self.arrived, self.phases = 0, self.phases + 1
        _own.turns.hand_on(_own.group)

    def wait(self, phase: Any) -> None:
        """Until the phase of this parity is over."""
        while self.phases % 2 == _integer(phase):
            goes_on = _own.turns.hand_on(_own.group, in_vain=True)
            assert goes_on, f"phase {self.phases} of a barrier does not end: {self.arrived} of {self.count} have arrived"


class Barriers:
    """Some of them, or one."""

    def __init__(self, shape: list[int]) -> None:
        self.barriers = [Barrier() for _ in range(shape[0])]
        self.one = self.barriers[0]

    def index(self, i: Any) -> Barriers:
        found = Barriers([1])
        found.one = self.barriers[_integer(i)]
        return found


class Copies:
    """Asynchronous copies, in groups as they were begun."""

    def __init__(self) -> None:
        self.groups: list[list[tuple[Shared, Any]]] = []
        self.open: list[tuple[Shared, Any]] = []

    def begin(self, target: Shared, source: Any, mask: Any = None) -> None:
        value = tl.load(source) if mask is None else tl.load(source, mask=tl.broadcast_to(mask, source.shape), other=0)
        target.spoil()
        self.open.append((target, value))

    def commit(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def wait(self, left: int) -> None:
        while len(self.groups) > left:
            for target, value in self.groups.pop(0):
                target.store(value)


def _integer(x: Any) -> int:
    return int(x.handle.data.item()) if isinstance(x, tl.tensor) else int(x)


def _tensor(array: np.ndarray, dtype: Any) -> Any:
    return tl.tensor(interpreter.TensorHandle(array, dtype), tl.block_type(dtype, list(array.shape)))


def _numbers(array: np.ndarray, dtype: Any) -> np.ndarray:
    """Of 16 bits, as float32. The interpreter has bfloat16 as bare bits."""
    if dtype == tl.bfloat16:
        return (array.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    assert array.dtype == np.float16, array.dtype
    return array.astype(np.float32)


def allocate(dtype: Any, shape: Any, layout: Any, value: Any = None) -> Any:
    if isinstance(layout, MBarrierLayout):
        return Barriers([_integer(size) for size in shape])
    shared = Shared(dtype, np.empty([_integer(size) for size in shape], interpreter._get_np_dtype(dtype)))
    shared.spoil()
    if value is not None:
        shared.store(value)
    return shared


def multiply(a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False) -> Any:
    left, right = (x.numbers if isinstance(x, Shared) else _numbers(x.handle.data, x.dtype) for x in (a, b))
    assert a.dtype == b.dtype and acc.dtype == tl.float32, (a.dtype, b.dtype, acc.dtype)
    assert left.shape[1] == right.shape[0] and acc.handle.data.shape == (left.shape[0], right.shape[1])
    with np.errstate(invalid="ignore"):
        exact = left.astype(np.float64) @ right.astype(np.float64) + (acc.handle.data if use_acc else 0.0)
    return _tensor(exact.astype(np.float32), tl.float32)


def specialize(chance: random.Random, groups: list[tuple[Callable[..., None], tuple[Any, ...]]], warps: Any, registers: Any) -> None:
    """Each group in a thread. The last begins: what it does not wait for is not there."""
    turns = Turns(len(groups), chance)
    failures: list[BaseException] = []

    def run(group: int, fn: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        _own.turns, _own.group = turns, group
        turns.take(group)
        try:
            fn(*arguments)
        except BaseException as error:  # one that others now wait for: they will fail as well
            failures.append(error)
        turns.leave(group)

    threads = [threading.Thread(target=run, args=(number, *group)) for number, group in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def waited(left: int, deps: tuple[Any, ...]) -> Any:
    """Products are done at once."""
    return deps[0] if len(deps) == 1 else deps
