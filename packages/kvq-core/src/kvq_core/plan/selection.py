"""Which of a class's candidates is kept: the present choice, unless another is right and wins by more than noise, twice."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from kvq_core.plan.choices import Choice
from kvq_core.plan.table import Alternative, Measurement

NOISE = 0.02
"""Share of the present choice's time that says nothing."""
CONTENDERS = 3
"""So many of the best are measured again, beside the present choice."""
ROUNDS = 3

FaultOf = Callable[[Choice], str]
"""What is wrong with a choice's results; "" if they are right."""
Measure = Callable[[str, Sequence[Choice]], Sequence[float | str]]
"""Microseconds of each choice in a setting, or why there are none; the choices are measured in the order given."""


@dataclass
class Trial:
    """What became of one candidate. ``us`` by setting; a ``fault`` excludes it."""

    choice: Choice
    fault: str = ""
    us: dict[str, float] = field(default_factory=dict)

    def ratios(self, present: Mapping[str, float]) -> list[float]:
        """Its time in each setting over that of the present choice."""
        return [self.us[setting] / time for setting, time in present.items()]

    def ratio(self, present: Mapping[str, float]) -> float:
        """The geometric mean of them; infinite for one that is out."""
        return math.inf if self.fault else statistics.geometric_mean(self.ratios(present))


@dataclass(frozen=True)
class Outcome:
    """All trials, the present choice's first, and the one that is kept."""

    trials: tuple[Trial, ...]
    kept: Trial

    @property
    def present(self) -> Trial:
        return self.trials[0]

    @property
    def changed(self) -> bool:
        return self.kept is not self.present

    def measurements(self, run: str, mode: str) -> tuple[Measurement, ...]:
        """What a table says of the kept choice: its time in each setting, and those of all others."""
        return tuple(Measurement(run, mode, setting, us, "us", tuple(self._others(setting))) for setting, us in self.kept.us.items())

    def _others(self, setting: str) -> Iterator[Alternative]:
        kept = asdict(self.kept.choice)
        for trial in self.trials:
            if trial is not self.kept and not trial.fault:
                differs = {name: value for name, value in asdict(trial.choice).items() if value != kept[name]}
                yield Alternative(differs, trial.us[setting])


def select(choices: Sequence[Choice], settings: Sequence[str], fault_of: FaultOf, measure: Measure) -> Outcome:
    """Try ``choices``, the first of which is the present one, in ``settings``.

    Another is kept if its results are right, if it is faster by more than :data:`NOISE` in the geometric mean over the settings and slower
    by more than that in none, and if both hold again when it is measured in turn with the present one.
    """
    trials = [Trial(choice, fault_of(choice)) for choice in choices]
    for setting in settings:
        running = [trial for trial in trials if not trial.fault]
        for trial, found in zip(running, measure(setting, [trial.choice for trial in running]), strict=True):
            _note(trial, setting, found)
    present = trials[0]
    if present.fault:
        return Outcome(tuple(trials), present)
    contenders = sorted((trial for trial in trials[1:] if _wins(trial, present)), key=lambda trial: trial.ratio(present.us))
    for contender in contenders[:CONTENDERS]:
        if _wins(*_again(contender, present, settings, measure)):
            return Outcome(tuple(trials), contender)
    return Outcome(tuple(trials), present)


def _note(trial: Trial, setting: str, found: float | str) -> None:
    if isinstance(found, str):
        trial.fault = found
    else:
        trial.us[setting] = found


def _wins(trial: Trial, present: Trial) -> bool:
    if trial.fault or present.fault:
        return False
    return trial.ratio(present.us) < 1 - NOISE and max(trial.ratios(present.us)) <= 1 + NOISE


def _again(contender: Trial, present: Trial, settings: Sequence[str], measure: Measure) -> tuple[Trial, Trial]:
    """The two of them, measured in turn: medians."""
    pair = (Trial(contender.choice), Trial(present.choice))
    for setting in settings:
        found = measure(setting, [trial.choice for trial in pair] * ROUNDS)
        for i, trial in enumerate(pair):
            faults = [one for one in found[i::2] if isinstance(one, str)]
            _note(trial, setting, faults[0] if faults else statistics.median(one for one in found[i::2] if not isinstance(one, str)))
    return pair
