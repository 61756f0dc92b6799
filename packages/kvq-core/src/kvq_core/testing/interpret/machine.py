"""What Gluon kernels use beside tensors, on numpy arrays: shared memory, asynchronous copies, barriers, products, warp groups."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import triton.language as tl
from triton.runtime import interpreter

Array = npt.NDArray[Any]


class Layout:
    """Any layout: it is ignored."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.value = self


class MBarrierLayout(Layout):
    """The layout by which :func:`allocate` knows barriers."""


class Shared:
    """Shared memory: an array or a view of one."""

    def __init__(self, dtype: Any, array: Array) -> None:
        self.dtype, self.array = dtype, array

    def index(self, i: Any) -> Shared:
        i = _integer(i)
        assert 0 <= i < self.array.shape[0], f"index {i} of {self.array.shape[0]}"
        return Shared(self.dtype, self.array[i])

    def permute(self, order: Any) -> Shared:
        return Shared(self.dtype, self.array.transpose([int(i) for i in order]))

    def slice(self, start: Any, length: Any, dim: Any = 0) -> Shared:
        part = slice(_integer(start), _integer(start) + _integer(length))
        return Shared(self.dtype, self.array[(slice(None),) * _integer(dim) + (part,)])

    def _reinterpret(self, dtype: Any, shape: Any, layout: Any) -> Shared:
        assert self.array.flags.c_contiguous
        return Shared(dtype, self.array.view(interpreter._get_np_dtype(dtype)).reshape([_integer(size) for size in shape]))

    @property
    def numbers(self) -> Array:
        return _numbers(self.array, self.dtype)

    def load(self, layout: Any = None) -> Any:
        return _tensor(self.array.copy(), self.dtype)

    def store(self, value: Any) -> None:
        assert value.handle.data.shape == self.array.shape and value.dtype == self.dtype, (value.type, self.dtype, self.array.shape)
        self.array[...] = value.handle.data

    def spoil(self) -> None:
        """Fill with NaN, or with the largest integer, whose bits are NaN in bfloat16 and in some codes."""
        self.array[...] = np.nan if self.array.dtype.kind == "f" else np.iinfo(self.array.dtype).max


class Turns:
    """The warp groups of a program, of which one runs at a time. At a barrier it yields to a group that ``chance`` picks."""

    def __init__(self, groups: int, chance: random.Random) -> None:
        self.chance = chance
        self.changed = threading.Condition()
        self.running = list(range(groups))
        self.turn = groups - 1
        self.waiting: set[int] = set()
        """Groups that waited in vain since any group last advanced."""

    def take(self, group: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.turn == group)

    def switch(self, group: int, *, in_vain: bool = False) -> bool:
        """Let others run until it is this group's turn again. False: every group waits in vain."""
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


THREADS = 128
"""Of a warp group."""

_own = threading.local()
"""``group`` and ``turns`` of the current thread."""


class Barrier:
    """An mbarrier: a phase completes once ``count`` arrivals are in."""

    def __init__(self) -> None:
        self.count, self.arrived, self.phases = 0, 0, 0

    def init(self, count: Any) -> None:
        self.count = _integer(count)

    def arrive(self, count: Any = 1) -> None:
        self.arrived += _integer(count)
        assert self.arrived <= self.count, f"{self.arrived} arrive at a barrier of {self.count}"
        if self.arrived == self.count:
            self.arrived, self.phases = 0, self.phases + 1
        _own.turns.switch(_own.group)

    def wait(self, phase: Any) -> None:
        """Return once the phase of this parity is complete."""
        while self.phases % 2 == _integer(phase):
            advances = _own.turns.switch(_own.group, in_vain=True)
            assert advances, f"phase {self.phases} of a barrier does not end: {self.arrived} of {self.count} have arrived"


class Barriers:
    """An array of barriers, or a view of one of them."""

    def __init__(self, shape: list[int]) -> None:
        self.barriers = [Barrier() for _ in range(shape[0])]
        self.one = self.barriers[0]

    def index(self, i: Any) -> Barriers:
        found = Barriers([1])
        found.one = self.barriers[_integer(i)]
        return found


class Copies:
    """Asynchronous copies, in commit groups."""

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

    def arrive(self, barriers: Barriers, increment_count: bool) -> None:
        """``mbarrier_arrive``: of each of a group's threads, once its copies are complete. Other groups run before that."""
        assert not increment_count, "threads are counted where the barrier is made"
        self.commit()
        _own.turns.switch(_own.group)
        self.wait(0)
        barriers.one.arrive(THREADS)

    def wait(self, pending: int) -> None:
        """Complete all but the newest ``pending`` groups."""
        while len(self.groups) > pending:
            for target, value in self.groups.pop(0):
                target.store(value)


def _integer(x: Any) -> int:
    return int(x.handle.data.item()) if isinstance(x, tl.tensor) else int(x)


def _tensor(array: Array, dtype: Any) -> Any:
    return tl.tensor(interpreter.TensorHandle(array, dtype), tl.block_type(dtype, list(array.shape)))


def _numbers(array: Array, dtype: Any) -> Array:
    """16-bit floats as float32. The interpreter keeps bfloat16 as raw bits."""
    if dtype == tl.bfloat16:
        return (array.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    assert array.dtype == np.float16, array.dtype
    return array.astype(np.float32)


def allocate(dtype: Any, shape: Any, layout: Any, value: Any = None) -> Shared | Barriers:
    """``gl.allocate_shared_memory``."""
    if isinstance(layout, MBarrierLayout):
        return Barriers([_integer(size) for size in shape])
    shared = Shared(dtype, np.empty([_integer(size) for size in shape], interpreter._get_np_dtype(dtype)))
    shared.spoil()
    if value is not None:
        shared.store(value)
    return shared


def multiply(a: Any, b: Any, acc: Any, use_acc: bool = True, is_async: bool = False) -> Any:
    """``warpgroup_mma`` and ``mma_v2``: products of 16-bit floats, summed in float64 and rounded to float32 once."""
    left, right = (x.numbers if isinstance(x, Shared) else _numbers(x.handle.data, x.dtype) for x in (a, b))
    assert a.dtype == b.dtype and acc.dtype == tl.float32, (a.dtype, b.dtype, acc.dtype)
    assert left.shape[1] == right.shape[0] and acc.handle.data.shape == (left.shape[0], right.shape[1])
    with np.errstate(invalid="ignore"):
        exact = left.astype(np.float64) @ right.astype(np.float64) + (acc.handle.data if use_acc else 0.0)
    return _tensor(exact.astype(np.float32), tl.float32)


def specialize(chance: random.Random, groups: list[tuple[Callable[..., None], tuple[Any, ...]]], warps: Any, registers: Any) -> None:
    """``gl.warp_specialize``: each group in a thread of its own. The last starts, so data that it does not wait for is missing."""
    turns = Turns(len(groups), chance)
    failures: list[BaseException] = []

    def run(group: int, fn: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        _own.turns, _own.group = turns, group
        turns.take(group)
        try:
            fn(*arguments)
        except BaseException as error:  # groups that wait for this one fail as well
            failures.append(error)
        turns.leave(group)

    threads = [threading.Thread(target=run, args=(number, *group)) for number, group in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def waited(pending: int, deps: tuple[Any, ...]) -> Any:
    """``warpgroup_mma_wait``: products complete at once."""
    return deps[0] if len(deps) == 1 else deps
