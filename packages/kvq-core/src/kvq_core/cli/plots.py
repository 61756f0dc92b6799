"""Plots of the commands' figures: rows of horizontal bars, one row a mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvq_core.errors import KVQError


class PlotError(KVQError):
    """A plot was asked for, and what draws it is not installed."""


def need_matplotlib() -> None:
    """Raise :class:`PlotError` if matplotlib cannot be had."""
    try:
        import matplotlib
    except ImportError:
        raise PlotError("plots need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")


@contextmanager
def canvas(path: Path, title: str, rows: int, columns: int) -> Iterator[Any]:
    """``columns`` matplotlib axes side by side that share their ``rows``; written to ``path`` when the block ends.

    Raises:
        PlotError: matplotlib is not installed.
    """
    need_matplotlib()
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, columns, figsize=(5 * columns, 0.5 * rows + 1.6), sharey=True, layout="constrained", squeeze=False)
    try:
        yield axes[0]
        for axis in axes[0]:
            axis.margins(x=0.25)
            if axis.get_xscale() == "linear":
                axis.locator_params(axis="x", nbins=5)
        figure.suptitle(title, fontsize=10)
        figure.savefig(path, dpi=120, format="png")
    finally:
        plt.close(figure)
