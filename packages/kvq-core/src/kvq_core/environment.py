"""What kvq runs on here, and which path each mode takes on it: the facts that a report opens with and ``kvq doctor`` prints."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq_core import variables
from kvq_core.contract import checked_kernels
from kvq_core.errors import ArgumentError, told

if TYPE_CHECKING:
    import torch

    from kvq_core.backend import QuantKVBackend


def installed(distribution: str) -> str | None:
    """The version of an installed distribution, from its metadata; ``None`` if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def check_interpreter() -> None:
    """Raise :class:`ArgumentError` where the interpreter of the installed Triton fails in every kernel: 3.6's, with numpy 2.4 and later."""
    named = {name: installed(name) or "" for name in ("triton", "numpy")}
    found = {name: re.match(r"(\d+)\.(\d+)", text) for name, text in named.items()}
    triton, numpy = (tuple(map(int, match.groups())) if match else None for match in found.values())
    if triton and numpy and triton < (3, 7) and numpy >= (2, 4):
        need = f"numpy < 2.4, or Triton 3.7 or later: the interpreter of Triton {named['triton']} takes no later numpy"
        raise ArgumentError("TRITON_INTERPRET", f"Triton {named['triton']} and numpy {named['numpy']}", need)


def cpu_name() -> str:
    """The processor's name, as well as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] != "unknown" else platform.processor() or platform.machine()


def first_line(*command: str) -> str | None:
    """The first line of what a command prints; ``None`` if it cannot be run, fails, or prints nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.strip().splitlines()), None)


def source_version(root: Path) -> str:
    """The commit of the repository whose top is ``root``. Otherwise kvq's version: a package may lie in somebody else's repository."""
    from kvq_core import __version__

    git = ("git", "-C", str(root))
    top = first_line(*git, "rev-parse", "--show-toplevel")
    own = top is not None and Path(top).resolve() == root.resolve()
    return (first_line(*git, "describe", "--always", "--dirty") if own else None) or f"kvq {__version__}"


def process_peak_bytes() -> int | None:
    """The most memory this process has had resident; ``None`` where the system does not tell."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def nvidia_driver() -> str | None:
    """The NVIDIA driver's version; ``None`` without one."""
    return first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


@dataclass(frozen=True)
class GPU:
    """A device that torch can use."""

    name: str
    capability: str
    memory: int
    """bytes"""


def cuda_tool(name: str) -> str | None:
    """The path of a command of NVIDIA's toolkit that can be run: from PATH, CUDA_HOME, CUDA_PATH or /usr/local/cuda."""
    homes = [Path(home) for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda") if home]
    places = [home / folder / name for home in homes for folder in ("bin", name)]
    found = (str(place) for place in places if place.is_file() and os.access(place, os.X_OK))
    return shutil.which(name) or next(found, None)


def architecture(properties: Any) -> str:
    """``sm_90`` or ``gfx942`` of a device's properties, as torch gives them."""
    name: str = getattr(properties, "gcnArchName", "")
    return name.partition(":")[0] if name.startswith("gfx") else f"sm_{properties.major}{properties.minor}"


def gpus() -> tuple[GPU, ...]:
    """What torch sees, in its order."""
    import torch

    if not torch.cuda.is_available():
        return ()
    every = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return tuple(GPU(p.name, p.gcnArchName if torch.version.hip else f"sm_{p.major}{p.minor}", p.total_memory) for p in every)


def why_no_gpu() -> str:
    """Why torch sees no GPU here, as far as can be told."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is a CPU build"
    if nvidia_driver() is None:
        return "no NVIDIA driver answers (nvidia-smi)"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES is {os.environ['CUDA_VISIBLE_DEVICES']!r}"
    return f"torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use driver {nvidia_driver()}"


def default_device() -> torch.device:
    """The first GPU, or the CPU."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Route:
    """How a mode's two doors run on a device, and why."""

    name: str
    why: str


def kernels_of(backend: QuantKVBackend) -> frozenset[str]:
    """Which of ``write`` and ``read`` the mode brings kernels for; the contract's own are plain torch."""
    from kvq_core.backend import QuantKVBackend

    halves = {backend.key_half, backend.value_half}
    if halves != {backend}:
        return frozenset.intersection(*map(kernels_of, halves))
    own = {name for name in ("kernels", "write", "read") if getattr(type(backend), name) is not getattr(QuantKVBackend, name)}
    return frozenset({"write", "read"} if "kernels" in own else own)


def lacks_kernels(backend: QuantKVBackend) -> bool:
    """Whether a ``kernels`` method of its own returns none, as one does that was left without its ``return``. Imports Triton."""
    from kvq_core.backend import QuantKVBackend

    halves = {backend.key_half, backend.value_half}
    return any(checked_kernels(half) is None for half in halves if type(half).kernels is not QuantKVBackend.kernels)


def path_of(backend: QuantKVBackend, device: torch.device) -> Route:
    """The path that ``backend``'s doors take for tensors on ``device``."""
    from kvq_core.call.ops import kernels_run_on

    own = kernels_of(backend)
    if not own:
        return Route("plain torch", "the mode brings no kernels")
    if not kernels_run_on(device):
        return Route("plain torch", "tensors on the CPU; a GPU runs the kernels")
    try:
        lacks = lacks_kernels(backend)
    except Exception as problem:  # the mode's own, or no Triton
        return Route("none", f"kernels() of the mode fails: {told(problem)}")
    if lacks:
        return Route("plain torch", "kernels() of the mode returns None")
    runs = "Triton kernels, interpreted" if device.type == "cpu" else "Triton kernels, compiled"
    why = "TRITON_INTERPRET=1" if variables.interpreting() else f"tensors on {device.type}"
    missing = {"write", "read"} - own
    return Route(runs, why + "".join(f"; its {name} is plain torch" for name in missing))
