"""The tables of speed, from one run of the benchmark: ``hatch run tables [BENCHMARKS.json]``.

Writes the generated parts of ``performance-figures.md`` from ``_data/benchmarks.json``. BENCHMARKS.json, if given, takes its place: the
file that a whole ``benchmarks/run.py --settings decode,prefill,write,more`` leaves. From any other nothing is written. The headline table,
in ``performance.md``, is of such a run on an H100, ``_data/benchmarks-h100.json``, which is put there by hand.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tabulate import tabulate

import report
import shapes
from generated import Marks, marks, replaced
from rows import COPY, FLASHATTENTION, FLASHINFER, TURBOMIND

DOCS: Final = Path(__file__).parents[2] / "docs"
DATA: Final = DOCS / "_data" / "benchmarks.json"
H100: Final = DATA.with_name("benchmarks-h100.json")
PAGE: Final = DOCS / "performance.md"
"""Has the headline table."""
FIGURES: Final = DOCS / "performance-figures.md"
"""Has every other table."""
MODES: Final = {
    "none": "`none`",
    "int8_per_token_head": "int8",
    "fp8_per_token_head": "fp8",
    "fp8_per_tensor": "fp8 per tensor",
    "int4_per_token_head": "int4",
    "int3_per_token_head": "int3",
    "int2_per_token_head": "int2",
}
"""In the order of the columns, with their headings."""
DETAILED: Final = ("none", "int8_per_token_head", "int4_per_token_head", "int3_per_token_head", "int2_per_token_head")
"""The columns of most tables: fp8 takes int8's time but where the page says so."""
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
SHOWN_SMALL: Final = ("b1-512", "b32-512", "b1-4096", "ragged", "A-q2", "A-q4", "A-q8")
"""Those of SMALL that have a line. The rest are the goals' measure."""
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
SHOWN: Final = ("A", "A-g16", "A-d64", "A-d96", "A-d192", "A-d256", "A-token-major", "A-cells", "B-window-1024")
"""Those of OTHERS that have a line. The rest take setting A's time, which is a goal."""
LENGTHS: Final = {
    "b64-8100": "64 x 8100",
    "b32-3000": "32 x 3000",
    "b8-5000": "8 x 5000",
    "b32-4016-q4": "32 x 4016, 4 query rows a sequence",
}
"""That no tile divides, as most are."""
PEER_NAMES: Final = {
    FLASHATTENTION: "FlashAttention 3",
    FLASHINFER: "FlashInfer",
    **{mode: f"TurboMind, {mode.rpartition(' ')[2]}" for mode in TURBOMIND},
    COPY: "torch's copy",
}
BESIDE: Final = {
    "A": "64 x 8192",
    "B": "1 x 131072",
    "C": "128 x 4096, 64 query heads",
    "b1-4096": "1 x 4096",
    "b32-512": "32 x 512",
    "b64-8100": "64 x 8100",
    "A-d64": "64 x 8192, heads of 64",
}
COMPARED: Final = ("none", "int8_per_token_head", "int4_per_token_head")
"""The modes that others have a like of."""
PREFILL: Final = {"q8192": "8192", "q2048-32768": "2048 over 32768"}
OTHER_PREFILL: Final = {"q8192-d64": "8192, heads of 64", "q8192-d96": "8192, heads of 96"}
"""Without a goal of their own."""
WRITES: Final = {
    "w64": "64 tokens",
    "w64-8": "64 tokens, each of eight in a graph",
    "w8192": "8192 tokens",
    "w8192-8": "8192 tokens, each of eight in a graph",
}
LAYERS: Final = {one.name: one.layers for one in shapes.LAYERS}
"""How many writes a setting times together; the others, one."""


