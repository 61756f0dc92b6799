"""Evaluation through the cache: figures against a dense model and sums done otherwise, its journal, and what ``MODE:name=value`` names."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from kvq_core import ArgumentError, get_backend
from kvq_core.evaluation import Document, Estimate, Journal, Passage, TinySubject, evaluate, parse_mode, read_documents
from kvq_core.evaluation.options import split_modes
from kvq_core.evaluation.results import Tally, by_document
from kvq_core.evaluation.tiny_model import SEPARATOR, TinyModel, dense_attention

TEXTS = [b"x = 1\n" * 20, b"import os, sys\n" * 9, b"def f(x):\n    return x\n" * 3]
FACTS = {"model": "a", "chunk": 32}


@pytest.fixture(scope="module")
def subject(small_model: TinyModel) -> TinySubject:
    return TinySubject(small_model)


def passages(subject: TinySubject) -> list[Passage]:
    return subject.passages([Document(str(i), text) for i, text in enumerate(TEXTS)], 200)


@pytest.mark.quick
def test_documents_of_a_file_are_cut_into_passages(subject: TinySubject, tmp_path: Path) -> None:
    (path := tmp_path / "text.txt").write_text("#### a\none\n#### b\ntwo\n#### not\nthree")
    assert read_documents(path) == [Document("a", b"one\n"), Document("b", b"two\n"), Document("not", b"three\n")]
    path.write_text("plain, with a line\n#### inside\n")
    assert read_documents(path) == [Document("text.txt", b"plain, with a line\n#### inside\n")]
    assert subject.passages([Document("a", b"abcdef")], 3) == [Passage((SEPARATOR, *b"abc"), 3), Passage((SEPARATOR, *b"def"), 3)]
    assert len(subject.passages([Document("a", b"x" * 255)], 10_000)[0].tokens) == subject.model.config.max_len


@pytest.mark.quick
def test_estimates_have_the_standard_error_of_documents() -> None:
    weighted = Estimate.ratio([2.0, 9.0], [1.0, 3.0])
    residuals = (2 - 11 / 4) ** 2 + (9 - 3 * 11 / 4) ** 2
    assert (weighted.mean, weighted.error) == (11 / 4, pytest.approx(math.sqrt(2 * residuals) / 4))
    pooled = by_document([Tally(nats=n, predicted=1) for n in (1.0, 3.0, 5.0, 7.0)], ["a", "a", "b", "b"])
    assert Estimate.ratio([t.nats for t in pooled], [t.predicted for t in pooled]) == Estimate(4.0, 2.0)


def test_none_through_the_cache_is_the_dense_model(subject: TinySubject) -> None:
    scored, nats = passages(subject), []
    (found,) = evaluate(subject, [get_backend("none")], scored, calibration=scored[0], chunk=16).results
    for tokens in (torch.tensor(passage.tokens) for passage in scored):
        logits = subject.model(tokens[:-1], torch.arange(len(tokens) - 1), dense_attention)
        nats.append(float(F.cross_entropy(logits, tokens[1:], reduction="sum")))
    expected = Estimate.ratio([n / math.log(2) for n in nats], [float(p.nbytes) for p in scored])
    # Pages hold bf16: that is all the difference.
    assert found.bits_per_byte.mean == pytest.approx(expected.mean, rel=0.01)
    assert found.perplexity.mean == pytest.approx(2**found.bits_per_byte.mean), "a token is a byte here"
    assert (found.difference.mean, found.kl.mean, found.top1.mean, found.times_smaller) == (0, 0, 1, 1)
    assert (found.passages, found.predicted) == (3, sum(map(len, TEXTS))) and found.peak_bytes is None
    with pytest.raises(ArgumentError, match="passages"):
        evaluate(subject, [get_backend("none")], [], calibration=scored[0])


def test_kl_and_agreement_against_whole_distributions(subject: TinySubject) -> None:
    """The same two passes over one passage, each in one piece, compared by torch's own divergence."""
    passage = passages(subject)[1]
    rows = []
    for mode in ("none", "int2"):
        session = subject.open(get_backend(mode), [passage], passage)
        with torch.inference_mode():
            rows.append(session.feed([passage.tokens[:-1]])[0].log_softmax(-1))
    expected = F.kl_div(rows[1], rows[0], reduction="batchmean", log_target=True)
    found = evaluate(subject, [get_backend("none"), get_backend("int2")], [passage], calibration=passage, chunk=1000).results[1]
    assert found.kl.mean == pytest.approx(float(expected), rel=1e-4) and math.isnan(found.kl.error)
    assert found.top1.mean == pytest.approx(float((rows[0].argmax(-1) == rows[1].argmax(-1)).double().mean()))
    nats = float((rows[0] - rows[1]).gather(1, torch.tensor(passage.tokens[1:])[:, None]).mean())
    assert found.difference.mean == pytest.approx(nats / math.log(2), abs=1e-5)


@pytest.mark.quick
def test_a_line_that_was_cut_off_is_written_again_and_files_of_other_runs_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    Journal(path, FACTS).add("kl", "int4", "1", {"kl": 0.25})
    again, whole = Journal(path, FACTS), path.read_bytes()
    assert len(again) == 1 and again.get("kl", "int4", "1") == {"kl": 0.25} and again.get("kl", "int2", "1") is None
    for length in range(1, len(whole)):
        path.write_bytes(whole[:length])
        journal = Journal(path, FACTS)
        assert len(journal) == 0
        journal.add("kl", "int4", "1", {"kl": 0.25})
        assert path.read_bytes() == whole
    with pytest.raises(ArgumentError, match="of another run: chunk 32, now 64"):
        Journal(path, {**FACTS, "chunk": 64})
    for content in (b"a text\n", b"no newline", b'{"a": 1}\n', b"[1]\n", b"[" * 100_000 + b"\n", whole + b"[1]\n"):
        path.write_bytes(content)
        with pytest.raises(ArgumentError, match="need a file that --resume wrote"):
            Journal(path, FACTS)
        assert path.read_bytes() == content


@pytest.mark.quick
def test_lists_of_modes_with_options() -> None:
    text = "none,int2:residual_length=64,sink_tokens=4,k8v4:smoothing=mean, kvq-int4:int4/int8:sink_tokens=1,"
    label = "int2_per_token_head:smoothing=first_prefill,residual_length=64,sink_tokens=4"
    assert len(split_modes(text)) == 4 and all(parse_mode(parse_mode(mode).label) == parse_mode(mode) for mode in split_modes(text))
    assert parse_mode("int2:sink_tokens=4, residual_length=64,smoothing=first_prefill").label == label, "in one order, however given"


def test_exact_rows_lose_less_and_are_counted(subject: TinySubject) -> None:
    read = subject.passages([Document("a", bytes(range(32, 120)) * 2)], 120)
    spelled = ["none", "int2", "int2:residual_length=64,sink_tokens=4", "int2:residual_length=500"]
    spelled += ["int2:residual_length=500,residual_mode=int8"]
    found = evaluate(subject, [parse_mode(text) for text in spelled], read, calibration=read[0], chunk=16).results
    _, plain, windowed, all_exact, in_int8 = (result.kl.mean for result in found)
    assert all_exact < 1e-4 < windowed < plain and all_exact < in_int8 < windowed
    assert [found[1].bits, found[2].bits] == [2.5, pytest.approx(2.5 + 112 * 16 / found[2].context)], "as kvq calc counts"
