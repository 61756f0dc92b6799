"""The figure of README and start page: ``hatch run tables`` draws it from tables of accuracy.md and performance.md.

Writes ``_static/modes-light.svg`` and ``_static/modes-dark.svg``. Each names its script in its metadata, and keeps the figures that it
shows, by which the tests know whether it is up to date.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt

from generated import table

DOCS = Path(__file__).parents[2] / "docs"
STATIC = DOCS / "_static"
SCRIPT = "tools/tables/plots.py"
THEMES = {"light": ("#1b1f24", "#5b7fb4"), "dark": ("#d6dae0", "#7ea6e0")}
"""Of text and lines, and of bars."""


@dataclass(frozen=True)
class Bar:
    """One mode: how many times smaller than bf16, decode against FlashAttention 3 bf16, and loss in % of bits per byte."""

    mode: str
    times_smaller: float
    times_as_fast: float
    loss: float


def bars() -> list[Bar]:
    """The figures of every mode, in the order of the accuracy page's table of rows."""
    accuracy, performance = ((DOCS / page).read_text(encoding="utf-8") for page in ("accuracy.md", "performance.md"))
    smaller = {row["mode"]: row["times smaller"] for row in table(accuracy, "mode")}
    loss = {row["cache"]: row["in %"] for row in table(accuracy, "cache", "<!-- demo-table -->")}
    speed = {row["cache"]: row["x FlashAttention 3 bf16"] for row in table(performance, "cache", "<!-- headline:")}
    return [Bar(mode, float(smaller[mode]), float(speed[mode]), float(loss[mode] or 0)) for mode in smaller]


def style(text: str) -> dict[Any, Any]:
    """matplotlib's settings for text and lines of one color."""
    colors = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), text)
    return {**colors, "font.family": "sans-serif", "font.size": 10}


def draw(found: list[Bar], fill: str) -> Any:
    figure, axes = plt.subplots(1, 3, figsize=(7.6, 2.6), sharey=True, layout="constrained")
    panels = (
        ("cache, times smaller\nthan bf16", [bar.times_smaller for bar in found], "{:.2f}"),
        ("decode, times as fast as\nFlashAttention 3 bf16", [bar.times_as_fast for bar in found], "{:.2f}"),
        ("loss of a small model,\nbits per byte", [bar.loss for bar in found], "+{:.1f} %"),
    )
    for ax, (title, values, form) in zip(axes, panels, strict=True):
        drawn = ax.barh([bar.mode for bar in found], values, color=fill, height=0.7)
        ax.bar_label(drawn, [form.format(value) for value in values], padding=4)
        ax.set_title(title, fontsize=10, loc="left")
        ax.set_xlim(0, 1.25 * max(values))
        ax.xaxis.set_visible(False)
        ax.spines[["top", "right", "bottom"]].set_visible(False)
        ax.tick_params(axis="y", length=0)
    axes[0].invert_yaxis()
    return figure


def write(name: str, script: str, kept: str, draw: Callable[[str], Any]) -> None:
    """Write ``_static/NAME-light.svg`` and ``-dark.svg``: figures of ``draw(color)``, drawn by ``script``, with ``kept`` as description."""
    for theme, (text, fill) in THEMES.items():
        with plt.rc_context({**style(text), "svg.hashsalt": "kvq", "svg.fonttype": "none"}):
            figure = draw(fill)
            metadata = {"Date": None, "Creator": script, "Description": kept}
            figure.savefig(STATIC / f"{name}-{theme}.svg", transparent=True, metadata=metadata)
        plt.close(figure)


def kept_in(name: str, theme: str) -> tuple[str, str]:
    """The script and the description that :func:`write` has put into a figure."""
    tree, dc = ElementTree.parse(STATIC / f"{name}-{theme}.svg"), "{http://purl.org/dc/elements/1.1/}"
    return tree.findtext(f".//{dc}creator//{dc}title", ""), tree.findtext(f".//{dc}description", "")


def main() -> None:
    found = bars()
    write("modes", SCRIPT, json.dumps([asdict(bar) for bar in found]), partial(draw, found))


if __name__ == "__main__":
    main()
