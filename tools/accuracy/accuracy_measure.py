"""What the accuracy report measures, on the tiny model: functions that return figures and print nothing.

Every figure is an :class:`~kvq_core.evaluation.Estimate`: a mean over documents with its standard error over them. Differences are to
``none`` on the same bytes of the same document, so that what documents have in common does not count as error.
"""

from __future__ import annotations

import math
import random
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from kvq_core import QuantKVBackend
from kvq_core.evaluation import Estimate, Passage, TinySubject
from kvq_core.evaluation.tiny_model import SEPARATOR, dense_attention
from kvq_core.evaluation.tiny_subject import TinySession

Rows = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""Per layer: q [T, Hq, D], k and v [T, Hkv, D] bf16 of one document."""

LETTERS: Final = 10
HINT: Final = 2
"""Letters of a needle's name, and how many of them the question gives."""
_OPENING: Final = 48
_DEFINITION: Final = "def {}(self):\n    return 1\n"
_QUESTION: Final = "\nx = {}"


@dataclass(frozen=True)
class Stretch:
    """Bits per byte of the predicted bytes ``first`` .. ``last`` (counted from 1) of a document."""

    first: int
    last: int
    bits: Estimate
    difference: Estimate


@dataclass(frozen=True)
class Smoothed:
    """Bits per byte of whole documents with keys smoothed: ``kind`` as ``kvq eval --smoothing`` takes it, empty for keys as they are."""

    kind: str
    whole: Stretch


@dataclass(frozen=True)
class LayerLoss:
    """One layer: signal to noise of what its pages hold, in dB, and the relative error (rms) of attention's output over them."""

    key_snr: Estimate
    value_snr: Estimate
    output_error: Estimate


@dataclass(frozen=True)
class Recall:
    """Needles asked for ``distance`` bytes behind their definition: bits a letter, and the share of letters that were likeliest."""

    distance: int
    bits: Estimate
    difference: Estimate
    likeliest: Estimate


# -- bits per byte --------------------------------------------------------------------------------------------------------------


def losses(logits: torch.Tensor, following: Sequence[int]) -> torch.Tensor:
    """Bits [n] float64 that logits [n, vocab] need for the bytes that follow."""
    log_p = logits.double().log_softmax(-1)
    return -log_p.gather(1, torch.tensor(following, device=logits.device)[:, None])[:, 0].cpu() / math.log(2)


@torch.inference_mode()
def bits(subject: TinySubject, backend: QuantKVBackend, passages: Sequence[Passage], calibration: Passage, chunk: int) -> torch.Tensor:
    """Bits [passages, bytes] of every predicted byte; the passages, of one length, are read side by side through one cache."""
    session = subject.open(backend, passages, calibration)
    length = passages[0].num_predicted
    parts = []
    for begin in range(0, length, chunk):
        end = min(begin + chunk, length)
        logits = session.feed([p.tokens[begin:end] for p in passages])
        parts.append(torch.stack([losses(x, p.tokens[begin + 1 : end + 1]) for x, p in zip(logits, passages, strict=True)]))
    return torch.cat(parts, 1)


def by_position(found: torch.Tensor, exact: torch.Tensor, ends: Sequence[int]) -> tuple[Stretch, ...]:
    """``found`` and ``exact`` [documents, bytes] bits of a mode and of ``none``, over the stretches that end at ``ends``."""
    stretches = []
    for first, last in zip((0, *ends), ends, strict=False):
        mode, none = found[:, first:last].mean(1), exact[:, first:last].mean(1)
        stretches.append(Stretch(first + 1, last, mean(mode), mean(mode - none)))
    return tuple(stretches)


def mean(over_documents: torch.Tensor) -> Estimate:
    """Of one figure a document."""
    return mean_of(over_documents.tolist())


def mean_of(figures: Sequence[float]) -> Estimate:
    """Of figures that count alike, with the standard error over them."""
    return Estimate.ratio(figures, [1.0] * len(figures))


# -- rows -----------------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def rows_of(subject: TinySubject, passage: Passage) -> Rows:
    """What a passage's bytes bring to a cache, read without one: so every mode is given the same rows."""
    rows: Rows = []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows.append((q.bfloat16(), k.bfloat16(), v.bfloat16()))
        return dense_attention(layer, q[None], k[None], v[None])[0]

    tokens = torch.tensor(passage.tokens, device=subject.device)
    subject.model.hidden(tokens, torch.arange(len(tokens), device=subject.device), attend)
    return rows