class Run:
    """One run's figures, by setting and mode. ``content``: what ``benchmarks.json`` holds."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.machine: dict[str, Any] = content["machine"]
        self._rows = {(row["setting"], row["mode"]): row for row in content["rows"]}

    def has(self, setting: str, mode: str) -> bool:
        """Whether the row is there, and did not end in an error."""
        return (setting, mode) in self._rows and not self._rows[setting, mode]["error"]

    def of(self, setting: str, mode: str, figure: str = "us") -> float:
        """``figure``: ``us``, ``hbm`` (a share) or ``tflops``. ``ValueError`` if the run does not have it."""
        found = self._rows.get((setting, mode), {}).get(figure)
        if found is None:
            raise ValueError(f"the run has no {figure} of {mode} in setting {setting}: it was cut off, or that row ended in an error")
        return float(found)


# -- goals ------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Goal:
    """``bounds``: of ``none``, the 8-bit modes, int4 and int3, and int2; or one for all. ``figure`` is held to them as it is printed."""

    what: str
    figure: Callable[[Run, str], float]
    bounds: tuple[float, ...]
    at_most: bool = False
    form: str = ".2f"

    def met(self, run: Run, mode: str) -> bool:
        figure = float(format(self.figure(run, mode), self.form))
        bound = self.bounds[-1] if len(self.bounds) == 1 else self.bounds[_BOUND.get(mode, 1)]
        return figure <= bound if self.at_most else figure >= bound

    @property
    def wanted(self) -> str:
        """The bounds, in words."""
        return f"at {'most' if self.at_most else 'least'} {', '.join(format(bound, 'g') for bound in self.bounds)}"

    def misses(self, run: Run) -> list[str]:
        """The modes that do not meet it, with their figures."""
        return [f"{name} {self.figure(run, mode):{self.form}}" for mode, name in MODES.items() if not self.met(run, mode)]


_BOUND: Final = {"none": 0, "int4_per_token_head": 2, "int3_per_token_head": 2, "int2_per_token_head": 3}
"""Which of a goal's bounds is that of a mode; the other modes' is 1."""


def _times(figure: str, setting: str, other: str) -> Callable[[Run, str], float]:
    """How many times as much as in ``other``."""
    return lambda run, mode: run.of(setting, mode, figure) / run.of(other, mode, figure)


def _beside(peer: str, setting: str) -> Callable[[Run, str], float]:
    """How many times as fast as ``peer``."""
    return lambda run, mode: run.of(setting, peer) / run.of(setting, mode)


def _above_floor(setting: str) -> Callable[[Run, str], float]:
    """µs beside those of the replay of an empty graph."""
    return lambda run, mode: run.of(setting, mode) - run.machine["floor_us"]


def _at_most(what: str, figure: Callable[[Run, str], float], *bounds: float, form: str = ".2f") -> Goal:
    return Goal(what, figure, bounds, at_most=True, form=form)


GOALS: Final = (
    Goal("A, x FlashAttention 3", _beside(FLASHATTENTION, "A"), (0.95, 1.8, 3.4, 5.8)),
    Goal("B, x FlashAttention 3", _beside(FLASHATTENTION, "B"), (0.95, 1.75, 3.3, 5.2)),
    Goal("C, x FlashAttention 3", _beside(FLASHATTENTION, "C"), (0.95, 1.8, 3.4, 5.8)),
    *(_at_most(f"{SMALL[name]}, µs above an empty graph's", _above_floor(name), 6.0, form=".1f") for name in ("b1-512", "b1-4096")),
    _at_most("one of 131072 among 63 of 1024, time for that of even bytes", _times("us", "ragged", "even"), 1.15),
    _at_most("4 query rows, time for one row's", _times("us", "A-q4", "A"), 1.05, 1.05, 1.05, 1.1),
    _at_most("8 query rows, time for one row's", _times("us", "A-q8", "A"), 1.15, 1.15, 1.15, 1.3),
    *(
        Goal(f"{OTHERS[name]}, share of memory for A's", _times("hbm", name, "A"), (0.8,))
        for name in ("A-d64", "A-d96", "A-d192", "A-d256", "A-g1", "A-g7", "A-g16")
    ),
    *(_at_most(f"{OTHERS[name]}, time for 16's", _times("us", name, "A"), 1.0) for name in ("A-p32", "A-p64", "A-p128")),
    *(_at_most(f"{OTHERS[name]}, time for A's", _times("us", name, "A"), 1.05) for name in ("A-window", "A-softcap", "A-sinks", "A-alibi")),
    *(_at_most(f"{OTHERS[name]}, time for A's", _times("us", name, "A"), 1.1) for name in ("A-token-major", "A-cells")),
    _at_most("a window of 1024 over 131072, time for 1 x 1024's", _times("us", "B-window-1024", "b1-1024"), 1.05),
    *(
        Goal(f"prefill of {what}, x FlashAttention 3", _beside(FLASHATTENTION, name), (0.95, 1.0, 0.9, 0.9))
        for name, what in PREFILL.items()
    ),
    *(Goal(f"write of {WRITES[name]}, x torch's copy without slots", _beside(COPY, name), (1.0,)) for name in ("w64", "w8192")),
)


def goals(run: Run) -> str:
    """How many goals every mode meets, and a line for each of the others, with what misses it."""
    missed = [[goal.what, goal.wanted, ", ".join(misses)] for goal in GOALS if (misses := goal.misses(run))]
    return f"""\
Every mode meets {len(GOALS) - len(missed)} of the {len(GOALS)} goals. The others, with the modes that miss them:

