"""Every mode reads the same text at the same time, so that each position's distributions can be compared without keeping them all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final

import torch

from kvq_core.errors import ArgumentError
from kvq_core.evaluation.journal import Journal, Records
from kvq_core.evaluation.options import CacheConfig, cache_arguments
from kvq_core.evaluation.results import ModeResult, Sizes, Tally
from kvq_core.evaluation.subject import Passage, Session, Subject
from kvq_core.registry import get_backend

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend

TASK: Final = "kl"
_MOST_SCORES: Final = {"cpu": 2**21}
"""Log-probabilities that are compared at once, by device: few enough to stay in a CPU's cache."""
_MOST_ELSEWHERE: Final = 2**25


@dataclass(frozen=True)
class Evaluation:
    """A result a mode, ``none`` first, and by mode what stopped those that have none."""

    results: tuple[ModeResult, ...]
    failures: dict[str, BaseException]


@dataclass
class _Run:
    """One mode's way through the text."""

    config: CacheConfig
    arguments: dict[str, Any]
    records: Records
    tallies: list[Tally] = field(default_factory=list)
    """Of the passages of the moment."""
    session: Session | None = None
    held: int = 0
    """Device bytes of its session."""
    peak: int = 0
    """The most it held, work of the moment included."""
    warm: bool = False
    failure: BaseException | None = None

    @property
    def label(self) -> str:
        return self.config.label


@torch.inference_mode()
def evaluate(
    subject: Subject,
    modes: Sequence[QuantKVBackend | CacheConfig],
    passages: Sequence[Passage],
    *,
    calibration: Passage,
    chunk: int = 128,
    batch: int = 16,
    tick: Callable[[str, int], object] = lambda mode, tokens: None,
    report: Callable[[Passage, Mapping[str, Tally]], object] = lambda passage, tallies: None,
    journal: Journal | None = None,
) -> Evaluation:
    """Read ``passages`` through the cache of every one of ``modes``, ``chunk`` tokens of each a step.

    Args:
        modes: the first is what the others are compared with.
        calibration: for modes that need text beforehand, and to warm up with; should not be among ``passages``.
        batch: passages side by side.
        tick: called with a mode and the tokens that it has just read.
        report: called with each passage that all modes have read, and what each did there.
        journal: what it holds is not measured again; what is measured is added.

    Raises:
        ArgumentError: nothing to score, or a number is out of range. What stops a single mode but the first is kept as its failure.
    """
    for name, value in (("chunk", chunk), ("batch", batch)):
        if value < 1:
            raise ArgumentError(name, value, "a positive integer")
    if not passages or min(p.num_predicted for p in passages) < 1:
        raise ArgumentError("passages", f"{len(passages)} of them, some without a token to predict", "at least one of two tokens")
    journal = Journal() if journal is None else journal
    configs = [mode if isinstance(mode, CacheConfig) else CacheConfig(mode) for mode in modes]
    arguments = cache_arguments(configs, subject, calibration)
    runs = [_Run(config, given, Records(journal, TASK, config)) for config, given in zip(configs, arguments, strict=True)]
    memory = _Memory(subject.device)
    groups = [passages[first : first + batch] for first in range(0, len(passages), batch)]
    for group in groups:
        _read_group(subject, runs, group, calibration, chunk, memory, tick)
        found = [run.records.get(group) for run in runs]
        for passage, records in zip(group, zip(*found, strict=True), strict=True):
            report(passage, {run.label: _tally(record) for run, record in zip(runs, records, strict=True) if record is not None})
    results = [_result(run, runs[0], subject, groups, memory) for run in runs if run.failure is None]
    return Evaluation(tuple(results), {run.label: run.failure for run in runs if run.failure is not None})


def _read_group(
    subject: Subject,
    runs: Sequence[_Run],
    group: Sequence[Passage],
    calibration: Passage,
    chunk: int,
    memory: _Memory,
    tick: Callable[[str, int], object],
) -> None:
    """Read passages side by side in all runs that have not, the first run along with any other."""
    exact, *others = runs
    absent = [run for run in others if None in run.records.get(group)]
    needed = absent or None in exact.records.get(group)
    active = [exact, *absent] if needed else []
    for run in runs:
        if run not in active:
            tick(run.label, sum(p.num_predicted for p in group))
    for run in active:
        if not run.warm:
            _attempt(run, exact, _warm_up, subject, calibration, chunk)
        run.tallies = [Tally(predicted=p.num_predicted, nbytes=p.nbytes) for p in group]
        _attempt(run, exact, memory.open, subject, group, calibration)
    for begin in range(0, max(p.num_predicted for p in group), chunk):
        _advance(active, group, begin, chunk, memory, tick)
    for run in active:
        run.session, run.held = None, 0
        if run.failure is None:
            both = zip(group, run.tallies, strict=True)
            run.records.add(group, [{**asdict(tally), "peak_bytes": run.peak, "document": passage.document} for passage, tally in both])


