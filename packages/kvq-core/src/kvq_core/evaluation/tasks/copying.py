"""Random words, and the same again: what is copied must be found in the context by what stands before it (an induction head's work)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from kvq_core.evaluation.subject import Passage, Session, Subject
from kvq_core.evaluation.tasks.task import ALL, Item, Task, forced

if TYPE_CHECKING:
    from kvq_core.evaluation.tasks.task import Record

_WORDS: Final = "words.txt"
"""English words and parts of some: after a space, each is one token of SmolLM2 and of Gemma 3."""
_QUARTERS: Final = ("0-25 %", "25-50 %", "50-75 %", "75-100 %")
_OPENING: Final = "List:\n"
_END: Final = "\n"


class Copying(Task):
    """Tokens of words that are right, all and by the quarter of the list that they stand in.

    A word a line, none twice as long as there are others: small models copy such a list well, and hardly one of repeated words in a row.
    """

    name = "copy"
    title = "Copying a list of random words, tokens of words right"

    def items(self, subject: Subject, passages: Sequence[Passage], length: int, count: int) -> list[Item]:
        opening, again = subject.opening(_OPENING), subject.encode(f"{_END}{_OPENING}")
        room = max((length - len(opening) - len(again)) // 2, 1)
        known = files(__package__).joinpath(_WORDS).read_text("utf-8").split()
        found = []
        for n in range(count):
            draw = random.Random(f"copy {n}")
            words: list[int] = []
            rest: list[str] = []
            while len(words) < room:
                rest = rest or draw.sample(known, len(known))
                words += subject.encode(f"{rest.pop()}{_END}")
            words = words[:room]
            found.append(Item((*opening, *words, *again), tuple(words)))
        return found

    def read(self, subject: Subject, session: Session, items: Sequence[Item], chunk: int) -> list[Record]:
        ends = subject.encode(_END)
        right = forced(session, items, chunk)
        return [
            _by_quarter([one for one, token in zip(found, item.answer, strict=True) if token not in ends])
            for item, found in zip(items, right, strict=True)
        ]


def _by_quarter(right: Sequence[bool]) -> Record:
    scores = {ALL: [sum(right), len(right)]}
    for n, label in enumerate(_QUARTERS):
        part = right[n * len(right) // 4 : (n + 1) * len(right) // 4]
        scores[label] = [sum(part), len(part)]
    return {"scores": scores}
