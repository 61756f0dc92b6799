"""Tasks in every mode, some items at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvq_core.evaluation.journal import Journal, Records
from kvq_core.evaluation.options import CacheConfig, cache_arguments
from kvq_core.evaluation.results import Estimate
from kvq_core.evaluation.subject import Passage, Subject

if TYPE_CHECKING:
    from kvq_core.evaluation.tasks.task import Item, Scores, Task


@dataclass(frozen=True)
class TaskResult:
    """One figure of one mode in a task: of ``n`` trials, the share that is right, or a mean.

    Standard errors are over items, whose trials are not independent. ``difference`` is to the first mode, item by item.
    """

    task: str
    mode: str
    label: str
    n: int
    value: Estimate
    difference: Estimate
    is_share: bool


@dataclass(frozen=True)
class TaskRun:
    """Results in the order of the modes, and by mode what stopped those that have none."""

    task: Task
    results: tuple[TaskResult, ...]
    failures: dict[str, BaseException]


@torch.inference_mode()
def run_task(
    task: Task,
    subject: Subject,
    configs: Sequence[CacheConfig],
    passages: Sequence[Passage],
    *,
    calibration: Passage,
    length: int,
    count: int,
    chunk: int = 128,
    batch: int = 1,
    report: Callable[[int, Mapping[str, Scores]], object] = lambda count, scores: None,
    journal: Journal | None = None,
) -> TaskRun:
    """Put ``task`` to every one of ``configs``, the first of which the others are compared with.

    Args:
        passages: text for tasks that want some. ``calibration``: as of :func:`kvq_core.evaluation.evaluate`.
        length, count: of the items, as of :meth:`Task.items`.
        chunk, batch: as of :func:`kvq_core.evaluation.evaluate`; ``batch`` items are read side by side.
        report: called after each item, with how many there are and what each mode did.
        journal: what it holds is not done again; what is done is added.

    Raises:
        Exception: what stopped the first mode. What stops another is kept as its failure.
    """
    journal = Journal() if journal is None else journal
    arguments = cache_arguments(configs, subject, calibration)
    items = task.items(subject, passages, length, count)
    failures: dict[str, BaseException] = {}
    scores: dict[str, list[Scores]] = {config.label: [] for config in configs}
    kept = {config.label: Records(journal, task.name, config) for config in configs}
    for first in range(0, len(items), batch):
        group = items[first : first + batch]
        for config, given in zip(configs, arguments, strict=True):
            if config.label in failures:
                continue
            try:
                _read(task, subject, config, given, group, calibration, chunk, kept[config.label])
            except KeyboardInterrupt:
                raise
            except BaseException as problem:  # SystemExit, too: a mode's own code runs here
                if config is configs[0]:
                    raise
                failures[config.label] = problem
        found = {label: records.get(group) for label, records in kept.items() if label not in failures}
        for n in range(len(group)):
            records = {label: of_group[n] for label, of_group in found.items()}
            exact = records[configs[0].label]
            for label, record in records.items():
                if record is not None and exact is not None:
                    scores[label].append(task.scores(record, exact))
            report(len(items), {label: scores[label][-1] for label in records})
    reference = scores[configs[0].label]
    results = [
        _result(task, label, each, found, reference)
        for label, found in scores.items()
        if label not in failures
        for each in dict.fromkeys(name for score in found for name in score)
    ]
    return TaskRun(task, tuple(results), failures)


def _read(
    task: Task,
    subject: Subject,
    config: CacheConfig,
    given: Mapping[str, Any],
    group: Sequence[Item],
    calibration: Passage,
    chunk: int,
    records: Records,
) -> None:
    """Add a mode's records of ``group``, unless all are there."""
    if None in records.get(group):
        session = subject.open(config.backend, [item.space for item in group], calibration, **given)
        records.add(group, task.read(subject, session, group, chunk))


def _result(task: Task, mode: str, label: str, found: Sequence[Scores], reference: Sequence[Scores]) -> TaskResult:
    pairs = [(mine[label], its[label]) for mine, its in zip(found, reference, strict=True) if label in mine]
    right, counts = [float(mine[0]) for mine, _ in pairs], [float(mine[1]) for mine, _ in pairs]
    difference = Estimate.ratio([mine[0] - its[0] for mine, its in pairs], counts)
    return TaskResult(task.name, mode, label, int(sum(counts)), Estimate.ratio(right, counts), difference, label not in task.means)
