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
    def read(self, subject: Subject, session: Session, item: Item, chunk: int) -> Record:
        """What a mode does with ``item`` through an empty ``session``, in plain JSON values."""

    def scores(self, record: Record, exact: Record) -> Scores:
        """By label, how much of how much is right in a record of :meth:`read`; ``exact`` is that of ``none``."""
        return {label: (right, of) for label, (right, of) in record["scores"].items()}


def forced(session: Session, item: Item, chunk: int) -> list[bool]:
    """Whether each token of the answer is the likeliest after the right ones before it. All are where greedy decoding gives the answer."""
    *before, last = item.prompt
    prefill(session, before, chunk)
    (logits,) = session.feed([[last, *item.answer[:-1]]])
    return (logits.argmax(-1) == torch.tensor(item.answer, device=logits.device)).tolist()


def greedy(session: Session, item: Item, chunk: int, done: Callable[[list[int]], bool]) -> list[int]:
    """At most ``item.room`` tokens after the prompt, the likeliest each time, until they are ``done``."""
    *before, last = item.prompt
    prefill(session, before, chunk)
    found: list[int] = []
    while len(found) < item.room and not done(found):
        (logits,) = session.feed([[last]])
        last = int(logits[-1].argmax())
        found.append(last)
    return found
