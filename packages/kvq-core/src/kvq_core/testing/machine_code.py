"""What a kernel that Triton compiled is made of: registers, spills, instructions, and what its hot part costs."""

from __future__ import annotations

import collections
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvq_core.testing import sass
from kvq_core.testing.mbarriers import reused_mbarriers, unordered_arrivals


@dataclass(frozen=True)
class Hot(sass.Counts):
    """Counts of what a program runs most: an attention kernel's pipelined loop, which takes ``keys`` keys a turn; all of another kernel.

    The tile's rows are shared by ``warps`` warps, each of which runs these instructions. ``keys`` is 1 where there is no such loop.
    """

    keys: int
    warps: int

    @property
    def per_key(self) -> float:
        """Instructions that a key costs, those of all warps together."""
        return self.instructions * self.warps / self.keys


def of_cuda(kernel: Any) -> dict[str, Any]:
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
    code = sass.parse(dump)
    return {
        "registers": int(usage[1]),
        "spilled": int(usage[2]) + int(usage[3]),
        **_count([one.operation for one in code], tuple(sass.PRODUCTS), ("LDG", "LDGSTS")),
        "merged_exponents": 0 if _specializes_warps(kernel) else merged_exponents(kernel.asm["ptx"]),
        "unordered_arrivals": unordered_arrivals(kernel.asm["ptx"]),
        "reused_mbarriers": reused_mbarriers(kernel.asm["ptx"]),
        "hot": _hot(kernel, code),
    }


def merged_exponents(ptx: str) -> int:
    """Exponents that a multiply-add takes a maximum off from: ``a * b - maximum`` rounded once, where the maximum was of rounded products.

    Of huge scores the largest is then not 0 from the maximum, but a rounding error of their size: infinity or nothing.
    """
    made = {m[2]: (m[1].split(".")[0], m[3].split(", ")) for m in re.finditer(r"^\s*(\S+)\s+(%r\d+), (.*);", ptx, re.MULTILINE)}

    def merged(name: str) -> bool:
        operation, operands = made.get(name, ("", []))
        if operation == "mul":  # by the softmax's unit
            return any(merged(operand) for operand in operands)
        return operation == "fma" and made.get(operands[2], ("",))[0] == "neg"

    return sum(merged(m[1]) for m in re.finditer(r"^\s*ex2\S*\s+%r\d+, (%r\d+);", ptx, re.MULTILINE))


def _specializes_warps(kernel: Any) -> bool:
    """Whether it is prefill by warp groups, whose softmax has such multiply-adds of its own, and no maximum for a reference
    (:mod:`kvq_core.kernels.sm90.softmax`)."""
    return "setmaxnreg" in kernel.asm["ptx"]


def _hot(kernel: Any, code: list[sass.Instruction]) -> Hot:
    from kvq_core.kernels.config import ReadConfig

    loop, keys = sass.pipelined_loop(code), 1
    if loop is not None:
        keys = next((constant.tile.keys for constant in kernel.src.constants.values() if isinstance(constant, ReadConfig)), keys)
    return Hot(**vars(sass.Counts.of(code if loop is None else loop)), keys=keys, warps=kernel.metadata.num_warps)


def of_hip(kernel: Any) -> dict[str, Any]:
    text = kernel.asm["amdgcn"]

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", text)
        return int(found[1]) if found else 0

    codes = [m[1] for m in re.finditer(r"^\s+([a-z]+_[a-z0-9_]+)", text, re.MULTILINE)]
    products = tuple({code for code in codes if "mfma" in code})
    loads = tuple({code for code in codes if code.startswith(("global_load", "buffer_load", "flat_load"))})
    spilled = number("vgpr_spill_count") + number("sgpr_spill_count")
    return {
        "registers": number("vgpr_count"),
        "spilled": spilled,
        **_count(codes, products, loads),
        "merged_exponents": 0,
        "unordered_arrivals": 0,
        "reused_mbarriers": 0,
        "hot": None,
    }


def _count(codes: list[str], products: tuple[str, ...], loads: tuple[str, ...]) -> dict[str, int]:
    counter = collections.Counter(codes)
    return {
        "instructions": len(codes),
        "products": sum(counter[code] for code in products),
        "loads": sum(counter[code] for code in loads),
    }
