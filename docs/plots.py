"""The start page's figure, from the README's tables: ``hatch run python docs/plots.py`` after a table has changed.

Writes ``_static/modes-light.svg`` and ``_static/modes-dark.svg``. Each keeps the figures that it shows in its description, by which the
tests know whether it is up to date.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt

DOCS = Path(__file__).parent
README = DOCS.parent / "README.md"
THEMES = {"light": ("#1b1f24", "#5b7fb4"), "dark": ("#d6dae0", "#7ea6e0")}
"""Of text and lines, and of bars."""


@dataclass(frozen=True)
class Bar:
    """One mode: how many times smaller than bf16, decode against FlashInfer bf16, and loss in % of bits per byte."""

    mode: str
    times_smaller: float
    times_as_fast: float
    loss: float


def table(text: str, first_cell: str, after: str = "") -> list[dict[str, str]]:
    """The rows of the Markdown table whose first heading is ``first_cell``, behind ``after``: cells by heading, without backticks."""
    lines = text[text.index(after) :].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_cell} |"))
    head, _, *body = [
        [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]
        for line in takewhile(lambda line: line[:1] == "|", lines[start:])
    ]
    # Where headings repeat, the first column of that name counts.
    return [dict(reversed(list(zip(head, cells, strict=True)))) for cells in body]


def bars(readme: str) -> list[Bar]:
    """The figures of every mode, in the order of the README's table of modes."""
    smaller = {row["mode"]: row["times smaller"] for row in table(readme, "mode")}
    loss = {row["cache"]: row["in %"] for row in table(readme, "cache", "<!-- demo-table -->")}
    speed = {row["cache"]: row["x FlashInfer bf16"] for row in table(readme, "cache", "<!-- bench-table -->")}
    return [Bar(mode, float(smaller[mode]), float(speed[mode]), float(loss[mode] or 0)) for mode in smaller]


def draw(found: list[Bar], text: str, fill: str) -> Any:
    style: dict[Any, Any] = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), text)
    with plt.rc_context({**style, "font.family": "sans-serif", "font.size": 10}):
        figure, axes = plt.subplots(1, 3, figsize=(7.6, 2.6), sharey=True, layout="constrained")
        panels = (
            ("cache, times smaller\nthan bf16", [bar.times_smaller for bar in found], "{:.2f}"),
            ("decode, times as fast as\nFlashInfer bf16", [bar.times_as_fast for bar in found], "{:.2f}"),
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


def main() -> None:
    found = bars(README.read_text(encoding="utf-8"))
    kept = json.dumps([asdict(bar) for bar in found])
    for name, colors in THEMES.items():
        figure = draw(found, *colors)
        with plt.rc_context({"svg.hashsalt": "kvq", "svg.fonttype": "none"}):
            figure.savefig(DOCS / "_static" / f"modes-{name}.svg", transparent=True, metadata={"Date": None, "Description": kept})
        plt.close(figure)


if __name__ == "__main__":
    main()
