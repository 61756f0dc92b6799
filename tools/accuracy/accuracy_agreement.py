"""Whether two runs of the accuracy report agree, a CPU's and a GPU's: every figure of one beside that of the other.

Both read the same text with the same float32 weights, so that what is left between them is rounding: kernels add in another order, keep
weights and results in bfloat16, and now and then fall on the other side of a code's boundary. That must not be more than what the figures'
own standard errors leave open.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from accuracy_measure import mean_of
from kvq_core.evaluation import Estimate

Content = dict[str, Any]
"""What ``_data/accuracy.json`` holds."""
LIMIT: Final = 4.0
"""Standard errors that two figures may be apart. Most have their errors from the documents, which are the same, and are much closer; of the
few dozen that are rounding alone (``int8``'s loss, say), over two dozen documents, chance puts one beyond in one run of fifty."""
ROUNDING: Final = 2 * 2.0**-9
"""Relative error (rms, at most) of attention's output where weights and results are bfloat16, in a mode's run and in that of ``none``."""


@dataclass(frozen=True)
class Cell:
    """One figure, twice. ``rounding``: how far rounding alone may put them apart."""

    mode: str
    where: str
    first: Estimate
    second: Estimate
    rounding: float = 0.0

    @property
    def errors_apart(self) -> float:
        """How many standard errors (of the difference, if both were independent) the figures are apart, beyond rounding."""
        apart = abs(self.first.mean - self.second.mean) - self.rounding
        return apart / max(math.hypot(self.first.error, self.second.error), 1e-12) if apart > 0 else 0.0


@dataclass(frozen=True)
class Agreement:
    """One mode's: its bits per byte in both runs, their difference paired by document, and the figure that is farthest apart."""

    mode: str
    bits: tuple[float, float]
    difference: Estimate
    cells: int
    farthest: Cell


def agreements(first: Content, second: Content) -> list[Agreement]:
    """Mode by mode.

    Raises:
        ValueError: the runs measured different things, or different modes.
    """
    if first["sizes"] != second["sizes"]:
        raise ValueError(f"sizes: got {first['sizes']} and {second['sizes']}, need the same")
    names = [[mode["mode"] for mode in content["modes"]] for content in (first, second)]
    if set(names[0]) != set(names[1]):
        raise ValueError(f"modes: got {', '.join(names[0])} and {', '.join(names[1])}, need the same")
    others = {mode["mode"]: mode for mode in second["modes"]}
    found = []
    for mode in first["modes"]:
        other = others[mode["mode"]]
        every = list(cells(mode, other))
        bits = mode["whole"]["bits"]["mean"], other["whole"]["bits"]["mean"]
        paired = mean_of([b - a for a, b in zip(mode["documents"], other["documents"], strict=True)])
        found.append(Agreement(mode["mode"], bits, paired, len(every), max(every, key=lambda cell: cell.errors_apart)))
    return found


def cells(first: Content, second: Content) -> Iterator[Cell]:
    """Every figure of a mode, in both runs."""

    def pair(where: str, a: Content, b: Content, *names: str) -> Iterator[Cell]:
        for name in names:
            one, two = (Estimate(x[name]["mean"], x[name]["error"]) for x in (a, b))
            rounding = math.hypot(one.mean, ROUNDING) - one.mean if name == "output_error" else 0.0
            yield Cell(first["mode"], f"{name.replace('_', ' ')}, {where}", one, two, rounding)

    yield from pair("all bytes", first["whole"], second["whole"], "bits", "difference")
    for a, b in zip(first["stretches"], second["stretches"], strict=True):
        yield from pair(f"bytes {a['first']:,} to {a['last']:,}", a, b, "bits", "difference")
    for a, b in zip(first["smoothed"], second["smoothed"], strict=True):
        yield from pair(f"keys smoothed: {a['kind'] or 'no'}", a["whole"], b["whole"], "bits", "difference")
    for layer, (a, b) in enumerate(zip(first["layers"], second["layers"], strict=True)):
        yield from pair(f"layer {layer}", a, b, "key_snr", "value_snr", "output_error")
    for a, b in zip(first["recalls"], second["recalls"], strict=True):
        yield from pair(f"needles at {a['distance']:,}", a, b, "bits", "difference", "likeliest")


def agree(found: list[Agreement]) -> bool:
    """Whether no figure is too far apart."""
    return all(mode.farthest.errors_apart <= LIMIT for mode in found)


def table(found: list[Agreement], first: Content, second: Content) -> str:
    """Both runs in Markdown."""
    runs = [f"{content['machine']['device']} (torch {content['machine']['torch']})" for content in (first, second)]
    lines = [
        f"*CPU*: {runs[0]}. *GPU*: {runs[1]}, commit `{second['machine']['commit']}`.",
        "",
        "| cache | bits per byte, GPU less CPU | farthest apart of all figures |",
        "|---|---|---|",
    ]
    for mode in found:
        cell = mode.farthest
        lines.append(f"| `{mode.mode}` | {mode.difference:+.5f} | {cell.where}: {cell.errors_apart:.1f} standard errors |")
    return "\n".join(lines)
