"""The tables of speed, from one run of the benchmark: ``hatch run python docs/performance_tables.py [BENCHMARKS.json]``.

Writes the generated parts of the README and of ``performance.md`` from ``_data/benchmarks.json``. BENCHMARKS.json, if given, takes its
place: the file that ``benchmarks/run.py --settings decode,prefill,write,more`` leaves.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tabulate import tabulate

from accuracy_page import between

DOCS: Final = Path(__file__).parent
DATA: Final = DOCS / "_data" / "benchmarks.json"
README: Final = DOCS.parent / "README.md"
PAGE: Final = DOCS / "performance.md"
FLASHINFER: Final = "flashinfer bf16"
COPY: Final = "torch copy bf16"
MODES: Final = {
    "none": "`none`",
    "int8_per_token_head": "int8",
    "fp8_per_token_head": "fp8",
    "fp8_per_tensor": "fp8 per tensor",
    "int4_per_token_head": "int4",
    "int2_per_token_head": "int2",
}
"""In the order of the columns, with their headings."""
SMALL: Final = {
    "b1-512": "1 x 512",
    "b1-1024": "1 x 1024",
    "b32-512": "32 x 512",
    "b1-4096": "1 x 4096",
    "ragged": "one of 131072 among 63 of 1024",
    "even": "the same bytes, 64 x 3056",
    "A-q2": "64 x 8192, 2 query rows a sequence",
    "A-q4": "4 query rows",
    "A-q8": "8 query rows",
}
OTHERS: Final = {
    "A": "as in setting A",
    "A-g1": "1 query head a KV head",
    "A-g7": "7 query heads",
    "A-g16": "16 query heads",
    "A-d64": "heads of 64",
    "A-d96": "heads of 96",
    "A-d192": "heads of 192",
    "A-d256": "heads of 256",
    "A-p32": "blocks of 32",
    "A-p64": "blocks of 64",
    "A-p128": "blocks of 128",
    "A-window": "a window of 8192",
    "A-softcap": "softcap",
    "A-sinks": "sinks",
    "A-alibi": "ALiBi",
    "A-token-major": "token-major pages",
    "A-cells": "vLLM's cells",
    "B-window-1024": "one sequence of 131072, a window of 1024",
}
PREFILL: Final = {"q8192": "8192", "q2048-32768": "2048 over 32768"}
WRITES: Final = {
    "w64": "64 tokens",
    "w64-8": "64 tokens, each of eight in a graph",
    "w8192": "8192 tokens",
    "w8192-8": "8192 tokens, each of eight in a graph",
}
LAYERS: Final = 8
"""Writes in a graph of the settings that say eight."""

Content = dict[str, Any]
"""What ``_data/benchmarks.json`` holds."""


class Run:
    """One run's rows, by setting and mode."""

    def __init__(self, content: Content) -> None:
        self.machine: dict[str, Any] = content["machine"]
        self._rows = {(row["setting"], row["mode"]): row for row in content["rows"]}

    def us(self, setting: str, mode: str) -> float | None:
        row = self._rows.get((setting, mode))
        return float(row["us"]) if row else None

    def of(self, setting: str, mode: str, figure: str) -> float:
        return float(self._rows[setting, mode][figure])

    def share(self, setting: str, mode: str) -> float:
        """Of the memory bus."""
        return self.of(setting, mode, "hbm")

    def times(self, setting: str, other: str, mode: str) -> float:
        """How many times as long ``setting`` takes as ``other``."""
        return self.of(setting, mode, "us") / self.of(other, mode, "us")


# -- goals ------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Goal:
    """``bounds``: of ``none``, the 8-bit modes, int4 and int2, or one for all. The ``figure`` of a run is held to them as it is printed."""

    what: str
    figure: Callable[[Run, str], float]
    bounds: tuple[float, ...]
    at_most: bool = False
    form: str = ".2f"

    def met(self, run: Run, mode: str) -> bool:
        figure = float(format(self.figure(run, mode), self.form))
        bound = self.bounds[-1] if len(self.bounds) == 1 else self.bounds[_BOUND.get(mode, 1)]
        return figure <= bound if self.at_most else figure >= bound

    def cells(self, run: Run) -> list[str]:
        """A line of the table: what, the bounds, and each mode's figure, in bold print if it is not met."""
        figures = [(format(self.figure(run, mode), self.form), self.met(run, mode)) for mode in MODES]
        bounds = ", ".join(format(bound, "g") for bound in self.bounds)
        wanted = f"at {'most' if self.at_most else 'least'} {bounds}"
        return [self.what, wanted, *(text if met else f"**{text}**" for text, met in figures)]


_BOUND: Final = {"none": 0, "int4_per_token_head": 2, "int2_per_token_head": 3}
"""Which of a goal's bounds is that of a mode; the other modes' is 1."""


def _as_fast(setting: str) -> Callable[[Run, str], float]:
    return lambda run, mode: run.of(setting, mode, "x_peer")


def _as_long(setting: str, other: str) -> Callable[[Run, str], float]:
    return lambda run, mode: run.times(setting, other, mode)


def _of_share(setting: str) -> Callable[[Run, str], float]:
    return lambda run, mode: run.share(setting, mode) / run.share("A", mode)


def _us(setting: str) -> Callable[[Run, str], float]:
    return lambda run, mode: run.of(setting, mode, "us")


def _tflops(setting: str) -> Callable[[Run, str], float]:
    return lambda run, mode: run.of(setting, mode, "tflops")


