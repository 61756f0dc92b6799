"""Build a mode's kernels for every GPU there is no GPU of here: ``python -m kvq_core.testing.compile_matrix MODE ... [--target NAME ...]``.

Triton compiles for a target that a driver names. :mod:`kvq_core.launch.offline` puts a driver in place that names one and has no device,
and turns every launch into a compilation, so that a mode's own launchers, plans and argument bundles are what is exercised. Run it in a
process without ``TRITON_INTERPRET``: what the interpreter decorated cannot be compiled. Plans are those that kvq ships. For a target with
a table of its own, every tile that is chosen for any problem is built; with ``--every-tile`` for all targets. ``--no-cases`` leaves out
what is built for every target, ``--only TEXT`` all but cases with TEXT in their names (``groups``: the kernels of warp groups).

The exit status is 1 if a kernel does not build, or has accesses to shared memory that no barrier orders.

``--golden PATH`` writes what the kernels cost to the file that later ones are compared with (:mod:`kvq_core.testing.golden_counts`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from kvq_core.environment import kernels_of
from kvq_core.errors import KVQError
from kvq_core.launch.offline import Device, compiling_for
from kvq_core.plan.lookup import SHIPPED, SWITCH
from kvq_core.registry import get_backend
from kvq_core.testing import machine_code, scene
from kvq_core.testing.cases import Case
from kvq_core.testing.golden_counts import GoldenCounts
from kvq_core.testing.table_choices import Problem, name_of, problems_of

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend

KIB = 1024


@dataclass(frozen=True)
class Target:
    """A GPU to build for, and the shared memory (bytes) that one program may have on it."""

    backend: str
    arch: int | str
    warp_size: int
    shared_limit: int
    num_sms: int

    def device(self, name: str) -> Device:
        return Device(self.backend, self.arch, self.warp_size, self.num_sms, name)


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
CUDA_TARGETS = tuple(name for name, target in TARGETS.items() if target.backend == "cuda")

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
"""What is built for each mode: the split decode kernel and its combine kernel, plain, and the kernel for many rows with every option on.
Further tiles are built plain."""
ORDERED = MappingProxyType({"ordered-decode": replace(CASES["decode"], smoothing="ordered")})
"""Of keys with an order of channels, beside :data:`CASES` for modes that take one."""
VARIANTS = MappingProxyType(
    {
        "decode-softcap": (replace(CASES["decode"], softcap=30.0), 2048),
        "decode-alone": (replace(CASES["decode"], query_lens=(1,), seq_lens=(2048,), num_kv_heads=8), 32768),
    }
)
"""What makes another kernel of decode, and the keys that the call says it has: the option that costs most, and a sequence on its own. Built
beside the further tiles."""
_ROWS: dict[str, Any] = {"head_size": 128, "num_kv_heads": 8, "dtype": torch.bfloat16}
WRITES = MappingProxyType(
    {
        "few": Case(query_lens=(64,), seq_lens=(64,), **_ROWS),
        "many": Case(query_lens=(8192,), seq_lens=(8192,), **_ROWS),
    }
)
"""Rows of a decode step and of a long prompt, which a table has other writes for than for those of :data:`CASES`."""


@dataclass(frozen=True)
class Build:
    """One compiled kernel. ``spilled``: bytes of local memory (CUDA) or spilled registers (HIP) per thread. ``merged_exponents`` (see
    :mod:`~kvq_core.testing.machine_code`), ``unordered_arrivals``, ``reused_mbarriers`` (:mod:`~kvq_core.testing.mbarriers`) and ``hot``:
    CUDA only."""

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
    merged_exponents: int
    unordered_arrivals: int
    reused_mbarriers: int
    hot: machine_code.Hot | None


def build(mode: str, target: str, every_tile: bool | None = None, cases: bool = True, only: str = "") -> list[Build]:
    """Compile the write and read kernels of ``mode`` for ``target``: those of :data:`CASES`, if ``cases``.

    ``every_tile``: also the read kernel with each of :func:`further_reads`, its name in place of the case's, and the write kernels of
    :data:`WRITES`; ``None``: if kvq ships a table of launch plans for exactly this target. ``only``: a part of the names of those built.
    """
    backend, device = get_backend(mode), TARGETS[target].device(target)
    results = []
    wanted = {**CASES, **(ORDERED if backend.key_half.order_multiple else {})}
    for case_name, case in _named(wanted, only).items() if cases else ():
        problem = _problem(backend, case)
        with compiling_for(device) as kernels:
            if case_name.endswith("decode"):
                problem.made.write()
            problem.read()
        results += [_facts(mode, target, case_name, kernel) for kernel in kernels]
    if (SHIPPED / f"{target}.json").exists() if every_tile is None else every_tile:
        for name, problem in _named(further_reads(backend, device), only).items():
            with compiling_for(device) as kernels:
                problem.read()
            results += [_facts(mode, target, name, kernel) for kernel in kernels if kernel.metadata.name in ("attend", "stage_kernel")]
        if "write" in kernels_of(backend):
            for name, case in _named(WRITES, only).items():
                problem = _problem(backend, case)
                with compiling_for(device) as kernels:
                    problem.made.write()
                results += [_facts(mode, target, name, kernel) for kernel in kernels]
    return results


def _named(all_of_them: Mapping[str, Any], part: str) -> dict[str, Any]:
    return {name: one for name, one in all_of_them.items() if part in name}


def further_reads(backend: QuantKVBackend, device: Device) -> dict[str, Problem]:
    """:func:`further_tiles` and :data:`VARIANTS`; none for a mode without a read kernel."""
    variants = VARIANTS.items() if "read" in kernels_of(backend) else ()
    return further_tiles(backend, device) | {name: _problem(backend, case, longest) for name, (case, longest) in variants}


def further_tiles(backend: QuantKVBackend, device: Device) -> dict[str, Problem]:
    """Tiles of reads that the tables can choose on ``device`` but do not for :data:`CASES`; none for a mode without a read kernel."""
    if "read" not in kernels_of(backend):
        return {}
    built = {name_of(tile) for case in CASES.values() for tile in _problem(backend, case).tiles(device)}
    return problems_of(backend, device, built)


def _problem(backend: QuantKVBackend, case: Case, longest: int = 0) -> Problem:
    return Problem(scene.build(case, backend, torch.device("cpu")), longest or max(case.seq_lens))


def _facts(mode: str, target: str, case: str, kernel: Any) -> Build:
    facts = machine_code.of_cuda(kernel) if TARGETS[target].backend == "cuda" else machine_code.of_hip(kernel)
    return Build(mode, target, case, kernel.metadata.name, shared=kernel.metadata.shared, **facts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="+", metavar="MODE")
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all")
    parser.add_argument(
        "--every-tile",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="of the tables; default: for targets with one of their own",
    )
    parser.add_argument(
        "--cases", action=argparse.BooleanOptionalAction, default=True, help="the kernels that are built for every target (default)"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="cases that have this in their names")
    parser.add_argument("--json", action="store_true", help="one line of JSON a kernel")
    parser.add_argument(
        "--golden", type=Path, metavar="PATH", help="write the counts of the CUDA targets to this file, in place of what it has"
    )
    options = parser.parse_args()
    if options.golden and (options.only or not options.cases):
        parser.error("--golden: got --only or --no-cases, but the file must have the counts of all kernels")
    try:
        for mode in options.modes:
            get_backend(mode)
    except KVQError as problem:
        parser.error(str(problem))
    # Kernels of this process must be compiled, whoever started it.
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ[SWITCH] = ""
    built: list[Build] = []
    failures = 0
    for target in options.target or (CUDA_TARGETS if options.golden else TARGETS):
        for mode in options.modes:
            try:
                of_mode = build(mode, target, options.every_tile, options.cases, options.only)
            except Exception:
                failures += 1
                print(f"{mode} for {target}:\n{traceback.format_exc()}", file=sys.stderr)
                continue
            if not of_mode:
                print(f"{mode} for {target}: nothing to build, the mode brings no kernels", file=sys.stderr)
            built += of_mode
            for one in of_mode:
                print(json.dumps(asdict(one)) if options.json else _words(one), flush=True)
                if one.unordered_arrivals or one.reused_mbarriers:
                    failures += 1
                    print(f"{one.mode} for {target}, {one.case} {one.kernel}: unordered accesses to shared memory", file=sys.stderr)
    if failures:
        sys.exit(1)
    if options.golden:
        import triton

        GoldenCounts.of(map(asdict, built), triton.__version__).write(options.golden)


def _words(one: Build) -> str:
    facts = asdict(one) | {"hot": None}
    if one.hot is not None and one.hot.keys > 1:
        facts |= asdict(one.hot) | {"instructions": one.instructions, "loop": one.hot.instructions, "per_key": round(one.hot.per_key, 2)}
    return "  ".join(f"{name}={value}" for name, value in facts.items() if value is not None)


if __name__ == "__main__":
    main()