{_table(["missed", "goal", "by"], missed)}"""


# -- tables -----------------------------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    return tabulate(body, head, tablefmt="github", disable_numparse=True) + "\n"


def figures(
    run: Run,
    settings: dict[str, str],
    heading: str,
    *peers: str,
    modes: Iterable[str] = DETAILED,
    figure: str = "us",
    form: str = ".1f",
) -> str:
    """A line for each setting; of several writes, what one of them takes. A peer may have no figure."""
    columns = (*peers, *modes)
    body = []
    for setting, what in settings.items():
        known = [mode for mode in columns if mode in MODES or run.has(setting, mode)]
        shown = {mode: format(run.of(setting, mode, figure) / LAYERS.get(setting, 1), form) for mode in known}
        body.append([what, *(shown.get(mode, "") for mode in columns)])
    return _table([heading, *((PEER_NAMES | MODES)[column] for column in columns)], body)


def versions(run: Run) -> str:
    """The GPU of a run, and what it ran with."""
    machine = run.machine
    torch, triton = (".".join(machine[name].split(".")[:2]) for name in ("torch", "triton"))
    return f"{machine['gpu']} (torch {torch}, Triton {triton}"


def abc(run: Run) -> str:
    """Decode in settings A, B and C, of the modes that the run has."""
    body = []
    known = {mode: f"`{mode}`" for mode in MODES if run.has("A", mode)}
    for mode, name in {FLASHATTENTION: f"{PEER_NAMES[FLASHATTENTION]} bf16", **known}.items():
        share = f"{100 * run.of('A', mode, 'hbm'):.0f} %"
        times_as_fast = [format(run.of(setting, FLASHATTENTION) / run.of(setting, mode), ".2f") for setting in "ABC"]
        a, b, c = (format(run.of(setting, mode), ".1f") for setting in "ABC")
        body.append([name, a, share, times_as_fast[0], b, times_as_fast[1], c, times_as_fast[2]])
    head = [
        "cache",
        "batch 64, context 8192: µs",
        f"of {run.machine['hbm'] / 1e12:.1f} TB/s",
        f"x {PEER_NAMES[FLASHATTENTION]} bf16",
        "batch 1, context 131072: µs",
        f"x {PEER_NAMES[FLASHATTENTION]}",
        "batch 128, 4096, 64/8 heads: µs",
        f"x {PEER_NAMES[FLASHATTENTION]}",
    ]
    return _table(head, body)


def headline(run: Run) -> str:
    """Settings A, B and C under the conditions of their run."""
    return f"""\
Decode on one {versions(run)}; 32/8 heads of 128 and blocks of 16 unless said), split-KV combine and
launches included, median of CUDA-graph replays with a cold cache, from one run of
`python benchmarks/run.py --settings decode,prefill,write,more` at commit `{run.machine["commit"]}`. FlashAttention 3 is vLLM 0.26's build:

{abc(run)}"""


def introduction(run: Run) -> str:
    """The same settings of the run that the other tables are of, whose conditions the headline says."""
    return f"""\
One {versions(run)}), commit `{run.machine["commit"]}`, otherwise as on the H100:

{abc(run)}"""


def beside(run: Run) -> str:
    """Decode by others' kernels, and by the modes that these have a like of."""
    machine = run.machine
    others = (FLASHATTENTION, FLASHINFER, *TURBOMIND)
    return f"""\
FlashAttention 3 of vLLM 0.26, FlashInfer {machine.get("flashinfer")}, TurboMind of lmdeploy {machine.get("lmdeploy")}, in µs:

{figures(run, BESIDE, "decode", *others, modes=COMPARED)}"""


def pages(run: Run, h100: Run) -> dict[Path, dict[Marks, str]]:
    """By page, what is generated, by the marks before and behind it."""
    return {
        PAGE: {
            _marks("headline"): headline(h100),
        },
        FIGURES: {
            _marks("introduction"): introduction(run),
            _marks("beside"): beside(run),
            _marks("small"): figures(run, {name: SMALL[name] for name in SHOWN_SMALL} | LENGTHS, "decode", FLASHATTENTION),
            _marks("prefill"): figures(
                run, PREFILL | OTHER_PREFILL, "prefill", FLASHATTENTION, FLASHINFER, modes=MODES, figure="tflops", form=".0f"
            ),
            _marks("writes"): figures(run, WRITES, "write", COPY, FLASHINFER),
            _marks("others"): figures(run, {name: OTHERS[name] for name in SHOWN}, "", FLASHATTENTION),
            _marks("goals"): goals(run),
        },
    }


def _marks(name: str) -> Marks:
    return marks(name, "tools/tables/performance_tables.py")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmarks", nargs="?", type=Path, help="a run's figures, to be shown instead")
    given = parser.parse_args(argv).benchmarks
    try:
        generated = pages(Run(report.load(given or DATA)), Run(report.load(H100)))
    except ValueError as problem:
        parser.error(str(problem))
    for path, parts in generated.items():
        path.write_text(replaced(path.read_text(encoding="utf-8"), parts), encoding="utf-8")
    if given is not None:
        shutil.copyfile(given, DATA)


if __name__ == "__main__":
    main()
