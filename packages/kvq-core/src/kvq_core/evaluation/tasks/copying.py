"""Random words, and the same again: what is copied must be found in the context by what stands before it (an induction head's work)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvq_core.evaluation.subject import Passage, Session, Subject
from kvq_core.evaluation.tasks.task import ALL, Item, Task, forced

if TYPE_CHECKING:
    from kvq_core.evaluation.tasks.task import Record

_WORDS: Final = """
air apple arm art baby back ball bank bird blue boat body book box boy bread brother car cat chair child church city class cloud coat
cold corn cow cup dance day dog door dream dress ear earth egg eye face family farm father field finger fire fish floor flower food
foot forest friend garden girl glass gold grass green hair hand hat head heart hill home horse house ice island key king lake land
leaf leg letter light line lion milk money moon morning mother mountain mouth music name neck nest night nose ocean paper park
plant queen rain red ring river road rock room rose salt sand school sea seed ship shoe sister sky snow son song star stone storm
street sugar summer sun table tail tea tree valley wall water wheel wind window winter wood world year
"""
_QUARTERS: Final = ("0-25 %", "25-50 %", "50-75 %", "75-100 %")
_OPENING: Final = "Words:"
_AGAIN: Final = "\n\nWords:"


class Copying(Task):
    """Tokens that are right, all and by the quarter of the list that they stand in."""

    name = "copy"
    title = "Copying random words, tokens right"

    def items(self, subject: Subject, passages: Sequence[Passage], length: int, count: int) -> list[Item]:
        opening, again = subject.opening(_OPENING), subject.encode(_AGAIN)
        choice = _WORDS.split()
        found = []
        for n in range(count):
            draw = random.Random(f"copy {n}")
            words: list[int] = []
            while True:
                word = subject.encode(f" {draw.choice(choice)}")
                if words and len(opening) + len(again) + 2 * (len(words) + len(word)) > length:
                    break
                words += word
            found.append(Item((*opening, *words, *again), tuple(words)))
        return found

    def read(self, subject: Subject, session: Session, items: Sequence[Item], chunk: int) -> list[Record]:
        return [_by_quarter(right) for right in forced(session, items, chunk)]


def _by_quarter(right: Sequence[bool]) -> Record:
    scores = {ALL: [sum(right), len(right)]}
    for n, label in enumerate(_QUARTERS):
        part = right[n * len(right) // 4 : (n + 1) * len(right) // 4]
        scores[label] = [sum(part), len(part)]
    return {"scores": scores}
