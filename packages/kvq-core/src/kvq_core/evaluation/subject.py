"""What is evaluated: a model that reads tokens through a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from kvq_core.evaluation.texts import Document
from kvq_core.smoothing.calibration import ModelSmoothing, Smoothings

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend


@dataclass(frozen=True)
class Passage:
    """Tokens to score: the first is given, each later one predicted. ``nbytes``: of UTF-8, that the predicted ones stand for."""

    tokens: tuple[int, ...]
    nbytes: int

    @property
    def num_predicted(self) -> int:
        return len(self.tokens) - 1


class Session(Protocol):
    """Some passages side by side, being read through one cache."""

    def feed(self, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Append ``rows[i]`` (it may be empty) to passage i; return logits [len(rows[i]), vocab] for the token after each."""
        ...


class Subject(Protocol):
    """A model, loaded."""

    name: str
    device: torch.device
    smoothing: Smoothings
    """Of the caches that are opened."""

    def passages(self, documents: Sequence[Document], length: int) -> list[Passage]:
        """``documents`` as passages of ``length`` predicted tokens; remainders shorter than half of that are left out."""
        ...

    def open(self, backend: QuantKVBackend, passages: Sequence[Passage], calibration: Passage) -> Session:
        """An empty cache in the mode of ``backend``, with room for ``passages``. ``calibration`` is text for modes that need some."""
        ...

    def calibrate(self, passage: Passage, *, balanced: bool = False) -> ModelSmoothing:
        """The smoothing of the model's layers from a passage that is not scored; ``balanced``: with factors for the channels."""
        ...

    def bytes_per_token(self, backend: QuantKVBackend, dtype: torch.dtype | None = None) -> int:
        """Bytes that a token takes over all layers, scales included; ``dtype``: of its rows, by default of those that reach the cache."""
        ...


def cut(tokens: Sequence[int], length: int) -> list[Sequence[int]]:
    """``tokens`` in pieces of ``length``; a last piece shorter than half of that is left out, unless it is the only one."""
    pieces = [tokens[first : first + length] for first in range(0, len(tokens), length)]
    return pieces[:-1] if len(pieces) > 1 and 2 * len(pieces[-1]) < length else pieces
