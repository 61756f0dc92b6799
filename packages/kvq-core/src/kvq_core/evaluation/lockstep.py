"""Every mode reads the same text at the same time, so that each position's distributions can be compared without keeping them all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from kvq_core.errors import ArgumentError
from kvq_core.evaluation.results import ModeResult, Tally
from kvq_core.evaluation.subject import Passage, Session, Subject

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend


@dataclass(frozen=True)
class Evaluation:
    """A result a mode, ``none`` first, and by mode what stopped those that have none."""

    results: tuple[ModeResult, ...]
    failures: dict[str, BaseException]


@dataclass
class _Run:
    """One mode's way through the text."""

    backend: QuantKVBackend
    tallies: list[Tally] = field(default_factory=list)
    seconds: float = 0.0
    session: Session | None = None
    held: int = 0
    """Device bytes of its session."""
    peak: int = 0
    """The most it held, work of the moment included."""
    failure: BaseException | None = None


@torch.inference_mode()
def evaluate(
    subject: Subject,
    backends: Sequence[QuantKVBackend],
    passages: Sequence[Passage],
    *,
    calibration: Passage,
    chunk: int = 128,
    batch: int = 16,
    tick: Callable[[str, int], object] = lambda mode, tokens: None,
) -> Evaluation:
    """Read ``passages`` through the cache of every one of ``backends``, ``chunk`` tokens of each a step.

    Args:
        backends: the first is what the others are compared with.
        calibration: for modes that need text beforehand, and to warm up with; should not be among ``passages``.
        batch: passages side by side.
        tick: called with a mode and the tokens that it has just read.

    Raises:
        ArgumentError: nothing to score, or a number is out of range. What stops a single mode but the first is kept as its failure.
    """
    for name, value in (("chunk", chunk), ("batch", batch)):
        if value < 1:
            raise ArgumentError(name, value, "a positive integer")
    if not passages or min(p.num_predicted for p in passages) < 1:
        raise ArgumentError("passages", f"{len(passages)} of them, some without a token to predict", "at least one of two tokens")
    runs = [_Run(backend) for backend in backends]
    memory = _Memory(subject.device)
    for run in runs:
        _attempt(run, runs[0], _warm_up, subject, calibration, chunk)
    for first in range(0, len(passages), batch):
        group = passages[first : first + batch]
        for run in runs:
            run.tallies += [Tally(predicted=p.num_predicted, nbytes=p.nbytes) for p in group]
            _attempt(run, runs[0], memory.open, subject, group, calibration)
        for begin in range(0, max(p.num_predicted for p in group), chunk):
            _advance(runs, group, begin, chunk, memory, tick)
        for run in runs:
            run.session, run.held = None, 0
    exact = runs[0]
    sizes = {run.backend.mode: subject.bytes_per_token(run.backend) for run in runs if run.failure is None}
    baseline = subject.bytes_per_token(exact.backend, torch.bfloat16)
    results = tuple(
        ModeResult.of(
            run.backend.mode,
            run.tallies,
            exact.tallies,
            (sizes[run.backend.mode], baseline),
            run.seconds,
            run.peak if memory.counted else None,
        )
        for run in runs
        if run.failure is None
    )
    return Evaluation(results, {run.backend.mode: run.failure for run in runs if run.failure is not None})


def _advance(
    runs: Sequence[_Run], group: Sequence[Passage], begin: int, chunk: int, memory: _Memory, tick: Callable[[str, int], object]
) -> None:
    """Feed one chunk to every run, and count."""
    rows = [p.tokens[begin : min(begin + chunk, p.num_predicted)] for p in group]
    following = [torch.tensor(p.tokens[begin + 1 : begin + 1 + len(row)], device=memory.device) for p, row in zip(group, rows, strict=True)]
    exact: list[torch.Tensor] = []
    for run in runs:
        _attempt(run, runs[0], _step, memory, rows, following, exact)
        tick(run.backend.mode, sum(map(len, rows)))


def _warm_up(run: _Run, subject: Subject, calibration: Passage, chunk: int) -> None:
    """Once through everything, so that what is compiled or planned at first use is not timed."""
    subject.open(run.backend, [calibration], calibration).feed([calibration.tokens[:chunk]])


def _step(run: _Run, memory: _Memory, rows: Sequence[Sequence[int]], following: Sequence[torch.Tensor], exact: list[torch.Tensor]) -> None:
    """Feed ``rows`` to one run and count; the first run of a step leaves its log-probabilities in ``exact``."""
    found = [logits.float().log_softmax(-1) for logits in memory.feed(run, rows)]
    if not exact:
        exact.extend(found)
    for tally, p, q, targets in zip(run.tallies[-len(rows) :], exact, found, following, strict=True):
        if len(targets):
            _count(tally, p, q, targets)


def _count(tally: Tally, p: torch.Tensor, q: torch.Tensor, targets: torch.Tensor) -> None:
    """Add up log-probabilities ``q`` [n, vocab] of one mode beside those, ``p``, of the first."""
    tally.nats -= float(q.gather(1, targets[:, None]).double().sum())
    # xlogy's rule, 0 log 0 = 0: a model may rule a token out altogether.
    tally.kl += float((p.exp() * (p - q)).masked_fill(p == -torch.inf, 0).double().sum())
    tally.agreed += int((p.argmax(-1) == q.argmax(-1)).sum())


def _attempt(run: _Run, exact: _Run, work: Callable[..., None], *arguments: object) -> None:
    """``work(run, *arguments)`` unless the run has failed before; a failure of any run but ``exact`` is its own."""
    if run.failure is not None:
        return
    try:
        work(run, *arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as problem:  # SystemExit, too: a mode's own code runs here
        if run is exact:
            raise
        run.failure, run.session = problem, None


class _Memory:
    """Times runs, and tells apart the device memory of runs that share a device: each is charged its session and its work of the moment."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.counted = device, device.type == "cuda"
        self.model = self._allocated()

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.counted else 0

    def open(self, run: _Run, subject: Subject, group: Sequence[Passage], calibration: Passage) -> None:
        """Give ``run`` an empty session for ``group``."""
        before = self._allocated()
        run.session = subject.open(run.backend, group, calibration)
        run.held = self._allocated() - before

    def feed(self, run: _Run, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """The logits of ``rows``; time and memory go to ``run``."""
        if run.session is None:
            raise RuntimeError("no session is open")
        before = self._allocated()
        if self.counted:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        start = time.perf_counter()
        logits = run.session.feed(rows)
        if self.counted:
            torch.cuda.synchronize(self.device)
            run.peak = max(run.peak, self.model + run.held + torch.cuda.max_memory_allocated(self.device) - before)
            # A cache that grows as it is fed holds more now; the logits are nobody's for long.
            storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in logits}
            run.held += self._allocated() - before - sum(storages.values())
        run.seconds += time.perf_counter() - start
        return logits
