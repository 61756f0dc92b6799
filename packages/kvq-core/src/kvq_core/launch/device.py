"""Facts about a GPU that launch plans and compiled kernels depend on."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from kvq_core import variables
from kvq_core.environment import architecture
from kvq_core.launch import target


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, where inline assembly does not exist and bfloat16 products are wrong."""
    return target.current() is None and variables.interpreting()


class DeviceFacts(NamedTuple):
    """Multiprocessors, whether inline PTX assembles, and the architecture as tables of plans name it."""

    num_sms: int
    use_asm: bool
    arch: str

    @property
    def fp8_hardware(self) -> bool:
        """Whether PTX has a conversion to e4m3 (sm_89 and later)."""
        return self.use_asm and int(self.arch.removeprefix("sm_")) >= 89


def device_facts(device: torch.device) -> DeviceFacts:
    """The facts of ``device``, or of the target that takes this thread's launches (:mod:`kvq_core.launch.target`)."""
    elsewhere = target.current()
    return installed_facts(device) if elsewhere is None else elsewhere.facts


@functools.lru_cache(maxsize=64)
def installed_facts(device: torch.device) -> DeviceFacts:
    """The facts of ``device`` itself; a small stand-in for anything that is no GPU."""
    if device.type != "cuda":
        return DeviceFacts(4, False, "")
    properties = torch.cuda.get_device_properties(device)
    return DeviceFacts(properties.multi_processor_count, torch.version.hip is None, architecture(properties))


def overlaps(device: torch.device) -> bool:
    """Whether a launch may start before the one it depends on has ended, and wait for it on the device (sm_90 and later)."""
    elsewhere = target.current()
    return _overlaps_on(device) if elsewhere is None else elsewhere.overlaps


@functools.lru_cache(maxsize=64)
def _overlaps_on(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
