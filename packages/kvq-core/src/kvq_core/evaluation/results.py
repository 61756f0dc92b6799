"""From what was counted in each passage to figures with standard errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Tally:
    """What one mode did in one passage, summed over its predictions: loss and divergence in nats."""

    nats: float = 0.0
    kl: float = 0.0
    agreed: int = 0
    predicted: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class Estimate:
    """A mean, and its standard error over passages (NaN for a single one)."""

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

    ``times_smaller`` than bf16, whatever dtype the model's rows have.
    ``difference`` is the bits a byte more than ``none`` needs in the same run; its error is that of paired passages.
    ``peak_bytes``: of device memory, as if this mode had been alone on it with the model; ``None`` on a CPU, where torch does not count.
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

    @classmethod
    def of(
        cls, mode: str, tallies: Sequence[Tally], exact: Sequence[Tally], sizes: tuple[int, int], seconds: float, peak_bytes: int | None
    ) -> ModeResult:
        """``tallies`` of one mode beside those of ``none``, in the same passages; ``sizes``: bytes a token, and those of bf16."""
        nbytes, tokens = [float(t.nbytes) for t in tallies], [float(t.predicted) for t in tallies]
        per_token = Estimate.ratio([t.nats for t in tallies], tokens)
        perplexity = math.exp(min(per_token.mean, 700.0))
        return cls(
            mode=mode,
            bytes_per_token=sizes[0],
            times_smaller=sizes[1] / sizes[0],
            bits_per_byte=Estimate.ratio([t.nats / math.log(2) for t in tallies], nbytes),
            difference=Estimate.ratio([(t.nats - e.nats) / math.log(2) for t, e in zip(tallies, exact, strict=True)], nbytes),
            perplexity=Estimate(perplexity, perplexity * per_token.error),
            kl=Estimate.ratio([t.kl for t in tallies], tokens),
            top1=Estimate.ratio([float(t.agreed) for t in tallies], tokens),
            tokens_per_second=sum(tokens) / seconds if seconds else math.nan,
            peak_bytes=peak_bytes,
            passages=len(tallies),
            predicted=sum(t.predicted for t in tallies),
        )
