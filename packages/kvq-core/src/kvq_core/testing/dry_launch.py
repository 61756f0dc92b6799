"""Launch without a GPU: Triton chooses kernels as for one, and what it would launch is noted instead.

All that the host does for a call runs, from the doors to the call of Triton's launcher, on CPU tensors that stand for a GPU's. Only the
compiler and the launcher are replaced. What the host does is tested and timed with it (``benchmarks/bench_host.py``). As for
:mod:`kvq_core.testing.compile_matrix`, ``TRITON_INTERPRET`` must not be set: use a process of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvq_core.call import debug, ops
from kvq_core.launch import device as hardware
from kvq_core.launch.offline import Device, Driver
from kvq_core.testing.compile_matrix import TARGETS


@dataclass(frozen=True)
class Started:
    """One launch: the kernel's name, what Triton specialized it on, the grid, and the run-time values, pointers as addresses."""

    kernel: str
    specialized: str
    grid: tuple[int, int, int]
    stream: int
    values: tuple[Any, ...]


class DryDriver(Driver):
    """A driver whose launches go to :attr:`started`, if that is a list."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.stream = 0
        self.started: list[Started] | None = None

    def get_current_device(self) -> object:
        # Kernels keep what was chosen per device: each driver is one.
        return self

    def get_current_stream(self, device: object) -> int:
        return self.stream


class _Launcher:
    """In the place of Triton's, and called as it is."""

    def __init__(self, driver: DryDriver, name: str, key: str, signature: dict[str, Any]) -> None:
        self._driver, self._name, self._key = driver, name, key
        self._constant = [kind == "constexpr" for kind in signature.values()]

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: int, packed: Any, metadata: Any, enter: Any, leave: Any, *args: Any
    ) -> None:
        if enter is not None:
            enter(metadata)
        if self._driver.started is not None:
            values = [arg for arg, constant in zip(args, self._constant, strict=True) if not constant]
            self._driver.started.append(Started(self._name, self._key, (x, y, z), stream, tuple(_leaves(values))))
        if leave is not None:
            leave(metadata)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value.data_ptr() if isinstance(value, torch.Tensor) else value


@contextlib.contextmanager
def launching_for(name: str) -> Iterator[DryDriver]:
    """Within the block, the doors launch kernels for CPU tensors as they would on a GPU of target ``name``, and nothing runs."""
    from triton import knobs
    from triton.compiler import CompiledKernel
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET=1 is set: launch in a process of its own")
    device = TARGETS[name].device(name)
    dry = DryDriver(device)
    do_compile = JITFunction._do_compile

    def choose(self: Any, key: str, signature: dict[str, Any], *rest: object) -> Any:
        """All that Triton does for a kernel that it does not know, hooks included, but for the compiler."""
        kernel: Any = CompiledKernel.__new__(CompiledKernel)
        kernel.name, kernel.src, kernel.module, kernel.function, kernel.packed_metadata = self.__name__, None, 0, 0, ()
        kernel._run = _Launcher(dry, self.__name__, key, signature)
        compiler, self.compile = self.compile, lambda source, **options: kernel
        try:
            return do_compile(self, key, signature, *rest)
        finally:
            self.compile = compiler

    with contextlib.ExitStack() as stack:

        def replace(owner: Any, attribute: str, value: object) -> None:
            stack.callback(setattr, owner, attribute, getattr(owner, attribute))
            setattr(owner, attribute, value)

        replace(driver, "_active", dry)
        replace(JITFunction, "_do_compile", choose)
        replace(ops, "kernels_run_on", lambda device: True)
        replace(ops, "replays_on", lambda device: not debug.enabled())
        replace(hardware, "installed_facts", lambda tensors: device.facts)
        yield dry
