"""The doors without a GPU: what they would launch is compiled for one, or only planned.

Tensors may lie anywhere, on the meta device too: nothing looks at values. Within the blocks below the whole process is on that other GPU:
they are for processes of their own (the compile matrix, ``kvq tune``'s compilers), or for a moment (plans).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kvq_core import debug, ops, schedule
from kvq_core.workspace import workspace, workspace_size

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend
    from kvq_core.launch import DeviceFacts


@dataclass(frozen=True)
class Device:
    """A GPU to be on: Triton's target, and what plans depend on. ``overlaps``: whether a merge may be put in place early."""

    backend: str
    target: int | str
    warp_size: int
    num_sms: int
    arch: str
    overlaps: bool = False

    @classmethod
    def current(cls) -> Device:
        """The GPU of this process that torch uses."""
        from triton.runtime import driver

        from kvq_core import launch

        here = torch.device("cuda", torch.cuda.current_device())
        target, facts = driver.active.get_current_target(), launch._device_facts(here)
        return cls(target.backend, target.arch, target.warp_size, facts.num_sms, facts.arch, launch._overlaps(here))

    @property
    def facts(self) -> DeviceFacts:
        from kvq_core.launch import DeviceFacts

        return DeviceFacts(self.num_sms, self.backend == "cuda", self.arch)


class Driver:
    """All of a Triton driver that compiling needs."""

    def __init__(self, device: Device) -> None:
        from triton.backends.compiler import GPUTarget

        self.name = device.arch
        self.target = GPUTarget(device.backend, device.target, device.warp_size)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> object:
        # Kernels keep what they compiled per device: each target is one.
        return self.name

    def get_current_stream(self, device: object) -> int:
        return 0


@contextlib.contextmanager
def compiling_for(device: Device, alone: int | None = None) -> Iterator[list[Any]]:
    """Within the block, a door compiles the kernels that it would launch on ``device``, as that GPU's driver would, and runs nothing.

    ``alone``: compile no other than this one of the block's launches, which are numbered from 0.

    Yields the list that Triton's compiled kernels are added to. They are in Triton's cache on disk, too.

    Raises:
        RuntimeError: ``TRITON_INTERPRET=1`` is set (what the interpreter decorated cannot be compiled), or ``KVQ_DEBUG=1``.
    """
    from triton import knobs
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET=1 is set: compile in a process of its own")
    built: list[Any] = []
    numbers = itertools.count()
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if alone not in (None, next(numbers)):
            return None
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        built.append(kernel)
        return kernel

    with _on(device), replaced(driver, "_active", Driver(device)), replaced(JITFunction, "run", compile_only):
        yield built


@contextlib.contextmanager
def loading_for(device: Device) -> Iterator[None]:
    """Within the block, a door compiles the kernels that it would launch on ``device``, this process's own GPU, or finds them in Triton's
    cache on disk, and runs nothing: this process has them from then on."""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def load_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    with _on(device), replaced(JITFunction, "run", load_only):
        yield


@dataclass
class Planned:
    """What doors would have done: kernels with their arguments and options, and elements of the workspaces they asked for."""

    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    spaces: list[int] = field(default_factory=list)


@contextlib.contextmanager
def planning_for(device: Device) -> Iterator[Planned]:
    """Within the block, a door plans what it would launch on ``device``, and that is all. Yields what was planned."""
    from kvq_core import launched
    from kvq_core.launched import Launched

    planned = Planned()

    def start(self: Launched, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        planned.launches.append((kernel, arguments, options))

    def counted(place: torch.device, row_blocks: int, rows: int, head_size_v: int) -> tuple[torch.Tensor, ...]:
        planned.spaces.append(workspace_size(row_blocks, rows, head_size_v))
        return workspace(place, row_blocks, rows, head_size_v)

    with _on(device), replaced(Launched, "start", start), replaced(launched, "workspace", counted):
        yield planned


@contextlib.contextmanager
def _on(device: Device) -> Iterator[None]:
    """Have the doors go straight to their kernels, whatever tensors come, as they are on ``device``."""
    from kvq_core import launch

    if debug.enabled():
        raise RuntimeError("KVQ_DEBUG=1 looks at values, and there are none")
    bodies: dict[str, Any] = {"write": ops._write, "read": ops._read}

    def straight(backend: QuantKVBackend, verb: str) -> Any:
        return partial(bodies[verb], backend, schedule.is_batch_invariant())

    facts = device.facts
    with (
        replaced(ops, "_op", straight),
        replaced(ops, "kernels_run_on", lambda device: True),
        replaced(launch, "_device_facts", lambda device: facts),
        replaced(launch, "_overlaps", lambda tensors: device.overlaps),
        replaced(launch, "interpreting", lambda: False),
    ):
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Within the block, ``owner`` has ``value`` under that name."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
