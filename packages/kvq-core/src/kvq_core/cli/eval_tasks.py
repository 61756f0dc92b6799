"""How ``kvq eval`` prints and draws what tasks found."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq_core.cli import output

if TYPE_CHECKING:
    from kvq_core.evaluation import Estimate
    from kvq_core.evaluation.tasks import TaskResult, TaskRun


def records(runs: Sequence[TaskRun]) -> list[dict[str, Any]]:
    """One flat line a figure."""
    return [
        {
            "task": r.task,
            "mode": r.mode,
            "measure": r.label,
            "n": r.n,
            "value": r.value.mean,
            "value_se": r.value.error,
            "difference": r.difference.mean,
            "difference_se": r.difference.error,
        }
        for run in runs
        for r in run.results
    ]


def tables(runs: Sequence[TaskRun]) -> Iterator[str]:
    """One text a task: a column for each of its measures, with the difference to the first mode beside the first of them."""
    for run in runs:
        modes, labels = (list(dict.fromkeys(given)) for given in zip(*((r.mode, r.label) for r in run.results), strict=True))
        by_place = {(r.mode, r.label): r for r in run.results}
        first, *others = [by_place[modes[0], label] for label in labels]
        header = ["mode", _name(first), f"difference\nto {modes[0]}", *map(_name, others)]
        lines = []
        for mode in modes:
            main, *rest = [by_place[mode, label] for label in labels]
            difference = "" if mode == modes[0] else _figure(main.difference, main.is_share, "+")
            lines.append([mode, _figure(main.value, main.is_share), difference, *(_figure(r.value, r.is_share) for r in rest)])
        yield f"{run.task.title} (± s.e. over items)\n\n{output.table(header, lines)}"


def _name(result: TaskResult) -> str:
    return f"{result.label}\n(n = {result.n})"


def _figure(estimate: Estimate, is_share: bool, sign: str = "") -> str:
    from kvq_core.evaluation import Estimate

    if not is_share:
        return f"{estimate:{sign}.1f}"
    return f"{Estimate(100 * estimate.mean, 100 * estimate.error):{sign}.1f} %"


def plot(runs: Sequence[TaskRun], title: str, path: Path) -> None:
    """A panel a task: its first measure."""
    from kvq_core.cli.plots import canvas

    modes = list(dict.fromkeys(r.mode for run in runs for r in run.results))
    with canvas(path, title, len(modes), len(runs)) as axes:
        for axis, run in zip(axes, runs, strict=True):
            shown = [r for r in run.results if r.label == run.results[0].label]
            errors = [0 if math.isnan(r.value.error) else 100 * r.value.error for r in shown]
            axis.errorbar(
                [100 * r.value.mean for r in shown], [modes.index(r.mode) for r in shown], xerr=errors, fmt="o", color="tab:red", capsize=3
            )
            axis.set(xlabel=f"{run.task.name}: {run.results[0].label}, % (± s.e.)", yticks=range(len(modes)), yticklabels=modes)
        axes[0].invert_yaxis()
