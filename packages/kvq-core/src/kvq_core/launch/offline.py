"""The doors without a GPU: what they would launch is compiled for one, or only planned.

Tensors may lie on any device, the meta device too: nothing looks at values. The blocks below redirect the launches of their thread.
``compiling_for`` also replaces Triton's driver for the whole process, so it is for processes of their own (the compile matrix, the
compilers of ``kvq tune`` and of the warm-up).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from kvq_core.call import debug
from kvq_core.launch.device import DeviceFacts, device_facts, overlaps
from kvq_core.launch.target import Target, launching_to


@dataclass(frozen=True)
class Device:
    """A GPU to be on: Triton's target, and what plans depend on. ``overlaps``: whether the combine kernel may be launched early."""

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

        here = torch.device("cuda", torch.cuda.current_device())
        target, facts = driver.active.get_current_target(), device_facts(here)
        return cls(target.backend, target.arch, target.warp_size, facts.num_sms, facts.arch, overlaps(here))

    @property
    def facts(self) -> DeviceFacts:
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

    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET=1 is set: compile in a process of its own")
    built: list[Any] = []
    numbers = itertools.count()

    def compile_only(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        if alone in (None, next(numbers)):
            built.append(kernel.warmup(*arguments, grid=grid, **options))

    with _on(device, compile_only), replaced(driver, "_active", Driver(device)):
        yield built


@contextlib.contextmanager
def loading_for(device: Device) -> Iterator[None]:
    """Within the block, a door compiles the kernels that it would launch on ``device``, this process's own GPU, or finds them in Triton's
    cache on disk, and runs nothing: this process has them from then on."""

    def load_only(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        kernel.warmup(*arguments, grid=grid, **options)

    with _on(device, load_only):
        yield


@dataclass
class Planned:
    """What doors would have done: kernels with their arguments and options, and elements of the workspaces they asked for."""

    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    spaces: list[int] = field(default_factory=list)


@contextlib.contextmanager
def planning_for(device: Device) -> Iterator[Planned]:
    """Within the block, a door plans what it would launch on ``device``, and that is all. Yields what was planned."""
    planned = Planned()

    def note(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        planned.launches.append((kernel, arguments, options))

    with _on(device, note, planned.spaces):
        yield planned


@contextlib.contextmanager
def _on(device: Device, start: Callable[..., None], spaces: list[int] | None = None) -> Iterator[None]:
    """Have ``start`` take what the doors would launch on ``device``, whatever tensors come."""
    if debug.enabled():
        raise RuntimeError("KVQ_DEBUG=1 looks at values, and there are none")
    with launching_to(Target(device.facts, device.overlaps, start, [] if spaces is None else spaces)):
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
