"""From the accuracy report's figures to the generated part of ``accuracy.md`` and its plots."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Final

from matplotlib import pyplot as plt

import accuracy_agreement as agreement
import plots
from accuracy_measure import HINT, LETTERS
from generated import Marks, marks, replaced

PAGE: Final = Path(__file__).parents[2] / "docs" / "accuracy.md"
SCRIPT: Final = "tools/accuracy/accuracy_report.py"
COLORS: Final = ("#8a8a8a", "#5b8fd0", "#d98f3f", "#4fa37a", "#c9605f", "#9778c4", "#c9a227", "#3fa7b5")
"""Of ``none`` and the other modes, on light ground and on dark."""
UNSEEN: Final = 4.70
"""log2 26: bits of a letter drawn at random."""

Content = dict[str, Any]
"""What ``_data/accuracy.json`` holds."""


def figure_key(content: Content) -> str:
    """What the plots are made of, in short: they carry it as their description."""
    return hashlib.sha256(json.dumps(content["modes"], sort_keys=True).encode()).hexdigest()


def write(content: Content, gpu: Content | None) -> None:
    """The page's generated parts, and the plots in both themes. ``gpu``: the figures of a GPU, if there are some."""
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), parts(content, gpu)), encoding="utf-8")
    for name, draw in (("position", draw_positions), ("layers", draw_layers), ("needles", draw_needles)):
        plots.write(f"accuracy-{name}", SCRIPT, figure_key(content), partial(draw, content["modes"]))


def parts(content: Content, gpu: Content | None) -> dict[Marks, str]:
    """What is generated, by its marks."""
    return {marks("report", SCRIPT): generated(content), marks("agreement", SCRIPT): agreed(content, gpu)}


# -- text -----------------------------------------------------------------------------------------------------------------------


def generated(content: Content) -> str:
    """All between the two comments of the page."""
    sizes, facts = content["sizes"], content["machine"]
    return f"""\
Measured {facts["date"]} at commit `{facts["commit"]}` on {facts["device"]} (torch {facts["torch"]}), by
`hatch run accuracy`: {sizes["documents"]} documents of {sizes["ends"][-1]:,} bytes, {sizes["recorded"]} for the layers, whose errors are of
exact rows and so not carried along. Bars are standard errors over documents.

{image("position", "Bits per byte above none by position")}

{image("layers", "SNR of keys and values, and attention's error, by layer")}

{image("needles", "Bits a letter of a needle, and letters right, by distance")}

*Needle*: the text defines a function with a name of {LETTERS} random letters, and later asks for it by the first {HINT}; scored are the
others.
"""


def agreed(content: Content, gpu: Content | None) -> str:
    """How far apart the figures of CPU and GPU are."""
    if gpu is None:
        return "No GPU's figures are kept with these: measure them on yours.\n"
    found = agreement.agreements(content, gpu)
    farthest = max((mode.farthest for mode in found), key=lambda cell: cell.errors_apart)
    machines = [f"{x['machine']['device']} (torch {x['machine']['torch']})" for x in (content, gpu)]
    differences = [mode.difference.mean for mode in found]
    span = f"{min(differences):+.5f} to {max(differences):+.5f}"
    return f"""\
{machines[0]}, and {machines[1]} at commit `{gpu["machine"]["commit"]}`: of {sum(mode.cells for mode in found)} figures of {len(found)}
modes the farthest are {farthest.errors_apart:.1f} standard errors apart. Bits per byte differ by {span}.
"""


def image(name: str, alt: str) -> str:
    """A plot, light and dark."""
    return "\n".join(f"```{{image}} _static/accuracy-{name}-{theme}.svg\n:alt: {alt}\n:class: only-{theme}\n```" for theme in plots.THEMES)


# -- plots ----------------------------------------------------------------------------------------------------------------------


def canvas(rows: int, columns: int, height: float) -> tuple[Any, list[Any]]:
    """A figure in the page's width, and its axes in reading order."""
    figure, axes = plt.subplots(rows, columns, figsize=(7.6, height), layout="constrained", squeeze=False)
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
        ax.patch.set_alpha(0)
    return figure, list(axes.flat)


