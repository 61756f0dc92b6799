"""Build a mode's kernels for every GPU there is no GPU of here: ``python -m kvq_core.testing.compile_matrix MODE ... [--target NAME ...]``.

Triton compiles for a target that a driver names. :func:`compiling_for` puts a driver in place that names one and has no device, and
turns every launch into a compilation, so that a mode's own launchers, plans and argument bundles are what is exercised. Run it in a
process without ``TRITON_INTERPRET``: what the interpreter decorated cannot be compiled.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from kvq_core import debug, ops
from kvq_core.registry import get_backend
from kvq_core.testing import scene
from kvq_core.testing.cases import Case

KIB = 1024


@dataclass(frozen=True)
class Target:
    """A GPU to build for, and the shared memory (bytes) that one program may have on it."""

    backend: str
    arch: int | str
    warp_size: int
    shared_limit: int
    num_sms: int


TARGETS = MappingProxyType(
    {
        "sm_80": Target("cuda", 80, 32, 163 * KIB, 108),
        "sm_86": Target("cuda", 86, 32, 99 * KIB, 84),
        "sm_89": Target("cuda", 89, 32, 99 * KIB, 128),
        "sm_90": Target("cuda", 90, 32, 227 * KIB, 132),
        "sm_100": Target("cuda", 100, 32, 227 * KIB, 148),
        "sm_120": Target("cuda", 120, 32, 99 * KIB, 170),
        "gfx942": Target("hip", "gfx942", 64, 64 * KIB, 304),
        "gfx950": Target("hip", "gfx950", 64, 160 * KIB, 256),
    }
)

_DECODE: dict[str, Any] = {"query_lens": (1,) * 4, "seq_lens": (2048,) * 4}
CASES = MappingProxyType(
    {
        "decode": Case(**_DECODE, head_size=128, queries_per_kv=4, dtype=torch.bfloat16),
        "prefill": Case(
            query_lens=(64,),
            seq_lens=(300,),
            head_size=64,
            queries_per_kv=4,
            dtype=torch.bfloat16,
            window=100,
            softcap=30.0,
            sinks=True,
            alibi=True,
            qq_bias=8,
            mm_prefix=(((3, 20),),),
            output=torch.float8_e4m3fn,
        ),
    }
)
"""What is built for each mode: the split decode kernel and its merge, plain, and the kernel for many rows with every option on."""


@dataclass(frozen=True)
class Build:
    """One compiled kernel. ``spilled``: bytes of local memory (CUDA) or spilled registers (HIP) per thread."""

    mode: str
    target: str
    case: str
    kernel: str
    registers: int
    spilled: int
    shared: int
    instructions: int
    products: int
    loads: int


class Driver:
    """All of a driver that compiling needs."""

    def __init__(self, name: str, target: Target) -> None:
        from triton.backends.compiler import GPUTarget

        self.name = name
        self.target = GPUTarget(target.backend, target.arch, target.warp_size)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> object:
        # Kernels keep what they compiled per device: each target is one.
        return self.name

    def get_current_stream(self, device: object) -> int:
        return 0


@contextlib.contextmanager
def compiling_for(name: str) -> Iterator[list[Any]]:
    """Within the block, launching a ``@triton.jit`` kernel on any tensors compiles it for target ``name`` and runs nothing.

    Yields the list that Triton's compiled kernels are added to.
    """
    from triton import knobs
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from kvq_core import launch

    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET=1 is set: compile in a process of its own")
    target = TARGETS[name]
    built: list[Any] = []
    run, facts, active = JITFunction.run, launch._device_facts, driver._active

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        built.append(kernel)
        return kernel

    driver.set_active(Driver(name, target))
    JITFunction.run = compile_only
    launch._device_facts = lambda device: (target.num_sms, target.backend == "cuda")  # type: ignore[assignment]
    try:
        yield built
    finally:
        JITFunction.run, launch._device_facts, driver._active = run, facts, active


def build(mode: str, target: str) -> list[Build]:
    """Compile the write and read kernels of ``mode`` for ``target``."""
    backend = get_backend(mode)
    results = []
    for case_name, case in CASES.items():
        made = scene.build(case, backend, torch.device("cpu"))
        num_rows = sum(case.query_lens)
        # Without the scene's padding rows, so that a batch of one kind is seen to be one and takes one launch.
        reading = made.read_arguments() | {"q": made.q[:num_rows]}
        with compiling_for(target) as kernels, _kernels_on_cpu():
            if case_name == "decode":
                made.write()
            backend.unified_attention(out=made.fresh_out(num_rows)["rows"], **reading)
        results += [_facts(mode, target, case_name, kernel) for kernel in kernels]
    return results


@contextlib.contextmanager
def _kernels_on_cpu() -> Iterator[None]:
    """Have the doors launch kernels for CPU tensors, which here means: compile them."""
    usual = ops.kernels_run_on
    ops.kernels_run_on = lambda device: True
    try:
        if debug.enabled():
            raise RuntimeError("KVQ_DEBUG=1 looks at values, and there are none")
        yield
    finally:
        ops.kernels_run_on = usual


def _facts(mode: str, target: str, case: str, kernel: Any) -> Build:
    counts = _cuda(kernel) if TARGETS[target].backend == "cuda" else _hip(kernel)
    return Build(mode, target, case, kernel.metadata.name, shared=kernel.metadata.shared, **counts)


def _cuda(kernel: Any) -> dict[str, int]:
    """Counts from the machine code, by the cuobjdump that Triton brings."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        dump = subprocess.run([tool, "-sass", "-res-usage", cubin.name], capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", dump)
    if usage is None:
        raise RuntimeError(f"cuobjdump says nothing of registers:\n{dump[:500]}")
    codes = [m[1] for m in re.finditer(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_]+)", dump, re.MULTILINE)]
    return {
        "registers": int(usage[1]),
        "spilled": int(usage[2]) + int(usage[3]),
        **_count(codes, ("HMMA", "IMMA", "QMMA", "HGMMA", "IGMMA", "QGMMA", "UTCHMMA", "UTCQMMA"), ("LDG", "LDGSTS")),
    }