def _tally(record: Mapping[str, Any]) -> Tally:
    return Tally(**{f.name: record[f.name] for f in fields(Tally)})


def _result(run: _Run, exact: _Run, subject: Subject, groups: Sequence[Sequence[Passage]], memory: _Memory) -> ModeResult:
    """The result of a run that did not fail, from the journal's records."""
    passages = [passage for group in groups for passage in group]
    records = [[record or {} for group in groups for record in each.records.get(group)] for each in (run, exact)]
    mine, reference = ([_tally(record) for record in found] for found in records)
    return ModeResult.of(
        run.label,
        mine,
        reference,
        [p.document for p in passages],
        sizes_of(run.config, subject, max(p.num_predicted for p in passages)),
        max(int(record["peak_bytes"]) for record in records[0]) if memory.counted else None,
    )


def sizes_of(config: CacheConfig, subject: Subject, context: int) -> Sizes:
    """What a cache of ``context`` tokens takes, with exact rows of bf16 or of their own mode."""
    bf16, exact = (subject.bytes_per_token(backend, torch.bfloat16) for backend in (get_backend("none"), config.exact_backend))
    packed = context * subject.bytes_per_token(config.backend)
    return Sizes(context, packed + config.exact_tokens(context) * exact, context * bf16)


def _advance(
    runs: Sequence[_Run], group: Sequence[Passage], begin: int, chunk: int, memory: _Memory, tick: Callable[[str, int], object]
) -> None:
    """Feed one chunk to every run, and count."""
    rows = [p.tokens[begin : min(begin + chunk, p.num_predicted)] for p in group]
    following = [torch.tensor(p.tokens[begin + 1 : begin + 1 + len(row)], device=memory.device) for p, row in zip(group, rows, strict=True)]
    exact: list[torch.Tensor] = []
    for run in runs:
        _attempt(run, runs[0], _step, memory, rows, following, exact)
        tick(run.label, sum(map(len, rows)))


def _warm_up(run: _Run, subject: Subject, calibration: Passage, chunk: int) -> None:
    """Once through everything, so that what is compiled or planned at first use is not timed."""
    run.warm = True
    subject.open(run.config.backend, [calibration], calibration, **run.arguments).feed([calibration.tokens[:chunk]])


def _step(run: _Run, memory: _Memory, rows: Sequence[Sequence[int]], following: Sequence[torch.Tensor], exact: list[torch.Tensor]) -> None:
    """Feed ``rows`` to one run and count; the first run of a step leaves its log-probabilities in ``exact``."""
    found = memory.feed(run, rows)
    if not exact:
        found = [logits.float().log_softmax(-1) for logits in found]
        exact.extend(found)
    for tally, p, q, targets in zip(run.tallies, exact, found, following, strict=True):
        if len(targets):
            _count(tally, p, q, targets)


def _count(tally: Tally, p: torch.Tensor, q: torch.Tensor, targets: torch.Tensor) -> None:
    """Add up logits or log-probabilities ``q`` [n, vocab] of one mode beside log-probabilities ``p`` of the first, a few rows at a time."""
    size = max(_MOST_SCORES.get(p.device.type, _MOST_ELSEWHERE) // p.shape[-1], 1)
    for exact, logits, target in zip(p.split(size), q.split(size), targets.split(size), strict=True):
        log_q = logits if q is p else logits.float().log_softmax(-1)
        tally.nats -= float(log_q.gather(1, target[:, None]).double().sum())
        if q is not p:
            # xlogy's rule, 0 log 0 = 0: a model may rule a token out altogether.
            tally.kl += float((exact.exp() * (exact - log_q)).masked_fill(exact == -torch.inf, 0).sum(-1).double().sum())
        tally.agreed += len(target) if q is p else int((exact.argmax(-1) == log_q.argmax(-1)).sum())


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
        run.session = subject.open(run.config.backend, group, calibration, **run.arguments)
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
        share = (time.perf_counter() - start) / max(sum(map(len, rows)), 1)
        for tally, row in zip(run.tallies, rows, strict=True):
            tally.seconds += share * len(row)
        return logits