@torch.inference_mode()
def through_pages(
    subject: TinySubject, backend: QuantKVBackend, passage: Passage, calibration: Passage, rows: Rows
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Per layer: keys and values as the pages hold them, and attention's output over them, for a passage's rows."""
    session = subject.open(backend, [passage], calibration)
    cache, (seq,) = session.cache, session.sequences
    step = cache.append({seq: len(passage.tokens)})
    blocks = cache.block_table([seq])[0].long()

    def held(codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        if scales is not None and backend.needs_scale_caches:
            scales = scales[blocks].flatten(0, 1)
        return backend.decode(codes[blocks].flatten(0, 1), scales)[: len(passage.tokens)]

    found = []
    for index, (q, k, v) in enumerate(rows):
        cache.write(index, k, v, step)
        out = cache.attend(index, q, step, softmax_scale=subject.model.config.softmax_scale)
        layer = cache.layer(index)
        found.append((held(layer.key_cache, layer.k_scale_cache), held(layer.value_cache, layer.v_scale_cache), out))
    return found


def by_layer(
    subject: TinySubject,
    backend: QuantKVBackend,
    baseline: QuantKVBackend,
    passages: Sequence[Passage],
    calibration: Passage,
    tick: Callable[[], object],
) -> tuple[LayerLoss, ...]:
    """What ``backend`` loses in each layer on the model's own rows: losses of the layers below are not carried along."""
    power: list[list[list[tuple[float, float]]]] = []
    for passage in passages:
        rows = rows_of(subject, passage)
        exact, lossy = (through_pages(subject, b, passage, calibration, rows) for b in (baseline, backend))
        power.append([[noise_and_signal(x, y) for x, y in zip(*layer, strict=True)] for layer in zip(exact, lossy, strict=True)])
        tick()
    layers = []
    for layer in zip(*power, strict=True):
        key, value, output = (
            Estimate.ratio([noise for noise, _ in documents], [signal for _, signal in documents]) for documents in zip(*layer, strict=True)
        )
        layers.append(LayerLoss(decibels(key), decibels(value), root(output)))
    return tuple(layers)


def noise_and_signal(exact: torch.Tensor, found: torch.Tensor) -> tuple[float, float]:
    """Sums of squares: of what changed, and of what was there."""
    return float((exact.double() - found.double()).square().sum()), float(exact.double().square().sum())


def decibels(noise_over_signal: Estimate) -> Estimate:
    """Signal over noise in dB; the error to first order."""
    ratio = noise_over_signal.mean
    if ratio == 0:
        return Estimate(math.inf, math.nan)
    return Estimate(-10 * math.log10(ratio), 10 / math.log(10) * noise_over_signal.error / ratio)


def root(ratio: Estimate) -> Estimate:
    """Of a ratio of squares; the error to first order."""
    value = math.sqrt(ratio.mean)
    return Estimate(value, ratio.error / (2 * value) if value else math.nan)


# -- needles --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Needle:
    """A text in which a made-up name is defined near the beginning, and a question for it."""

    text: tuple[int, ...]
    question: tuple[int, ...]
    """Ends with the name, whose last ``LETTERS - HINT`` letters are scored."""
    defined: int
    """Where the name stands in ``text``."""

    def ends(self, distances: Sequence[int]) -> list[int]:
        """How much of the text stands before the question, so that name and name are ``distances`` apart."""
        return [self.defined + distance + LETTERS - len(self.question) for distance in distances]


def needles(texts: Sequence[bytes], seed: int = 0) -> list[Needle]:
    """One for each text, its name of letters drawn at random: no text and no model knows it, so without the definition a letter costs
    log2(26) = 4.70 bits or more on average."""
    source = random.Random(seed)
    found = []
    for text in texts:
        name = "".join(source.choice(string.ascii_lowercase) for _ in range(LETTERS))
        before = bytes([SEPARATOR]) + text[:_OPENING] + b"\n"
        body = before + _DEFINITION.format(name).encode() + text[_OPENING:]
        found.append(Needle(tuple(body), tuple(_QUESTION.format(name).encode()), len(before) + _DEFINITION.index("{")))
    return found


@torch.inference_mode()
def ask(
    subject: TinySubject, backend: QuantKVBackend, asked: Sequence[Needle], distances: Sequence[int], calibration: Passage, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bits a letter, and the share of letters that were the likeliest byte: both [needles, distances] float64.

    Texts are read side by side through one cache. Behind each distance the question is read, and taken back before the text goes on.
    """
    whole = [needle.text[: needle.ends(distances)[-1]] + needle.question for needle in asked]
    session = subject.open(backend, [Passage(tokens, len(tokens) - 1) for tokens in whole], calibration)
    fed, scores, hits = 0, [], []
    for end in asked[0].ends(distances):
        for begin in range(fed, end, chunk):
            session.feed([needle.text[begin : min(begin + chunk, end)] for needle in asked])
        fed = end
        answers = answer(session, asked)
        take_back(session, end)
        scores.append(torch.stack([losses(x, y).mean() for x, y in answers]))
        hits.append(torch.stack([(x.argmax(-1).cpu() == torch.tensor(y)).double().mean() for x, y in answers]))
    return torch.stack(scores, 1), torch.stack(hits, 1)


def answer(session: TinySession, asked: Sequence[Needle]) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
    """Logits for the letters of each name behind the hint, and those letters."""
    scored = LETTERS - HINT
    logits = session.feed([needle.question[:-1] for needle in asked])
    return [(x[-scored:], needle.question[-scored:]) for x, needle in zip(logits, asked, strict=True)]


def take_back(session: TinySession, length: int) -> None:
    """Forget all but the first ``length`` bytes of every text."""
    for seq in session.sequences:
        session.cache.truncate(seq, length)


def by_distance(
    found: tuple[torch.Tensor, torch.Tensor], exact: tuple[torch.Tensor, torch.Tensor], distances: Sequence[int]
) -> tuple[Recall, ...]:
    """The answers of a mode and of ``none``, as :func:`ask` returns them, over documents."""
    (scores, hits), (exact_scores, _) = found, exact
    return tuple(
        Recall(distance, mean(scores[:, i]), mean(scores[:, i] - exact_scores[:, i]), mean(hits[:, i]))
        for i, distance in enumerate(distances)
    )
