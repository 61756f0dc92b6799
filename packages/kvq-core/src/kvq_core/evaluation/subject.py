"""What is evaluated: a model that reads tokens through a cache."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import torch

from kvq_core.evaluation.texts import Document
from kvq_core.smoothing.calibration import ModelSmoothing, Smoothings

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend


@dataclass(frozen=True)
class Passage:
    """Tokens to score: the first is given, each later one predicted. ``nbytes``: of UTF-8, that the predicted ones stand for.

    ``document``: the name of the text that they are of.
    """

    tokens: tuple[int, ...]
    nbytes: int
    document: str = field(default="", compare=False)

    @property
    def num_predicted(self) -> int:
        return len(self.tokens) - 1

    @cached_property
    def digest(self) -> str:
        """A digest of the tokens, which tells passages apart over runs."""
        return sha256(repr(self.tokens).encode()).hexdigest()[:16]


class Session(Protocol):
    """Some passages side by side, being read through one cache."""

    def feed(self, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Append ``rows[i]`` (it may be empty) to passage i; return logits [len(rows[i]), vocab] for the token after each."""
        ...


@runtime_checkable
class Prefilling(Protocol):
    """A session that can leave out logits."""

    def prefill(self, rows: Sequence[Sequence[int]]) -> None:
        """:meth:`Session.feed` without the logits."""
        ...


def prefill(session: Session, rows: Sequence[Sequence[int]], chunk: int) -> None:
    """Append ``rows`` to the passages of ``session`` in chunks, where nobody needs the logits."""
    for first in range(0, max(map(len, rows)), chunk):
        parts = [row[first : first + chunk] for row in rows]
        if isinstance(session, Prefilling):
            session.prefill(parts)
        else:
            session.feed(parts)


class Subject(Protocol):
    """A model, loaded."""

    name: str
    device: torch.device
    rows_dtype: torch.dtype
    """Of the keys and values that reach the cache."""
    smoothing: Smoothings
    """Of the caches that are opened without one of their own."""
    licence: str
    """Of the weights, as far as they tell."""
    stop_tokens: Collection[int]
    """Which end a text."""
    cache_name: str
    cache_keywords: Collection[str]
    """Of the class behind the caches."""

    def passages(self, documents: Sequence[Document], length: int) -> list[Passage]:
        """``documents`` as passages of ``length`` predicted tokens; remainders shorter than half of that are left out."""
        ...

    def opening(self, text: str) -> list[int]:
        """The tokens of ``text`` at the beginning of a passage: after a beginning-of-text token, if the tokenizer's settings say so."""
        ...

    def encode(self, text: str) -> list[int]:
        """The tokens of ``text`` within a passage."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens``."""
        ...

    def fingerprint(self) -> str:
        """Tells models apart over runs."""
        ...

    def open(self, backend: QuantKVBackend, passages: Sequence[Passage], calibration: Passage, **options: Any) -> Session:
        """An empty cache in the mode of ``backend``, with room for ``passages``. ``calibration`` is text for modes that need some.

        ``options``: keyword arguments of the cache, those of ``kvq_core.evaluation.options.OPTIONS``.
        """
        ...

    def calibrate(self, passage: Passage, kind: str = "mean") -> ModelSmoothing:
        """The smoothing of the model's layers from a passage that is not scored; ``kind``: as options spell it."""
        ...

    def bytes_per_token(self, backend: QuantKVBackend, dtype: torch.dtype | None = None) -> int:
        """Bytes that a token takes over all layers, scales included; ``dtype``: of its rows (default: bf16)."""
        ...


def cut(tokens: Sequence[int], length: int) -> list[Sequence[int]]:
    """``tokens`` in pieces of ``length``; a last piece shorter than half of that is left out, unless it is the only one."""
    pieces = [tokens[first : first + length] for first in range(0, len(tokens), length)]
    return pieces[:-1] if len(pieces) > 1 and 2 * len(pieces[-1]) < length else pieces


_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SUMMED: Final = 2**24
"""Values of a parameter that are summed at once: the sum takes a copy of them as int64."""


def fingerprint_of(parameters: Iterable[torch.Tensor], *facts: object) -> str:
    """A digest of a model's parameters (shapes, some values, and the sum of all bits as integers) and of what ``repr`` says of ``facts``.

    The sum is the same on every device and with any number of threads, which a sum of floats is not.
    """
    digest = sha256(repr(facts).encode())
    for parameter in parameters:
        values = parameter.detach().flatten()
        bits = values.view(_BITS[values.element_size()])
        total = sum(int(part.sum(dtype=torch.int64)) for part in bits.split(_SUMMED))
        digest.update(repr((tuple(parameter.shape), total)).encode())
        digest.update(values[:: max(len(values) // 64, 1)].float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