def line(ax: Any, where: Sequence[float], found: Sequence[dict[str, float]], color: str, label: str = "", factor: float = 1.0) -> None:
    """Means with error bars."""
    means, errors = ([factor * x[part] for x in found] for part in ("mean", "error"))
    ax.errorbar(where, means, yerr=errors, color=color, label=label, marker="o", markersize=3, linewidth=1.2, capsize=2)


def colored(modes: Sequence[Content]) -> Iterator[tuple[Content, str]]:
    """The modes, each with its color."""
    return zip(modes, cycle(COLORS), strict=False)


def mark(ax: Any, y: float) -> None:
    """A thin line at a height that values are compared with."""
    ax.axhline(y, color=plt.rcParams["text.color"], linewidth=0.7, linestyle="--")


def legend(figure: Any, ax: Any) -> None:
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)


def draw_positions(modes: Sequence[Content], fill: str) -> Any:
    """A panel for each mode, each on its own scale: they differ by factors of thousands."""
    columns = 3
    rows = -(-len(modes) // columns)
    figure, axes = canvas(rows, columns, 2.1 * rows)
    for ax in axes[len(modes) :]:
        ax.remove()
    for mode, ax in zip(modes, axes, strict=False):
        exact = mode is modes[0]
        middles = [(s["first"] + s["last"]) / 2 for s in mode["stretches"]]
        line(ax, middles, [s["bits" if exact else "difference"] for s in mode["stretches"]], fill)
        ax.set_title(f"{mode['mode']}\n{'bits per byte' if exact else 'bits per byte above none'}", fontsize=10, loc="left")
        if not exact:
            mark(ax, 0)
        ax.set_xlim(0, mode["whole"]["last"])
    for ax in axes[max(len(modes) - columns, 0) : len(modes)]:
        ax.set_xlabel("byte of the document")
    return figure


def draw_layers(modes: Sequence[Content], fill: str) -> Any:
    figure, axes = canvas(1, 3, 3.1)
    panels = (
        ("key_snr", "keys, SNR in dB", 1.0),
        ("value_snr", "values, SNR in dB", 1.0),
        ("output_error", "attention's output,\nerror in %", 100.0),
    )
    for ax, (figures, title, factor) in zip(axes, panels, strict=True):
        for mode, color in list(colored(modes))[1:]:
            line(ax, range(len(mode["layers"])), [layer[figures] for layer in mode["layers"]], color, mode["mode"], factor)
        ax.set_title(title, fontsize=10, loc="left")
        ax.set(xlabel="layer", xticks=range(len(modes[1]["layers"])))
    axes[0].set_ylim(bottom=0)
    axes[1].set_ylim(bottom=0)
    axes[2].set_yscale("log")
    legend(figure, axes[0])
    return figure


def draw_needles(modes: Sequence[Content], fill: str) -> Any:
    figure, (cost, share) = canvas(1, 2, 3.3)
    distances = [recall["distance"] for recall in modes[0]["recalls"]]
    for mode, color in colored(modes):
        line(cost, distances, [recall["bits"] for recall in mode["recalls"]], color, mode["mode"])
        line(share, distances, [recall["likeliest"] for recall in mode["recalls"]], color, factor=100)
    mark(cost, UNSEEN)
    cost.text(distances[len(distances) // 2], UNSEEN, "a random letter", va="top", ha="center", fontsize=8)
    cost.set_title("bits a letter", fontsize=10, loc="left")
    share.set_title("letters that were the likeliest byte, %", fontsize=10, loc="left")
    for ax in (cost, share):
        ax.set_ylim(bottom=0)
        ax.set_xscale("log", base=2)
        ax.set(xlabel="bytes since the definition", xticks=distances, xticklabels=distances)
        ax.minorticks_off()
        ax.tick_params(axis="x", labelsize=9)
    legend(figure, cost)
    return figure
