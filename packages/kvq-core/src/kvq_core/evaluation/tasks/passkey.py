"""A number in a haystack of the same few sentences (passkey retrieval, Mohtashami and Jaggi, arXiv:2305.16300), by its depth there.

Each item has a haystack of its own: the sentences of a line in an order that is drawn, and the number at a line that is drawn from its
fifth. With one haystack for each depth items would differ in their digits alone, and a mode would find all of a depth's numbers or none.
"""

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
_SENTENCES: Final = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
_NEEDLE: Final = "The pass key is {key}. Remember it. {key} is the pass key.\n"
_QUESTION: Final = "What is the pass key? The pass key is"
_DEPTHS: Final = ("0-20 %", "20-40 %", "40-60 %", "60-80 %", "80-100 %")


class Passkey(Task):
    """Numbers that are right in every digit, all and by depth in the haystack: 0 % is the farthest from the question."""

    name = "passkey"
    title = "Passkey retrieval, keys right"

    def items(self, subject: Subject, passages: Sequence[Passage], length: int, count: int) -> list[Item]:
        opening, question = subject.opening(_OPENING), subject.encode(_QUESTION)
        found = []
        for n in range(count):
            draw = random.Random(f"passkey {n}")
            key = draw.randrange(10_000, 100_000)
            needle, answer = subject.encode(_NEEDLE.format(key=key)), subject.encode(f" {key}")
            lines: list[Sequence[int]] = []
            room = length - len(opening) - len(needle) - len(question) - len(answer)
            while len(line := subject.encode(" ".join(draw.sample(_SENTENCES, len(_SENTENCES))) + "\n")) <= room:
                lines.append(line)
                room -= len(line)
            depth = n % len(_DEPTHS)
            lines.insert(int((len(lines) + 1) * (depth + draw.random()) / len(_DEPTHS)), needle)
            prompt = (*opening, *(token for line in lines for token in line), *question)
            found.append(Item(prompt, tuple(answer), group=_DEPTHS[depth]))
        return found

    def read(self, subject: Subject, session: Session, items: Sequence[Item], chunk: int) -> list[Record]:
        right = [int(all(tokens)) for tokens in forced(session, items, chunk)]
        return [{"scores": {ALL: [one, 1], item.group: [one, 1]}} for item, one in zip(items, right, strict=True)]
