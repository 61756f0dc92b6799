"""Tasks beside KL: their items, what is counted, and what a run makes of it. Models here are scripts, or random."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvq_core import QuantKVBackend
from kvq_core.evaluation import CacheConfig, Document, Journal, Passage, TinySubject, parse_mode
from kvq_core.evaluation.tasks import TASKS, TaskResult, run_task
from kvq_core.evaluation.tasks.arithmetic import is_number, problem
from kvq_core.evaluation.tiny_model import SEPARATOR, TinyModel

NONE, INT4, INT2 = (parse_mode(mode) for mode in ("none", "int4", "int2"))
PASSAGE = Passage((SEPARATOR, *b"x = 1\n" * 10), 60)
QUARTERS = ("0-25 %", "25-50 %", "50-75 %", "75-100 %")


class Scripted(TinySubject):
    """Says what ``answers`` make of a mode and all bytes so far: the next byte."""

    def __init__(self, model: TinyModel, answers: Callable[[str, bytes], int]) -> None:
        super().__init__(model)
        self.answers, self.fed = answers, 0

    def open(self, backend: QuantKVBackend, passages: Sequence[Passage], calibration: Passage, **options: Any) -> Any:
        subject, mode, seen = self, backend.mode, [bytearray() for _ in passages]

        class Session:
            def feed(self, rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
                found = []
                for row, text, passage in zip(rows, seen, passages, strict=True):
                    logits = torch.zeros(len(row), 256)
                    for n, token in enumerate(row):
                        text.append(token)
                        logits[n, subject.answers(mode, bytes(text))] = 1
                    assert len(text) <= len(passage.tokens), "more than the cache was opened for"
                    found.append(logits)
                subject.fed += 1
                return found

        return Session()


def run(subject: TinySubject, task: str, configs: Sequence[CacheConfig] = (NONE,), count: int = 4, **options: Any) -> dict[Any, TaskResult]:
    given = {"calibration": PASSAGE, "length": 120, "count": count} | options
    found = run_task(TASKS[task], subject, configs, [PASSAGE] * count, **given)
    assert not found.failures
    return {(result.mode, result.label): result for result in found.results}


@pytest.mark.quick
@pytest.mark.parametrize("name", TASKS)
def test_items_are_the_same_at_every_call_and_differ(name: str, small_model: TinyModel) -> None:
    subject = TinySubject(small_model)
    passages = subject.passages([Document("a", bytes(random.Random(1).choices(b"abcd", k=400)))], 60)
    once, again = (TASKS[name].items(subject, passages, 300, 6) for _ in range(2))
    assert once == again and len({item.digest for item in once}) == 6
    if name in ("copy", "passkey"):
        assert all(300 - 100 < len(item.space.tokens) <= 300 for item in once)


@pytest.mark.quick
def test_copies_are_counted_by_quarter(small_model: TinyModel) -> None:
    """The first 20 bytes of a list are wrong: of them 4 to 5 are ends of words, which are not counted."""

    def copies(mode: str, seen: bytes) -> int:
        words, again, copied = seen.partition(b"\nList:\n")
        return words[len(b"\0List:\n") + len(copied)] if again and (mode == "none" or len(copied) >= 20) else 0

    found = run(Scripted(small_model, copies), "copy", [NONE, INT4], count=2)
    assert found["none", "all"].value.mean == 1 and found["none", "all"].n == sum(found["none", q].n for q in QUARTERS)
    int4, items = found[INT4.label, "all"], TASKS["copy"].items(TinySubject(small_model), [], 120, 2)
    wrong = sum(token != ord("\n") for item in items for token in item.answer[:20])
    assert int4.n == sum(token != ord("\n") for item in items for token in item.answer) and 20 < wrong < 40
    assert int4.value.mean == pytest.approx(1 - wrong / int4.n) and int4.difference.mean == pytest.approx(-wrong / int4.n)
    assert int4.value.error == pytest.approx((int4.value.mean * (1 - int4.value.mean) / int4.n) ** 0.5), "binomial"
    assert found[INT4.label, QUARTERS[0]].value.mean == 0 and found[INT4.label, QUARTERS[3]].value.mean == 1


@pytest.mark.quick
def test_keys_are_found_by_depth(small_model: TinyModel) -> None:
    def reads(mode: str, seen: bytes) -> int:
        text, asked, answer = seen.partition(b"What is the pass key? The pass key is")
        before, _, after = text.partition(b"The pass key is")
        near = len(before) > 0.6 * len(text)
        return (after[:6] + b"\n")[len(answer)] if asked and (mode == "none" or near) else 0

    found = run(Scripted(small_model, reads), "passkey", [NONE, INT4], count=10, length=1500)
    assert {label: r.n for (mode, label), r in found.items() if mode == "none"} == {"all": 10} | {f"{d} %": 2 for d in (0, 25, 50, 75, 100)}
    assert [found[INT4.label, f"{d} %"].value.mean for d in (0, 25, 50, 75, 100)] == [0, 0, 0, 1, 1]
    assert found["none", "all"].value.mean == 1 and found[INT4.label, "all"].difference.mean == -0.6


@pytest.mark.quick
@pytest.mark.parametrize(
    ("form", "strict", "flexible"),
    [
        ("3 + 4 = 7. #### {}\n\nQuestion: 9", 1, 1),
        ("It is {}.\n", 0, 1),
        ("#### {} or 1234567\n", 1, 0),
        ("#### 1,234,567\n", 0, 0),
        ("no\n", 0, 0),
    ],
)
def test_word_problems_are_right_and_answers_matched_strictly_and_flexibly(
    form: str, strict: int, flexible: int, small_model: TinyModel
) -> None:
    for n in range(8):
        _, answer, result = problem(random.Random(n), n % 4)
        steps, _, stated = answer.partition(" #### ")
        assert int(stated) == result > 0
        assert all(int(eval(left)) == int(right) for left, _, right in (s.partition(" = ") for s in steps.rstrip(".").split(". ")))
    (item,) = TASKS["arithmetic"].items(TinySubject(small_model), [], 0, 1)
    assert item.prompt[-7:] == tuple(b"Answer:") and bytes(item.prompt).count(b"####") == 8
    text = (" " + form.format(item.expected)).encode()
    subject = Scripted(small_model, lambda mode, seen: text[max(len(seen) - len(item.prompt), 0)])
    found = run(subject, "arithmetic", count=1)
    assert [found["none", label].value.mean for label in ("strict", "flexible")] == [strict, flexible]
    assert is_number("1,234", "1234") and is_number("12.0", "12") and not is_number("12.5", "12") and not is_number(None, "0")


@pytest.mark.quick
def test_texts_are_compared_with_nones(small_model: TinyModel) -> None:
    def writes(mode: str, seen: bytes) -> int:
        n = len(seen) - len(PASSAGE.tokens)
        return ord("b") if mode == INT2.label and n >= 10 else SEPARATOR if mode == INT4.label and n == 20 else ord("a")

    found = run(Scripted(small_model, writes), "generate", [NONE, INT4, INT2], count=1)
    common = {mode: found[mode, "tokens before the first difference"].value.mean for mode in ("none", INT4.label, INT2.label)}
    assert common == {"none": 64, INT4.label: 20, INT2.label: 10}, "int4 ends after 20"
    assert [found[mode, "same text"].value.mean for mode in common] == [1, 0, 0]


@pytest.mark.parametrize(("name", "modes", "chunk"), [("copy", [NONE, INT2], 128), ("generate", [NONE], 7)])
def test_items_side_by_side_are_those_one_by_one(name: str, modes: list[CacheConfig], chunk: int, small_model: TinyModel) -> None:
    """Through real caches: prompts of different lengths, texts that end at different tokens, prompts in pieces."""
    alone, together = (run(TinySubject(small_model), name, modes, count=2, batch=n, chunk=size) for n, size in ((1, 128), (2, chunk)))
    assert alone == together


def test_a_run_goes_on_and_a_failing_mode_costs_the_others_nothing(small_model: TinyModel, tmp_path: Path) -> None:
    def writes(mode: str, seen: bytes) -> int:
        if mode == INT4.label:
            raise SystemExit("on purpose")
        return ord("a")

    path, told = tmp_path / "run.jsonl", []
    given: Any = {"calibration": PASSAGE, "length": 60, "count": 2, "report": lambda count, scores: told.append((count, list(scores)))}
    subject = Scripted(small_model, writes)
    found = run_task(TASKS["copy"], subject, [NONE, INT4, INT2], [], journal=Journal(path), **given)
    assert set(found.failures) == {INT4.label} and {r.mode for r in found.results} == {"none", INT2.label}
    assert told == [(2, ["none", INT2.label])] * 2
    subject.fed = 0
    again = run_task(TASKS["copy"], subject, [NONE, INT2], [], journal=Journal(path), **given)
    assert again.results == found.results and subject.fed == 0
    with pytest.raises(SystemExit):
        run_task(TASKS["copy"], subject, [INT4, NONE], [], **given)
