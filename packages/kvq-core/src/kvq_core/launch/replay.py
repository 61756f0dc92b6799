"""What a call launches, and how to launch it again.

A replay calls Triton's own launcher with the kernel that Triton chose the first time, and skips the choosing. That is right while all that
Triton chooses by is the same: the facts of the arguments (:mod:`kvq_core.call.replay_cache`), the driver and the knobs. What could not
be told (another Triton, another vendor's specialization, a hook that wants to see each launch) goes the whole way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
import triton
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

from kvq_core.call.memory import Apart
from kvq_core.call.replay_cache import ALIGNMENT
from kvq_core.kernels.cache_keys import settle
from kvq_core.kernels.formats import Constant
from kvq_core.launch import target
from kvq_core.launch.workspace import buffers, kept_buffer, sole_use, workspace, workspace_size

_CHOOSING = threading.RLock()
"""Held while Triton chooses a kernel, compiles, loads and launches it: a thread must not launch what another is still loading (Triton sets
``CompiledKernel._run`` before ``function``), and the interpreter keeps its place in the grid in a global."""

_KNOWN_TRITON = ("3.6.", "3.7.", "3.8.", "3.9.")
"""Versions whose launcher takes what :class:`_Again` gives it, and whose Gluon has what kernels for sm_90 need."""
_OPTIONS = {"enable_fp_fusion": True}
"""Of every kernel: Triton 3.10 is to change the default, of which 3.9 warns."""

Pool = list[Any]
Pick = Callable[[Pool], Any]
_Space = tuple[int, tuple[torch.Tensor, ...]]
"""Size of a workspace, and its parts."""


def triton_is_known() -> bool:
    """Whether kvq repeats launches with this Triton, and compiles the kernels for sm_90. With others every call goes the whole way."""
    return triton.__version__.startswith(_KNOWN_TRITON)


class _UntracedError(Exception):
    """A tensor of a launch lies where neither the call's tensors nor its workspace do (or is nested): a later call's cannot be found."""


@dataclass(frozen=True)
class _Start:
    """One launch as it was: the kernel that Triton compiled, the grid, all the kernel's arguments in order."""

    compiled: CompiledKernel
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    hooks: list[Any]  # those of this kernel alone that Triton calls before each launch (``add_pre_run_hook``)


