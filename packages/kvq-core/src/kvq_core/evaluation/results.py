"""From what was counted in each passage to figures with standard errors."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass
class Tally:
    """What one mode did in one passage, summed over its predictions: loss and divergence in nats."""

    nats: float = 0.0
    kl: float = 0.0
    agreed: int = 0
    predicted: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(mine + its for mine, its in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class Sizes:
    """Bytes of a cache of ``context`` tokens, codes, scales and exact rows together, and of the same in bf16."""

    context: int
    nbytes: int
    bf16: int

    @property
    def bits(self) -> float:
        """Bits an element of K and V."""
        return 16 * self.nbytes / self.bf16


@dataclass(frozen=True)
class Estimate:
    """A mean, and its standard error over documents, or what the sample consists of (NaN for a sample of one)."""

    mean: float
    error: float

    @classmethod
    def ratio(cls, totals: Sequence[float], weights: Sequence[float]) -> Estimate:
        """``sum(totals) / sum(weights)`` and the ratio estimator's error; for equal weights, those of a plain mean."""
        whole, count = sum(weights), len(weights)
        mean = sum(totals) / whole
        if count < 2:
            return cls(mean, math.nan)
        squares = sum((total - mean * weight) ** 2 for total, weight in zip(totals, weights, strict=True))
        return cls(mean, math.sqrt(squares * count / (count - 1)) / whole)

    def __format__(self, form: str) -> str:
        """The mean in ``form``, and the error, if there is one, in the same without a sign."""
        return format(self.mean, form) + ("" if math.isnan(self.error) else f" ± {format(self.error, form.lstrip('+'))}")


@dataclass(frozen=True)
class ModeResult:
    """One mode on one model and text. ``kl`` is that from ``none``'s distribution to this mode's, in nats a token.

    ``bytes_per_token``, ``times_smaller`` (than bf16 rows) and ``bits`` (an element) are those of a cache of ``context`` tokens, scales and
    exact rows included.
    ``difference`` is the bits a byte more than ``none`` needs in the same run; its error is that of paired documents.
    ``peak_bytes``: of device memory, as if this mode had been alone on it with the model; ``None`` on a CPU, where torch does not count.
    ``sample``: how many documents, or passages of a single one, the standard errors are over.
    """

    mode: str
    bytes_per_token: int
    times_smaller: float
    bits_per_byte: Estimate
    difference: Estimate
    perplexity: Estimate
    kl: Estimate
    top1: Estimate
    tokens_per_second: float
    peak_bytes: int | None
    passages: int
    predicted: int
    bits: float
    context: int
    sample: int

    @classmethod
    def of(
        cls,
        mode: str,
        tallies: Sequence[Tally],
        exact: Sequence[Tally],
        documents: Sequence[Hashable],
        sizes: Sizes,
        peak_bytes: int | None,
    ) -> ModeResult:
        """``tallies`` of one mode beside those of ``none``, in the same passages, which are of ``documents``."""
        mine, reference = by_document(tallies, documents), by_document(exact, documents)
        nbytes, tokens = [float(t.nbytes) for t in mine], [float(t.predicted) for t in mine]
        per_token = Estimate.ratio([t.nats for t in mine], tokens)
        perplexity = math.exp(min(per_token.mean, 700.0))
        seconds = sum(t.seconds for t in tallies)
        return cls(
            mode=mode,
            bytes_per_token=round(sizes.nbytes / sizes.context),
            times_smaller=sizes.bf16 / sizes.nbytes,
            bits_per_byte=Estimate.ratio([t.nats / math.log(2) for t in mine], nbytes),
            difference=Estimate.ratio([(t.nats - e.nats) / math.log(2) for t, e in zip(mine, reference, strict=True)], nbytes),
            perplexity=Estimate(perplexity, perplexity * per_token.error),
            kl=Estimate.ratio([t.kl for t in mine], tokens),
            top1=Estimate.ratio([float(t.agreed) for t in mine], tokens),
            tokens_per_second=sum(tokens) / seconds if seconds else math.nan,
            peak_bytes=peak_bytes,
            passages=len(tallies),
            predicted=sum(t.predicted for t in tallies),
            bits=sizes.bits,
            context=sizes.context,
            sample=len(mine),
        )


def by_document(tallies: Sequence[Tally], documents: Sequence[Hashable]) -> list[Tally]:
    """The passages of a document added up, since they are not independent of each other; those of a single document as they are."""
    if len(set(documents)) == 1:
        return list(tallies)
    found: dict[Hashable, Tally] = {}
    for document, tally in zip(documents, tallies, strict=True):
        found[document] = found.get(document, Tally()) + tally
    return list(found.values())
