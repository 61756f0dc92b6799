"""Golden counts: what the compiled kernels cost, kept in a file, so that a change that makes them cost more is seen without a GPU.

Counts of an attention kernel are of its pipelined loop, and compared per key: those of the tile's warps over the keys of the tile, so that
a longer tile is no regression. Other kernels are counted whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

INSTRUCTIONS_MAY_GROW = Fraction(2, 100)
"""Share by which instructions may grow unnoticed: schedules move a few. All else is exact, since a compiler's version repeats itself."""

PER_PROGRAM = ("registers", "spilled")
PER_KEY = ("instructions", "conversions", "roundings", "byte_loads", "barriers", "local")

Row = Mapping[str, int]


@dataclass(frozen=True)
class GoldenCounts:
    """Counts by kernel (``mode target case kernel``), and the version of Triton that compiled them."""

    triton: str
    kernels: Mapping[str, Row]

    @classmethod
    def of(cls, builds: Iterable[Mapping[str, Any]], triton: str) -> GoldenCounts:
        """The counts of ``builds`` (:class:`kvq_core.testing.compile_matrix.Build` as dicts); those for other than CUDA have none."""
        return cls(
            triton,
            {
                " ".join(build[name] for name in ("mode", "target", "case", "kernel")): {
                    **{name: build[name] for name in PER_PROGRAM},
                    **build["hot"],
                }
                for build in builds
                if build["hot"] is not None
            },
        )

    @classmethod
    def read(cls, path: Path) -> GoldenCounts:
        return cls(**json.loads(path.read_text()))

    def write(self, path: Path) -> None:
        """Sorted, a line a kernel, so that a change reads well as a diff."""
        rows = ",\n".join(f"{json.dumps(kernel)}: {json.dumps(self.kernels[kernel])}" for kernel in sorted(self.kernels))
        path.write_text(f'{{"triton": {json.dumps(self.triton)}, "kernels": {{\n{rows}\n}}}}\n')

    def for_target(self, target: str) -> GoldenCounts:
        return GoldenCounts(self.triton, {kernel: row for kernel, row in self.kernels.items() if kernel.split()[1] == target})

    def regressions(self, fresh: GoldenCounts) -> list[str]:
        """What ``fresh`` has more of than these, in words; kernels that only one of the two has count as well."""
        unknown = [f"{kernel}: not in the file" for kernel in sorted(fresh.kernels.keys() - self.kernels.keys())]
        gone = [f"{kernel}: in the file, but not built" for kernel in sorted(self.kernels.keys() - fresh.kernels.keys())]
        both = sorted(self.kernels.keys() & fresh.kernels.keys())
        return [*unknown, *gone, *(f"{kernel}: {line}" for kernel in both for line in _grown(self.kernels[kernel], fresh.kernels[kernel]))]


def _grown(old: Row, new: Row) -> list[str]:
    lines = [f"{name} {old[name]} -> {new[name]}" for name in PER_PROGRAM if new[name] > old[name]]
    for name in PER_KEY:
        before, now = (Fraction(row[name] * row["warps"], row["keys"]) for row in (old, new))
        allowed = before * (1 + INSTRUCTIONS_MAY_GROW) if name == "instructions" else before
        if now > allowed:
            lines.append(f"{name} {old[name]} -> {new[name]} ({float(before):.2f} -> {float(now):.2f} a key)")
    return lines
