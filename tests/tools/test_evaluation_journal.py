"""Runs that were interrupted go on; finished work is not done again, and that of another run is not taken for one's own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvq_core import ArgumentError, QuantKVBackend, get_backend
from kvq_core.evaluation import Document, Estimate, Evaluation, Journal, Passage, TinySubject, evaluate
from kvq_core.evaluation.results import Tally, by_document
from kvq_core.evaluation.tiny_model import TinyModel

TEXTS = [b"x = 1\n" * 20, b"import os, sys\n" * 9, b"def f(x):\n    return x\n" * 3]
FACTS = {"model": "a", "chunk": 32}


@pytest.mark.quick
def test_records_come_back_and_a_line_that_was_cut_off_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    Journal(path, FACTS).add("kl", "int4", "1", {"kl": 0.25})
    again = Journal(path, FACTS)
    assert len(again) == 1 and again.get("kl", "int4", "1") == {"kl": 0.25} and again.get("kl", "int2", "1") is None
    whole = path.read_bytes()
    for length in range(1, len(whole)):
        path.write_bytes(whole[:length])
        journal = Journal(path, FACTS)
        assert len(journal) == 0
        journal.add("kl", "int4", "1", {"kl": 0.25})
        assert path.read_bytes() == whole


@pytest.mark.quick
def test_files_of_other_runs_are_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    Journal(path, FACTS).add("kl", "int4", "1", {"kl": 0.25})
    before = path.read_bytes()
    with pytest.raises(ArgumentError, match="of another run: chunk 32, now 64"):
        Journal(path, {**FACTS, "chunk": 64})
    assert path.read_bytes() == before
    for content in (b"a text\n", b"no newline", b'{"a": 1}\n', b"[1]\n", before + b"[1]\n"):
        path.write_bytes(content)
        with pytest.raises(ArgumentError, match="need a file that --resume wrote"):
            Journal(path, FACTS)
        assert path.read_bytes() == content


class Counting(TinySubject):
    """Notes what is opened, warming up left out; fails at the ``last``."""

    last = 10**9

    def open(self, backend: QuantKVBackend, passages: Sequence[Passage], calibration: Passage, **options: Any) -> Any:
        if list(passages) != [calibration]:
            self.opened.append((backend.mode, len(passages)))
            if len(self.opened) > self.last:
                raise KeyboardInterrupt
        return super().open(backend, passages, calibration, **options)

    def run(self, modes: Sequence[str], journal: Journal | None = None, last: int = 10**9, batch: int = 1) -> Evaluation:
        self.opened: list[tuple[str, int]] = []
        self.last = last
        calibration, *scored = self.passages([Document(str(n), text) for n, text in enumerate([b"a = 2\n" * 20, *TEXTS])], 200)
        return evaluate(self, [get_backend(m) for m in modes], scored, calibration=calibration, journal=journal, batch=batch, chunk=64)


def figures(found: Evaluation) -> list[Any]:
    return [(r.mode, r.kl, r.difference, r.bits_per_byte, r.top1, r.predicted) for r in found.results]


def test_an_interrupted_run_goes_on_and_a_mode_added_later_is_held_against_none(small_model: TinyModel, tmp_path: Path) -> None:
    subject, path = Counting(small_model), tmp_path / "run.jsonl"
    whole = figures(subject.run(["none", "int4", "int2"]))
    with pytest.raises(KeyboardInterrupt):
        subject.run(["none", "int4"], Journal(path, FACTS), last=4)
    resumed = subject.run(["none", "int4"], Journal(path, FACTS))
    assert subject.opened == [("none", 1), ("int4_per_token_head", 1)], "the third passage"
    assert figures(resumed) == whole[:2]
    subject.run(["none", "int4"], Journal(path, FACTS))
    assert subject.opened == []
    assert figures(subject.run(["none", "int4", "int2"], Journal(path, FACTS))) == whole
    assert [mode for mode, _ in subject.opened] == ["none", "int2_per_token_head"] * 3


@pytest.mark.quick
def test_passages_of_a_document_are_one_observation() -> None:
    tallies = [Tally(nats=n, predicted=1, nbytes=1) for n in (1.0, 3.0, 5.0, 7.0)]
    assert [t.nats for t in by_document(tallies, ["a", "a", "b", "b"])] == [4.0, 12.0]
    assert by_document(tallies, ["a"] * 4) == tallies, "a single one: of its passages"
    pooled = by_document(tallies, ["a", "a", "b", "b"])
    assert Estimate.ratio([t.nats for t in pooled], [t.predicted for t in pooled]) == Estimate(4.0, 2.0)
