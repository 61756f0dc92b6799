"""What is expected to limit decode on GPUs that kvq has not run on: ``hatch run tables`` writes the table of
``performance-figures.md``.

No GPU is needed. The instructions of the loop over keys are the golden counts of the compiled kernels, the tile is the one that kvq's own
tables choose, and a GPU is its datasheet. A second table compares the model with the committed runs.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from tabulate import tabulate

import performance_tables
import shapes
from generated import Marks, marks, replaced
from kvq_core import get_backend
from kvq_core.plan.lookup import SWITCH
from kvq_core.testing import scene
from kvq_core.testing.cases import Case
from kvq_core.testing.compile_matrix import CASES, TARGETS
from kvq_core.testing.golden_counts import GoldenCounts, Row
from kvq_core.testing.table_choices import Problem, name_of

PAGE: Final = performance_tables.FIGURES
"""Has int3's time, which the committed runs predate."""
GOLDEN: Final = Path(__file__).parents[2] / "tests" / "data" / "golden_counts.json"
MARKS: Final[Marks] = marks("other-gpus", "tools/tables/other_gpus.py")
MODES: Final = {
    "none": "`none`",
    "int8_per_token_head": "int8",
    "int4_per_token_head": "int4",
    "int3_per_token_head": "int3",
    "int2_per_token_head": "int2",
}
"""In the order of the columns, with their headings."""
DECODE: Final = next(setting for setting in shapes.DECODE if setting.name == "A")
"""64 sequences of 8192 tokens, 32/8 heads of 128."""
SCHEDULERS: Final = 4
"""Of a multiprocessor, from sm_80 on. Each issues an instruction of a warp in a clock."""
THRESHOLD: Final = 0.8
"""int2 on an H200, which the profiler found limited by instructions, has this ratio. On an H100 it has 0.57, and memory still counts."""

FAR: Final = 0.5
"""GPUs with a smaller ratio in every mode are named together."""


@dataclass(frozen=True)
class GPU:
    """Figures of NVIDIA's datasheet. ``clock``: boost, in Hz; ``bandwidth``: of memory, in bytes a second."""

    target: str
    sms: int
    clock: float
    bandwidth: float

    @property
    def issue_rate(self) -> float:
        """Instructions of warps that all schedulers issue in a second."""
        return SCHEDULERS * self.sms * self.clock


GPUS: Final[Mapping[str, GPU]] = {
    "A100 80GB SXM": GPU("sm_80", 108, 1.410e9, 2039e9),  # A100 datasheet; Ampere architecture whitepaper
    "A10": GPU("sm_86", 72, 1.695e9, 600e9),  # A10 datasheet
    "RTX 3090": GPU("sm_86", 82, 1.695e9, 936e9),  # Ampere GA102 architecture whitepaper
    "L4": GPU("sm_89", 58, 2.040e9, 300e9),  # L4 datasheet
    "L40S": GPU("sm_89", 142, 2.520e9, 864e9),  # L40S datasheet
    "RTX 4090": GPU("sm_89", 128, 2.520e9, 1008e9),  # Ada architecture whitepaper
    "H100 SXM": GPU("sm_90", 132, 1.980e9, 3350e9),  # H100 datasheet
    "H200": GPU("sm_90", 132, 1.980e9, 4800e9),  # H200 datasheet
    "B200": GPU("sm_100", 148, 1.980e9, 8000e9),  # HGX and DGX B200 datasheets
    "RTX 5090": GPU("sm_120", 170, 2.407e9, 1792e9),  # RTX Blackwell architecture whitepaper
}
"""Multiprocessors and clocks agree with the rate of float32 that the datasheet has."""
MEASURED: Final = {"H100 SXM": performance_tables.H100, "H200": performance_tables.DATA}


@functools.cache
def golden() -> GoldenCounts:
    return GoldenCounts.read(GOLDEN)


