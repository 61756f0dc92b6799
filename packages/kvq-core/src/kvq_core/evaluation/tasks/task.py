"""What a task is: items, how a cache reads one, and what is counted there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch

from kvq_core.evaluation.subject import Passage, Session, Subject, prefill

if TYPE_CHECKING:
    from collections.abc import Callable

    Record = Mapping[str, Any]
    Scores = Mapping[str, tuple[float, int]]

ALL: Final = "all"


@dataclass(frozen=True)
class Item:
    """A prompt and what should follow it: tokens, or text of at most ``room`` tokens. ``group``: which of the task's groups it is of."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...] = ()
    expected: str = ""
    room: int = 0
    group: str = ""

    @cached_property
    def digest(self) -> str:
        """A digest, which tells items apart over runs."""
        return sha256(repr((self.prompt, self.answer, self.expected, self.room, self.group)).encode()).hexdigest()[:16]

    @property
    def space(self) -> Passage:
        """A passage with as many tokens as a cache must have room for."""
        return Passage((*self.prompt, *self.answer, *([0] * self.room)), 0)


class Task(ABC):
    """``name``: on the command line. ``means``: of the labels in :meth:`scores`, those that are no shares."""

    name: ClassVar[str]
    title: ClassVar[str]
    means: ClassVar[Collection[str]] = ()

    @abstractmethod
    def items(self, subject: Subject, passages: Sequence[Passage], length: int, count: int) -> list[Item]:
        """About ``count`` items, of about ``length`` tokens where that can be chosen; the same ones at every call."""

    @abstractmethod
    def read(self, subject: Subject, session: Session, items: Sequence[Item], chunk: int) -> list[Record]:
        """What a mode does with each of ``items``, side by side through an empty ``session``, in plain JSON values."""

    def scores(self, record: Record, exact: Record) -> Scores:
        """By label, how much of how much is right in a record of :meth:`read`; ``exact`` is that of ``none``."""
        return {label: (right, of) for label, (right, of) in record["scores"].items()}


def forced(session: Session, items: Sequence[Item], chunk: int) -> list[list[bool]]:
    """Whether each token of the answers is the likeliest after the right ones before it. All are where greedy decoding gives the answer.

    Answers are fed in chunks, too: a chunk's own tokens are exact in a cache with a residual window.
    """
    prefill(session, [item.prompt[:-1] for item in items], chunk)
    right: list[list[bool]] = [[] for _ in items]
    for first in range(0, max(len(item.answer) for item in items), chunk):
        answers = [item.answer[first : first + chunk] for item in items]
        before = [(item.prompt[-1], *item.answer)[first : first + len(part)] for item, part in zip(items, answers, strict=True)]
        for found, logits, part in zip(right, session.feed(before), answers, strict=True):
            found += (logits.argmax(-1) == torch.tensor(part, dtype=torch.int64, device=logits.device)).tolist()
    return right


def greedy(session: Session, items: Sequence[Item], chunk: int, done: Callable[[list[int]], bool]) -> list[list[int]]:
    """At most ``room`` tokens after each prompt, the likeliest each time, until they are ``done``."""
    prefill(session, [item.prompt[:-1] for item in items], chunk)
    found: list[list[int]] = [[] for _ in items]
    while True:
        active = [n for n, item in enumerate(items) if len(found[n]) < item.room and not done(found[n])]
        if not active:
            return found
        rows = [[(found[n] or item.prompt)[-1]] if n in active else [] for n, item in enumerate(items)]
        logits = session.feed(rows)
        for n, token in zip(active, torch.stack([logits[n][-1] for n in active]).argmax(-1).tolist(), strict=True):
            found[n].append(token)