def _hip(kernel: Any) -> dict[str, int]:
    text = kernel.asm["amdgcn"]

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", text)
        return int(found[1]) if found else 0

    codes = [m[1] for m in re.finditer(r"^\s+([a-z]+_[a-z0-9_]+)", text, re.MULTILINE)]
    products = tuple({code for code in codes if "mfma" in code})
    loads = tuple({code for code in codes if code.startswith(("global_load", "buffer_load", "flat_load"))})
    spilled = number("vgpr_spill_count") + number("sgpr_spill_count")
    return {"registers": number("vgpr_count"), "spilled": spilled, **_count(codes, products, loads)}


def _count(codes: list[str], products: tuple[str, ...], loads: tuple[str, ...]) -> dict[str, int]:
    counter = collections.Counter(codes)
    return {
        "instructions": len(codes),
        "products": sum(counter[code] for code in products),
        "loads": sum(counter[code] for code in loads),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="+", metavar="MODE")
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all")
    parser.add_argument("--json", action="store_true", help="one line of JSON a kernel")
    options = parser.parse_args()
    # Kernels of this process must be compiled, whoever started it.
    os.environ.pop("TRITON_INTERPRET", None)
    failures = 0
    for target in options.target or TARGETS:
        for mode in options.modes:
            try:
                built = build(mode, target)
            except Exception:
                failures += 1
                print(f"{mode} for {target}:\n{traceback.format_exc()}", file=sys.stderr)
                continue
            for one in built:
                print(json.dumps(asdict(one)) if options.json else "  ".join(f"{k}={v}" for k, v in asdict(one).items()), flush=True)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