@functools.cache
def loop(mode: str, target: str, sms: int) -> Row | None:
    """Golden counts of the loop that takes :data:`DECODE`'s keys; ``None`` if they have no such kernel, or it has no loop."""
    device, backend = replace(TARGETS[target], num_sms=sms).device(target), get_backend(mode)

    def tile(case: Case, longest: int) -> str:
        (choice,) = Problem(scene.build(case, backend, torch.device("cpu")), longest).tiles(device)
        return name_of(choice)

    # Plans follow from how many sequences there are and what their lengths are said to be, so short ones do.
    case = Case(
        query_lens=(1,) * DECODE.num_seqs,
        seq_lens=(1,) * DECODE.num_seqs,
        head_size=DECODE.head_size,
        num_kv_heads=DECODE.kv_heads,
        queries_per_kv=DECODE.query_heads // DECODE.kv_heads,
        dtype=shapes.DTYPE,
    )
    chosen = tile(case, max(DECODE.seq_lens))
    # The matrix names a kernel by its tile where the case of decode has another.
    name = "decode" if chosen == tile(CASES["decode"], max(CASES["decode"].seq_lens)) else chosen
    row = golden().kernels.get(f"{mode} {target} {name} attend")
    return row if row is not None and row["keys"] > 1 else None


def bytes_us(mode: str, gpu: GPU) -> float:
    """Time in which the codes and scales of :data:`DECODE` arrive."""
    return DECODE.bytes(get_backend(mode)) / gpu.bandwidth * 1e6


def issue_us(mode: str, gpu: GPU) -> float | None:
    """Time in which the instructions of the loop over its keys issue, if their number is known."""
    row = loop(mode, gpu.target, gpu.sms)
    if row is None:
        return None
    keys = sum(DECODE.seq_lens) * DECODE.kv_heads
    return keys * row["instructions"] * row["warps"] / row["keys"] / gpu.issue_rate * 1e6


def ratios(gpu: GPU) -> list[float | None]:
    """By mode, the time of the instructions over that of the bytes; ``None`` where it is not known."""
    return [None if (issue := issue_us(mode, gpu)) is None else issue / bytes_us(mode, gpu) for mode in MODES]


def cell(ratio: float | None) -> str:
    """Bold from :data:`THRESHOLD` on."""
    if ratio is None:
        return ""
    return f"{ratio:.2f}" if ratio < THRESHOLD else f"**{ratio:.2f}**"


def measured_us(mode: str, name: str) -> float | None:
    """Time of :data:`DECODE` in the committed run on that GPU, if it has the mode."""
    run = performance_tables.Run(json.loads(MEASURED[name].read_text(encoding="utf-8")))
    return run.of(DECODE.name, mode) if run.has(DECODE.name, mode) else None


def accounted(mode: str, name: str) -> str:
    """The longer of the two times as a share of the measured one; empty if that is not known."""
    issue, measured = issue_us(mode, GPUS[name]), measured_us(mode, name)
    return "" if issue is None or measured is None else f"{100 * max(bytes_us(mode, GPUS[name]), issue) / measured:.0f} %"


def part() -> str:
    """Both tables, and between them the GPUs that have no line, since memory limits every mode by far."""
    of = {name: ratios(gpu) for name, gpu in GPUS.items()}
    largest = {name: max(ratio for ratio in found if ratio is not None) for name, found in of.items()}
    by_far = [name for name in GPUS if largest[name] < FAR]
    gpus = [[name, *map(cell, found)] for name, found in of.items() if name not in by_far]
    shares = [[name, *(accounted(mode, name) for mode in MODES)] for name in MEASURED]
    return f"""\
{_table(["GPU", *MODES.values()], gpus)}
At most {max(largest[name] for name in by_far):.2f} in every mode: {", ".join(by_far)}.

{_table(["the longer of the two, of the measured time", *MODES.values()], shares)}"""


def _table(head: list[str], body: list[list[str]]) -> str:
    return tabulate(body, head, tablefmt="github", disable_numparse=True) + "\n"


def main() -> None:
    os.environ[SWITCH] = ""  # no plans but kvq's own, for which the golden counts are
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), {MARKS: part()}), encoding="utf-8")


if __name__ == "__main__":
    main()
