"""Greedy text after a passage: how far it stays with ``none``'s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvq_core.evaluation.subject import Passage, Session, Subject
from kvq_core.evaluation.tasks.task import Item, Task, greedy

if TYPE_CHECKING:
    from kvq_core.evaluation.tasks.task import Record, Scores

_ROOM: Final = 64
_SAME: Final = "same text"
_COMMON: Final = "tokens before the first difference"


class Generation(Task):
    """Texts that are ``none``'s to the end, and the tokens before the first difference, at most 64."""

    name = "generate"
    title = f"Greedy text, up to {_ROOM} tokens after a passage, beside none's"
    means = (_COMMON,)

    def items(self, subject: Subject, passages: Sequence[Passage], length: int, count: int) -> list[Item]:
        return [Item(passage.tokens, room=_ROOM) for passage in passages[:count]]

    def read(self, subject: Subject, session: Session, items: Sequence[Item], chunk: int) -> list[Record]:
        texts = greedy(session, items, chunk, lambda found: bool(found) and found[-1] in subject.stop_tokens)
        return [{"tokens": tokens, "text": subject.decode(tokens)} for tokens in texts]

    def scores(self, record: Record, exact: Record) -> Scores:
        mine, reference = record["tokens"], exact["tokens"]
        common = next((n for n, (a, b) in enumerate(zip(mine, reference, strict=False)) if a != b), min(len(mine), len(reference)))
        return {_SAME: (int(mine == reference), 1), _COMMON: (common, 1)}
