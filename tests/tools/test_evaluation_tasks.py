"""Tasks beside KL: their items, what is counted, and what a run makes of it. Models here are scripts, or random."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvq_core import QuantKVBackend
from kvq_core.evaluation import CacheConfig, Journal, Passage, TinySubject, parse_mode
from kvq_core.evaluation.tasks import TASKS, TaskResult, run_task
from kvq_core.evaluation.tiny_model import SEPARATOR, TinyModel

NONE, INT4, INT2 = (parse_mode(mode) for mode in ("none", "int4", "int2"))
LONG = "tokens before the first difference"
PASSAGE = Passage((SEPARATOR, *b"x = 1\n" * 10), 60)


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


def run(subject: TinySubject, task: str, configs: Sequence[CacheConfig], count: int, **options: Any) -> dict[Any, TaskResult]:
    given = {"calibration": PASSAGE, "length": 120, "count": count} | options
    found = run_task(TASKS[task], subject, configs, [PASSAGE] * count, **given)
    assert not found.failures
    return {(result.mode, result.label): result for result in found.results}


def copies(mode: str, seen: bytes) -> int:
    """Without the first 20 bytes of a list."""
    words, again, copied = seen.partition(b"\nList:\n")
    return words[len(b"\0List:\n") + len(copied)] if again and (mode == "none" or len(copied) >= 20) else 0


def reads(mode: str, seen: bytes) -> int:
    """Keys in the last two fifths alone."""
    text, asked, answer = seen.partition(b"What is the pass key? The pass key is")
    before, _, after = text.partition(b"The pass key is")
    return (after[:6] + b"\n")[len(answer)] if asked and (mode == "none" or len(before) > 0.6 * len(text)) else 0


def writes(mode: str, seen: bytes) -> int:
    """Ends after 20 tokens."""
    return SEPARATOR if mode != "none" and len(seen) - len(PASSAGE.tokens) == 20 else ord("a")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("task", "answers", "options", "exact", "expected"),
    [
        ("copy", copies, {"count": 2}, {"all": 1}, {"0-25 %": 0, "75-100 %": 1}),
        ("passkey", reads, {"count": 10, "length": 1500}, {"all": 1}, {"all": 0.4, "0 %": 0, "25 %": 0, "50 %": 0, "75 %": 1, "100 %": 1}),
        ("generate", writes, {"count": 1}, {"same text": 1, LONG: 64}, {LONG: 20, "same text": 0}),
    ],
)
def test_what_is_counted(task: str, answers: Any, options: dict[str, Any], exact: Any, expected: Any, small_model: TinyModel) -> None:
    found = run(Scripted(small_model, answers), task, [NONE, INT4], **options)
    assert {label: found["none", label].value.mean for label in exact} == exact
    assert {label: found[INT4.label, label].value.mean for label in expected} == pytest.approx(expected)
    for (mode, label), result in found.items():
        mean = result.value.mean
        assert result.difference.mean == pytest.approx(mean - found["none", label].value.mean)
        assert mode == "none" or not result.is_share or result.value.error == pytest.approx((mean * (1 - mean) / result.n) ** 0.5)


@pytest.mark.quick
@pytest.mark.parametrize(("form", "right"), [("3 + 4 = 7. #### {}\n", [1, 1]), ("It is {}.\n", [0, 1]), ("#### {} or 1234567\n", [1, 0])])
def test_answers_to_word_problems_are_matched_strictly_and_flexibly(form: str, right: list[int], small_model: TinyModel) -> None:
    (item,) = TASKS["arithmetic"].items(TinySubject(small_model), [], 0, 1)
    text = (" " + form.format(item.expected)).encode()
    found = run(Scripted(small_model, lambda mode, seen: text[max(len(seen) - len(item.prompt), 0)]), "arithmetic", [NONE], count=1)
    assert [found["none", label].value.mean for label in ("strict", "flexible")] == right


@pytest.mark.parametrize("name", ["copy", "generate"])
def test_items_side_by_side_are_those_one_by_one(name: str, small_model: TinyModel) -> None:
    """Through real caches: prompts of different lengths and in pieces, texts that end at different tokens."""
    alone, together = (run(TinySubject(small_model), name, [NONE], count=2, batch=n, chunk=size) for n, size in ((1, 128), (2, 7)))
    assert alone == together


def test_a_run_goes_on_and_a_failing_mode_costs_the_others_nothing(small_model: TinyModel, tmp_path: Path) -> None:
    def fails(mode: str, seen: bytes) -> int:
        if mode == INT4.label:
            raise SystemExit("on purpose")
        return ord("a")

    given: Any = {"calibration": PASSAGE, "length": 60, "count": 2}
    subject = Scripted(small_model, fails)
    found = run_task(TASKS["copy"], subject, [NONE, INT4, INT2], [], journal=Journal(tmp_path / "run.jsonl"), **given)
    assert set(found.failures) == {INT4.label} and {r.mode for r in found.results} == {"none", INT2.label}
    subject.fed = 0
    again = run_task(TASKS["copy"], subject, [NONE, INT2], [], journal=Journal(tmp_path / "run.jsonl"), **given)
    assert again.results == found.results and subject.fed == 0
    with pytest.raises(SystemExit):
        run_task(TASKS["copy"], subject, [INT4, NONE], [], **given)
