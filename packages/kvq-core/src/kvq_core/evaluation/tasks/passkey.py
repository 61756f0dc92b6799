"""A number in a haystack of the same few sentences (passkey retrieval, Mohtashami and Jaggi, arXiv:2305.16300), by its depth there."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvq_core.evaluation.subject import Passage, Session, Subject
from kvq_core.evaluation.tasks.task import ALL, Item, Task, forced

if TYPE_CHECKING:
    from kvq_core.evaluation.tasks.task import Record

_OPENING: Final = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I will quiz you about the important"
    " information there.\n"
)
_FILLER: Final = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
_NEEDLE: Final = "The pass key is {key}. Remember it. {key} is the pass key.\n"
_QUESTION: Final = "What is the pass key? The pass key is"
_DEPTHS: Final = (0, 25, 50, 75, 100)


class Passkey(Task):
    """Numbers that are right in every digit, all and by depth in the haystack in percent: 0 is the farthest from the question."""

    name = "passkey"
    title = "Passkey retrieval, keys right"

    def items(self, subject: Subject, passages: Sequence[Passage], length: int, count: int) -> list[Item]:
        opening, filler, question = subject.opening(_OPENING), subject.encode(_FILLER), subject.encode(_QUESTION)
        found = []
        for n in range(count):
            key = random.Random(f"passkey {n}").randrange(10_000, 100_000)
            needle, answer = subject.encode(_NEEDLE.format(key=key)), subject.encode(f" {key}")
            fillers = max(length - len(opening) - len(needle) - len(question) - len(answer), 0) // len(filler)
            depth = _DEPTHS[n % len(_DEPTHS)]
            before = round(fillers * depth / 100)
            prompt = (*opening, *(filler * before), *needle, *(filler * (fillers - before)), *question)
            found.append(Item(prompt, tuple(answer), group=f"{depth} %"))
        return found

    def read(self, subject: Subject, session: Session, items: Sequence[Item], chunk: int) -> list[Record]:
        right = [int(all(tokens)) for tokens in forced(session, items, chunk)]
        return [{"scores": {ALL: [one, 1], item.group: [one, 1]}} for item, one in zip(items, right, strict=True)]
