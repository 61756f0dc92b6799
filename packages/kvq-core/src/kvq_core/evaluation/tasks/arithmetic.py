"""Word problems of one or two steps after worked examples of their kind, in the form of GSM8K: what models of 135 M parameters can do."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvq_core.evaluation.subject import Passage, Session, Subject
from kvq_core.evaluation.tasks.task import Item, Task, greedy

if TYPE_CHECKING:
    from kvq_core.evaluation.tasks.task import Record

_SHOTS: Final = 8
_ROOM: Final = 48
_NAMES: Final = ("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry")
_THINGS: Final = ("apples", "books", "cards", "coins", "marbles", "pens", "shells", "stamps")
_NUMBER: Final = r"-?\d[\d,]*(?:\.\d+)?"
_STRICT: Final = re.compile(rf"####\s*({_NUMBER})")
_FLEXIBLE: Final = re.compile(_NUMBER)


def problem(draw: random.Random, kind: int) -> tuple[str, str, int]:
    """A question, its worked answer, and the number: addition, subtraction, multiplication, or two steps for ``kind`` 0 to 3."""
    name, things = draw.choice(_NAMES), draw.choice(_THINGS)
    if kind == 2:
        a, b = draw.randint(2, 9), draw.randint(2, 9)
        story, steps, result = f"{name} has {a} boxes with {b} {things} in each box.", f"{a} * {b} = {a * b}.", a * b
    elif kind == 1:
        a = draw.randint(5, 20)
        b = draw.randint(2, a - 1)
        story, steps, result = f"{name} had {a} {things} and gave {b} of them away.", f"{a} - {b} = {a - b}.", a - b
    else:
        a, b = draw.randint(2, 20), draw.randint(2, 20)
        story, steps, result = f"{name} had {a} {things} and got {b} more.", f"{a} + {b} = {a + b}.", a + b
        if kind == 3:
            c = draw.randint(2, result - 1)
            story, steps, result = f"{story} Then {name} lost {c} of them.", f"{steps} {result} - {c} = {result - c}.", result - c
    return f"{story} How many {things} does {name} have now?", f"{steps} #### {result}", result


def is_number(found: str | None, expected: str) -> bool:
    return found is not None and float(found.replace(",", "")) == float(expected)


class Arithmetic(Task):
    """Answers that are right where the examples have them (strict), and in the last number of the text (flexible)."""

    name = "arithmetic"
    title = "Arithmetic word problems, answers right"

    def items(self, subject: Subject, passages: Sequence[Passage], length: int, count: int) -> list[Item]:
        found = []
        for n in range(count):
            draw = random.Random(f"arithmetic {n}")
            shots = [problem(draw, n % 4) for _ in range(_SHOTS)]
            question, _, result = problem(draw, n % 4)
            text = "".join(f"Question: {asked}\nAnswer: {answer}\n\n" for asked, answer, _ in shots)
            found.append(Item(tuple(subject.opening(f"{text}Question: {question}\nAnswer:")), expected=str(result), room=_ROOM))
        return found

    def read(self, subject: Subject, session: Session, items: Sequence[Item], chunk: int) -> list[Record]:
        def done(tokens: list[int]) -> bool:
            return bool(tokens) and (tokens[-1] in subject.stop_tokens or "\n" in subject.decode(tokens).lstrip())

        return [_matched(item, subject.decode(tokens)) for item, tokens in zip(items, greedy(session, items, chunk, done), strict=True)]


def _matched(item: Item, text: str) -> Record:
    strict, numbers = _STRICT.search(text), _FLEXIBLE.findall(text)
    scores = {
        "strict": [int(is_number(strict and strict[1], item.expected)), 1],
        "flexible": [int(is_number(numbers[-1] if numbers else None, item.expected)), 1],
    }
    return {"scores": scores, "text": text}