class LaunchRecord:
    """The launches of one call on ``device``; each is started through it, and its temporary buffers are had from it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._starts: list[_Start | None] = []
        self._spaces: list[_Space] = []

    def workspace(self, row_blocks: int, rows: int, head_size_v: int) -> tuple[torch.Tensor, ...]:
        """As :func:`kvq_core.launch.workspace.workspace`."""
        parts = workspace(self.device, row_blocks, rows, head_size_v)
        self._note(workspace_size(row_blocks, rows, head_size_v), parts)
        return parts

    def buffers(self, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Uninitialized float32 buffers of so many elements, in the memory that other launches of the call have for theirs."""
        size, parts = buffers(self.device, sizes)
        self._note(size, parts)
        return parts

    def _note(self, size: int, parts: tuple[torch.Tensor, ...]) -> None:
        self._spaces.append((size, parts))
        elsewhere = target.current()
        if elsewhere is not None:
            elsewhere.spaces.append(size)

    def start(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        """Launch ``kernel``. ``arguments``: its run-time values, loose or in tuples; ``options``: its constants and Triton's options."""
        elsewhere = target.current()
        options = _OPTIONS | options
        settle(kernel)
        for constant in options.values():
            if isinstance(constant, Constant):
                constant.settle()
        with _CHOOSING:
            compiled = kernel[grid](*arguments, **options) if elsewhere is None else elsewhere.start(kernel, grid, arguments, options)
        if not isinstance(compiled, CompiledKernel):
            self._starts.append(None)  # it was interpreted, or not launched
            return
        x, y, z = (*grid, 1, 1)[:3]
        constants = (options[name] for name in kernel.arg_names[len(arguments) :])
        self._starts.append(_Start(compiled, (x, y, z), (*arguments, *constants), kernel.pre_run_hooks))

    def repeat(self, addresses: list[int], apart: Apart) -> Replay | None:
        """How to launch the same at other addresses than ``addresses``, those of the call's tensors; ``None`` if that is not known.

        ``apart``: whether the call may be made at them.
        Two tensors at one address could not be told apart.
        """
        known = triton_is_known() and driver.active.get_current_target().backend == "cuda"
        # A call's launches use one buffer after each other, but for one that was outgrown between them.
        bases = {parts[0].data_ptr() for _, parts in self._spaces}
        if not known or None in self._starts or len(bases) > 1 or len(set(addresses)) < len(addresses):
            return None
        try:
            starts = [start for start in self._starts if start is not None]
            size = max((size for size, _ in self._spaces), default=0)
            return Replay(self.device, starts, (size, tuple(part for _, parts in self._spaces for part in parts)), addresses, apart)
        except _UntracedError:
            return None


@dataclass(frozen=True)
class _Again:
    """One launch to be made again. ``picks`` gather its arguments from the pool."""

    compiled: CompiledKernel  # held, since Triton 3.8 unloads a kernel that nobody holds
    run: Callable[..., None]
    grid: tuple[int, int, int]
    function: int
    metadata: Any
    picks: tuple[Pick, ...]

    @classmethod
    def of(cls, start: _Start, picks: tuple[Pick, ...]) -> _Again:
        compiled = start.compiled
        return cls(compiled, compiled.run, start.grid, compiled.function, compiled.packed_metadata, picks)


class Replay:
    """The launches of a call, to be made again at other addresses.

    Their arguments are gathered from one *pool*: the addresses of the call's tensors, those of the workspace's parts, the constants.
    """

    def __init__(self, device: torch.device, starts: list[_Start], space: _Space, addresses: list[int], apart: Apart) -> None:
        self._device, self._driver, self._knobs = device, driver.active, _knobs()
        self._apart = apart
        self._size, parts = space
        held = [part.data_ptr() for part in parts if part.numel()]
        self._offsets = [address - held[0] for address in held]
        # Several launches' parts may begin at one address.
        self._places = {address: index for index, address in enumerate([*addresses, *held])}
        self._first_constant = len(addresses) + len(held)
        self._constants: list[Any] = []
        self._hooks = [start.hooks for start in starts]
        self._launches = [_Again.of(start, tuple(map(self._pick, start.arguments))) for start in starts]

    def _pick(self, argument: Any) -> Pick:
        """How to get ``argument`` from the pool."""
        if not isinstance(argument, tuple) or not _holds_tensor(argument):
            return itemgetter(self._index(argument))
        indices = [self._index(leaf) for leaf in argument]
        return itemgetter(*indices) if len(indices) > 1 else lambda pool: (pool[indices[0]],)

    def _index(self, leaf: Any) -> int:
        """Where ``leaf`` is in the pool; a constant is put there."""
        if isinstance(leaf, torch.Tensor):
            index = self._places.get(leaf.data_ptr())
            if index is None:
                raise _UntracedError
            return index
        if _holds_tensor(leaf):
            raise _UntracedError
        self._constants.append(leaf)
        return self._first_constant + len(self._constants) - 1

    def __call__(self, addresses: list[int]) -> bool:
        if (
            driver.active is not self._driver
            or _knobs() != self._knobs
            or any(self._hooks)
            or not _no_hooks()
            or not self._apart(addresses)
        ):
            return False
        stream = self._driver.get_current_stream(self._driver.get_current_device())
        if not self._offsets:
            self._launch(addresses + self._constants, stream)
            return True
        with sole_use(self._device, stream):
            base = kept_buffer(self._device, self._size, stream).data_ptr()
            if base % ALIGNMENT:
                return False
            self._launch(addresses + [base + offset for offset in self._offsets] + self._constants, stream)
        return True

    def _launch(self, pool: Pool, stream: int) -> None:
        for launch in self._launches:
            arguments = [pick(pool) for pick in launch.picks]
            # As JITFunction.run does it, without metadata for hooks and without hooks.
            launch.run(*launch.grid, stream, launch.function, launch.metadata, None, None, None, *arguments)


def _holds_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, tuple) and any(map(_holds_tensor, value)))


def _knobs() -> tuple[object, ...]:
    """The knobs that Triton recompiles a kernel for."""
    compilation = knobs.compilation
    # The last one is new in Triton 3.9.
    return knobs.runtime.debug, compilation.instrumentation_mode, getattr(compilation, "fpsan_homomorphic_casts", False)


def _no_hooks() -> bool:
    """Whether nobody wants to see launches."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    # Triton's chains of hooks may be empty; a user may have put a function or None in their place.
    return not (getattr(enter, "calls", enter) or getattr(leave, "calls", leave) or runtime.add_stages_inspection_hook)