GOALS: Final = (
    Goal("A, x FlashInfer", _as_fast("A"), (0.95, 1.8, 3.0, 4.5)),
    Goal("B, x FlashInfer", _as_fast("B"), (0.95, 1.75, 2.8, 4.0)),
    Goal("C, x FlashInfer", _as_fast("C"), (0.95, 1.8, 3.0, 4.3)),
    *(Goal(f"{SMALL[name]}, x FlashInfer", _as_fast(name), (1.0,)) for name in ("b1-512", "b32-512", "b1-4096")),
    Goal("one of 131072 among 63 of 1024, time for that of even bytes", _as_long("ragged", "even"), (1.15,), at_most=True),
    *(Goal(f"{rows} query rows, time for one row's", _as_long(f"A-q{rows}", "A"), (1.3,), at_most=True) for rows in (2, 4, 8)),
    *(
        Goal(f"{OTHERS[name]}, share of memory for A's", _of_share(name), (0.8,))
        for name in ("A-d64", "A-d96", "A-d192", "A-d256", "A-g1", "A-g7", "A-g16")
    ),
    *(Goal(f"{OTHERS[name]}, time for 16's", _as_long(name, "A"), (1.0,), at_most=True) for name in ("A-p32", "A-p64", "A-p128")),
    *(
        Goal(f"{OTHERS[name]}, time for A's", _as_long(name, "A"), (1.05,), at_most=True)
        for name in ("A-window", "A-softcap", "A-sinks", "A-alibi")
    ),
    Goal("a window of 1024 over 131072, time for 1 x 1024's", _as_long("B-window-1024", "b1-1024"), (1.05,), at_most=True),
    *(Goal(f"prefill of {what}, TFLOP/s", _tflops(name), (400.0,), form=".0f") for name, what in PREFILL.items()),
    Goal("write of 8192 tokens, µs", _us("w8192"), (18.0,), at_most=True, form=".1f"),
    Goal("write of 64 tokens, x torch's copy without slots", _as_fast("w64"), (1.0,)),
)


def goals(run: Run) -> str:
    return _table(["", "goal", *MODES.values()], [goal.cells(run) for goal in GOALS])


# -- tables -----------------------------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    return tabulate(body, head, tablefmt="github", disable_numparse=True) + "\n"


def _cell(value: float | None, form: str = ".1f") -> str:
    return "" if value is None else format(value, form)


def times(run: Run, settings: dict[str, str], heading: str, peer: str) -> str:
    """Microseconds, a line for each setting; those of eight writes are one's."""

    def us(setting: str, mode: str) -> float | None:
        found = run.us(setting, mode)
        return found / LAYERS if found is not None and setting.endswith(f"-{LAYERS}") else found

    body = [[what, *(_cell(us(name, mode)) for mode in (peer, *MODES))] for name, what in settings.items()]
    return _table([heading, "torch's copy" if peer == COPY else "FlashInfer", *MODES.values()], body)


def prefill(run: Run) -> str:
    body = [[what, *(_cell(run.of(name, mode, "tflops"), ".0f") for mode in (FLASHINFER, *MODES))] for name, what in PREFILL.items()]
    return _table(["prefill", "FlashInfer", *MODES.values()], body)


def readme(run: Run) -> str:
    """What the README shows: A, B and C, and prefill in a sentence."""
    machine = run.machine
    body = []
    for mode, name in {FLASHINFER: "FlashInfer bf16", **{mode: f"`{mode}`" for mode in MODES}}.items():
        a = [_cell(run.us("A", mode)), f"{run.share('A', mode):.0%}".replace("%", " %"), _cell(run.of("A", mode, "x_none"), ".2f")]
        rest = [[_cell(run.us(name, mode)), _cell(run.of(name, mode, "x_peer"), ".2f")] for name in "BC"]
        body.append([name, *a, _cell(run.of("A", mode, "x_peer"), ".2f"), *rest[0], *rest[1]])
    head = [
        "cache",
        "batch 64, context 8192: µs",
        f"of {machine['hbm'] / 1e12:.1f} TB/s",
        "x `none`",
        "x FlashInfer bf16",
        "batch 1, context 131072: µs",
        "x FlashInfer",
        "batch 128, 4096, 64/8 heads: µs",
        "x FlashInfer",
    ]
    return f"""\
Decode on one {machine["gpu"]} (torch {_minor(machine["torch"])}, Triton {_minor(machine["triton"])}, FlashInfer {machine["flashinfer"]}; \
32/8 heads of 128 and blocks of 16 unless said), split-KV merge and
launches included, median of CUDA-graph replays with a cold cache, from one run of
`python benchmarks/run.py --settings decode,prefill,write,more` at commit `{machine["commit"]}`:

{_table(head, body)}"""


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def parts(run: Run) -> dict[str, str]:
    """The generated parts of ``performance.md``, by the name in their marks."""
    return {
        "goals": goals(run),
        "small": times(run, SMALL, "decode", FLASHINFER),
        "prefill": prefill(run),
        "writes": times(run, WRITES, "write", COPY),
        "others": times(run, OTHERS, "", FLASHINFER),
    }


def marks(name: str) -> tuple[str, str]:
    """What stands before and behind a generated part."""
    return f"<!-- {name}: docs/performance_tables.py writes what follows -->", f"<!-- /{name} -->"


README_MARKS: Final = ("<!-- bench-table -->", "<!-- /bench-table -->")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmarks", nargs="?", type=Path, help="a run's figures, to be shown instead")
    given = parser.parse_args(argv).benchmarks
    if given is not None:
        shutil.copyfile(given, DATA)
    run = Run(json.loads(DATA.read_text(encoding="utf-8")))
    begin, end = README_MARKS
    README.write_text(between(README.read_text(encoding="utf-8"), begin, readme(run), end), encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    for name, text in parts(run).items():
        begin, end = marks(name)
        page = between(page, begin, text, end)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
