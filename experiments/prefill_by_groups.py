"""Prefill by warp groups beside kvq's own kernels: ``python experiments/prefill_by_groups.py [MODE ...]`` on an H100 or H200.

Each mode's kernel (warpgroups/) answers a setting of the benchmarks in place of kvq's. Printed are how far the two are apart, relative to
the norm of kvq's result, whether any bit moves from call to call, and what both take. ``--compile`` only builds the kernels for sm_90,
which needs no GPU, and says what they are made of.

Exit status: 0; 1 for a result that is apart by more than ROUNDING, or that moves; 2 for a machine without CUDA, or a wrong command line.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

sys.path[:0] = [str(Path(__file__).parents[1] / "benchmarks"), str(Path(__file__).parent)]

import checkout  # noqa: E402

checkout.use()

import torch  # noqa: E402
from tabulate import tabulate  # noqa: E402

import precompile  # noqa: E402
import problems  # noqa: E402
import shapes  # noqa: E402
from kvq_core import KVQError, QuantKVBackend, get_backend, ops  # noqa: E402
from kvq_core.kernels.args import ReadConfig  # noqa: E402
from kvq_core.launched import Launched  # noqa: E402
from kvq_core.offline import compiling_for  # noqa: E402
from kvq_core.plans import Prefill  # noqa: E402
from timing import Timer  # noqa: E402
from tune import ASSUMED  # noqa: E402

ROUNDING: Final = 2e-3
"""Of 16-bit results, by two orders of summing."""
REPEATS: Final = 20
MODES: Final = ("none", "int8", "fp8", "fp8_per_tensor", "int4", "int2")
TILE: Final = Prefill(rows=128, keys=128, warps=4, stages=2, registers=None)


@contextlib.contextmanager
def by_groups() -> Iterator[list[ReadConfig]]:
    """Within the block, warp groups take every launch that is planned with :data:`TILE`, as all of many rows are. Yields what they took."""
    from warpgroups.attend import attend

    taken: list[ReadConfig] = []
    start = Launched.start

    def replaced(self: Launched, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        config = options.get("C")
        if isinstance(config, ReadConfig) and (config.rows, config.keys, config.keys_first) == (TILE.rows, TILE.keys, False):
            taken.append(config)
            kernel, options = attend, {"C": config, "num_warps": TILE.warps}
        start(self, kernel, grid, *arguments, **options)

    Launched.start = replaced  # type: ignore[method-assign]
    try:
        with ops.planning_with(precompile.only(ASSUMED.arch, TILE)):
            yield taken
    finally:
        Launched.start = start  # type: ignore[method-assign]


def compare(backend: QuantKVBackend, setting: shapes.Read, timer: Timer) -> tuple[Any, ...]:
    """(mode, setting, error, whether bits move, TFLOP/s of kvq's kernel and of warp groups, microseconds of both)."""
    arguments = problems.read(backend, setting, timer.device)
    out = arguments["out"]

    def call() -> torch.Tensor:
        backend.unified_attention(**arguments)
        return out

    wanted = call().float()
    own = timer.measure(call, setting.bytes(backend)).device_us
    out.fill_(torch.nan)
    with by_groups() as taken:
        got = call().clone()
        if not taken:
            raise RuntimeError(f"{backend.mode}, {setting.name}: warp groups took no launch")
        moves = not all(torch.equal(call(), got) for _ in range(REPEATS))
        new = timer.measure(call, setting.bytes(backend)).device_us
    error = float((got.float() - wanted).norm() / wanted.norm())
    speeds = [setting.flops / us / 1e6 for us in (own, new)]
    return backend.mode, setting.name, error, moves, *speeds, own, new


def compiled(backend: QuantKVBackend, setting: shapes.Read) -> tuple[Any, ...]:
    """(mode, registers of a thread when a program begins, bytes of its stack, instructions and matrix products in all, shared memory)."""
    from kvq_core.testing import machine_code

    with compiling_for(ASSUMED) as kernels, by_groups():
        precompile.call(backend, setting)
    (kernel,) = kernels
    facts = machine_code.of_cuda(kernel)
    return backend.mode, facts["registers"], facts["spilled"], facts["instructions"], facts["products"], kernel.metadata.shared


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="*", metavar="MODE", help=f"default: {', '.join(MODES)}")
    parser.add_argument("--compile", action="store_true", help="build for sm_90 only; no GPU needed")
    options = parser.parse_args()
    try:
        backends = [get_backend(mode) for mode in options.modes or MODES]
    except KVQError as error:
        print(error, file=sys.stderr)
        return 2
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("TRITON_INTERPRET=1 is set: Gluon has no interpreter", file=sys.stderr)
        return 2
    if options.compile:
        rows = [compiled(backend, shapes.PREFILL[0]) for backend in backends]
        print(tabulate(rows, headers=("mode", "registers", "stack", "instructions", "products", "shared")))
        return 0
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("need a GPU of compute capability 9.0 (H100, H200); --compile needs none", file=sys.stderr)
        return 2
    timer = Timer(torch.device("cuda", torch.cuda.current_device()))
    lines = [compare(backend, setting, timer) for backend in backends for setting in shapes.PREFILL]
    headers = ("mode", "setting", "apart", "moves", "kvq TFLOP/s", "groups TFLOP/s", "kvq us", "groups us")
    print(tabulate(lines, headers=headers, floatfmt=("", "", ".1e", "", ".0f", ".0f", ".1f", ".1f")))
    return int(any(error > ROUNDING or moves for _, _, error, moves, *_ in lines))


if __name__ == "__main__":
    sys.exit(main())
