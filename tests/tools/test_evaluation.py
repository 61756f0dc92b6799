"""Evaluation through the cache: figures against dense models and sums done otherwise, tasks that scripts answer, journals, and what
``MODE:name=value`` names. The accuracy scripts, each once on a small random model: kvq's modes, formats and caches of others."""

import copy
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import accuracy_compare as compare
import accuracy_report as report
import peer_caches as peers
from command_line import CODE
from kvq_core import ArgumentError, QuantKVBackend, get_backend
from kvq_core.evaluation import CacheConfig, Document, Estimate, Journal, Passage, TinySubject, evaluate, parse_mode, read_documents
from kvq_core.evaluation.huggingface import HuggingFaceSubject, load
from kvq_core.evaluation.options import split_modes
from kvq_core.evaluation.results import Tally, by_document
from kvq_core.evaluation.tasks import TASKS, TaskResult, run_task
from kvq_core.evaluation.tiny_model import SEPARATOR, TinyModel, dense_attention

NONE, INT4, INT2 = (parse_mode(mode) for mode in ("none", "int4", "int2"))
TEXTS = [b"x = 1\n" * 20, b"import os, sys\n" * 9, b"def f(x):\n    return x\n" * 3]
FACTS = {"model": "a", "chunk": 32}
EXACT = {torch.bfloat16: 1e-2, torch.float32: 1e-4}
"""How far rounding takes results, by the dtype of rows."""
Subject = TinySubject | HuggingFaceSubject


@pytest.fixture(scope="module")
def tiny(small_model: TinyModel) -> TinySubject:
    return TinySubject(small_model)


@pytest.fixture(scope="module", params=["tiny", "llama"])
def modelled(request: pytest.FixtureRequest) -> tuple[Subject, Callable[[torch.Tensor], torch.Tensor]]:
    """A subject, and the logits of its model without a cache."""
    if request.param == "tiny":
        model = request.getfixturevalue("small_model")
        return TinySubject(model), lambda tokens: model(tokens, torch.arange(len(tokens)), dense_attention)
    folder = request.getfixturevalue("llama_folder")
    pytest.importorskip("kvq_transformers")
    from transformers import LlamaForCausalLM

    dense = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return load(str(folder), torch.device("cpu")), lambda tokens: dense(tokens[None]).logits[0]


def passages(subject: Subject) -> list[Passage]:
    return subject.passages([Document(str(i), text) for i, text in enumerate(TEXTS)], 200)


@pytest.mark.quick
def test_documents_of_a_file_are_cut_into_passages(tiny: TinySubject, tmp_path: Path) -> None:
    (path := tmp_path / "text.txt").write_text("#### a\none\n#### b\ntwo\n#### not\nthree")
    assert read_documents(path) == [Document("a", b"one\n"), Document("b", b"two\n"), Document("not", b"three\n")]
    path.write_text("plain, with a line\n#### inside\n")
    assert read_documents(path) == [Document("text.txt", b"plain, with a line\n#### inside\n")]
    assert tiny.passages([Document("a", b"abcdef")], 3) == [Passage((SEPARATOR, *b"abc"), 3), Passage((SEPARATOR, *b"def"), 3)]
    assert len(tiny.passages([Document("a", b"x" * 255)], 10_000)[0].tokens) == tiny.model.config.max_len


@pytest.mark.quick
def test_estimates_have_the_standard_error_of_documents() -> None:
    weighted = Estimate.ratio([2.0, 9.0], [1.0, 3.0])
    residuals = (2 - 11 / 4) ** 2 + (9 - 3 * 11 / 4) ** 2
    assert (weighted.mean, weighted.error) == (11 / 4, pytest.approx(math.sqrt(2 * residuals) / 4))
    assert math.isnan(Estimate.ratio([2.0], [1.0]).error)
    pooled = by_document([Tally(nats=n, predicted=1) for n in (1.0, 3.0, 5.0, 7.0)], ["a", "a", "b", "b"])
    assert Estimate.ratio([t.nats for t in pooled], [t.predicted for t in pooled]) == Estimate(4.0, 2.0)


def test_figures_are_those_of_the_model_itself_and_of_whole_distributions(modelled: Any) -> None:
    """none's against the model without a cache, int2's against passes over whole passages compared by torch's own divergence."""
    subject, dense = modelled
    scored = passages(subject)
    rows: list[list[torch.Tensor]] = [[], [], []]
    with torch.inference_mode():
        for passage in scored:
            opened = (subject.open(config.backend, [passage], scored[0]) for config in (NONE, INT2))
            found = [dense(torch.tensor(passage.tokens[:-1])), *(session.feed([passage.tokens[:-1]])[0] for session in opened)]
            for kept, logits in zip(rows, found, strict=True):
                kept.append(logits.log_softmax(-1))
    own, exact, coarse = map(torch.cat, rows)
    following = torch.tensor([token for passage in scored for token in passage.tokens[1:]])
    nbytes = sum(passage.nbytes for passage in scored)
    nats = F.nll_loss(own, following, reduction="sum").item()
    none, int8, int2 = evaluate(subject, [NONE, parse_mode("int8"), INT2], scored, calibration=scored[0], chunk=16).results
    close = EXACT[subject.rows_dtype]
    assert none.bits_per_byte.mean == pytest.approx(nats / math.log(2) / nbytes, rel=close)
    assert none.perplexity.mean == pytest.approx(math.exp(nats / len(following)), rel=3 * close)
    assert (none.difference.mean, none.kl.mean, none.top1.mean, none.times_smaller) == (0, 0, 1, 1) and 0 < int8.kl.mean < int2.kl.mean
    assert int2.kl.mean == pytest.approx(F.kl_div(coarse, exact, reduction="batchmean", log_target=True).item(), rel=close)
    assert int2.top1.mean == pytest.approx((exact.argmax(-1) == coarse.argmax(-1)).double().mean().item(), abs=close)
    worse = F.nll_loss(coarse - exact, following, reduction="sum").item()
    assert int2.difference.mean == pytest.approx(worse / math.log(2) / nbytes, rel=close)
    assert (none.passages, none.predicted) == (3, len(following)) and none.peak_bytes is None
    sizes = (none.bytes_per_token, int2.bytes_per_token, int2.times_smaller)
    assert sizes == (2 * 2 * 64 * 2, 2 * 2 * (16 + 4), 128 / 20), "layers, K and V; bf16, whatever the rows"
    with pytest.raises(ArgumentError, match="passages"):
        evaluate(subject, [NONE], [], calibration=scored[0])


def test_rows_of_a_batch_are_read_as_they_are_alone(modelled: Any) -> None:
    """Chunks of different lengths, some of them empty."""
    subject, config = modelled[0], parse_mode("int2:residual_length=16,sink_tokens=4")
    close = EXACT[subject.rows_dtype]
    texts = [subject.passages([Document("a", CODE[n : n + length].encode())], length)[0] for n, length in ((0, 90), (7, 41), (20, 64))]
    parts = [[passage.tokens[first : first + 32] for passage in texts] for first in range(0, 96, 32)]
    parts[1][0], parts[2][0] = parts[1][0][:5], (*parts[1][0][5:], *parts[2][0])
    with torch.inference_mode():
        together = subject.open(config.backend, texts, texts[0], **config.options)
        found = [together.feed(rows) for rows in parts]
        for n, passage in enumerate(texts):
            alone = subject.open(config.backend, [passage], texts[0], **config.options)
            for rows, logits in zip(parts, found, strict=True):
                assert len(logits[n]) == len(rows[n])
                if rows[n]:
                    torch.testing.assert_close(logits[n], alone.feed([rows[n]])[0], rtol=close, atol=close)


def test_exact_rows_lose_less_and_are_counted(tiny: TinySubject) -> None:
    read = tiny.passages([Document("a", bytes(range(32, 120)) * 2)], 120)
    spelled = ["none", "int2", "int2:residual_length=64,sink_tokens=4", "int2:residual_length=500"]
    spelled += ["int2:residual_length=500,residual_mode=int8"]
    found = evaluate(tiny, [parse_mode(text) for text in spelled], read, calibration=read[0], chunk=16).results
    _, plain, windowed, all_exact, in_int8 = (result.kl.mean for result in found)
    assert all_exact < 1e-4 < windowed < plain and all_exact < in_int8 < windowed
    assert [found[1].bits, found[2].bits] == [2.5, pytest.approx(2.5 + 112 * 16 / found[2].context)], "as kvq calc counts"


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


LONG = "tokens before the first difference"
PASSAGE = Passage((SEPARATOR, *b"x = 1\n" * 10), 60)


class Scripted(TinySubject):
    """Says what ``answers`` make of a mode and all bytes so far: the next byte. int2 fails."""

    def __init__(self, model: TinyModel, answers: Callable[[str, bytes], int]) -> None:
        super().__init__(model)
        self.answers = answers

    def open(self, backend: QuantKVBackend, passages: Sequence[Passage], calibration: Passage, **options: Any) -> Any:
        seen = [bytearray() for _ in passages]

        def feed(rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
            if backend.mode == INT2.label:
                raise SystemExit("on purpose")
            found = [torch.zeros(len(row), 256) for row in rows]
            for row, text, passage, logits in zip(rows, seen, passages, found, strict=True):
                for token, scores in zip(row, logits, strict=True):
                    text.append(token)
                    scores[self.answers(backend.mode, bytes(text))] = 1
                assert len(text) <= len(passage.tokens), "more than the cache was opened for"
            return found

        return SimpleNamespace(feed=feed)


def run(subject: TinySubject, task: str, configs: Sequence[CacheConfig], count: int, **options: Any) -> dict[Any, TaskResult]:
    given = {"calibration": PASSAGE, "length": 120, "count": count} | options
    found = run_task(TASKS[task], subject, configs, [PASSAGE] * count, **given)
    assert set(found.failures) <= {INT2.label}
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


DEPTHS = ("0-20 %", "20-40 %", "40-60 %", "60-80 %", "80-100 %")


@pytest.mark.quick
def test_no_two_haystacks_are_alike(small_model: TinyModel) -> None:
    """Else what a mode makes of one decides many items."""
    items = TASKS["passkey"].items(TinySubject(small_model), [], 1500, 50)
    texts = [bytes(item.prompt) for item in items]
    number = re.compile(rb"\d{5}")
    assert len({number.sub(b"", text) for text in texts}) == 50 and all(1400 < len(text) <= 1500 for text in texts)
    for item, text in zip(items, texts, strict=True):
        key, place = bytes(item.answer).strip(), text.index(b"The pass key is")
        before, lines = text[:place].count(b"\n") - 1, text.count(b"\n") - 1
        depth = DEPTHS.index(item.group)
        assert text.count(key) == 2 and math.floor(lines * depth / 5) <= before <= math.ceil(lines * (depth + 1) / 5)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("task", "answers", "options", "exact", "expected"),
    [
        ("copy", copies, {"count": 2}, {"all": 1}, {"0-25 %": 0, "75-100 %": 1}),
        ("passkey", reads, {"count": 10, "length": 1500}, {"all": 1}, {"all": 0.4} | dict(zip(DEPTHS, (0, 0, 0, 1, 1), strict=True))),
        ("generate", writes, {"count": 1}, {"same text": 1, LONG: 64}, {LONG: 20, "same text": 0}),
    ],
)
def test_what_is_counted(
    task: str, answers: Any, options: dict[str, Any], exact: Any, expected: Any, small_model: TinyModel, tmp_path: Path
) -> None:
    """A mode that fails costs the others nothing, and nothing is done twice."""
    options["journal"] = Journal(tmp_path / "run.jsonl")
    found = run(Scripted(small_model, answers), task, [NONE, INT2, INT4], **options)
    assert {label: found["none", label].value.mean for label in exact} == exact
    assert {label: found[INT4.label, label].value.mean for label in expected} == pytest.approx(expected)
    assert {mode for mode, _ in found} == {"none", INT4.label}
    for (_, label), result in found.items():
        mean = result.value.mean
        assert result.difference.mean == pytest.approx(mean - found["none", label].value.mean)
        if task == "copy":
            # Both lists are right in the same places: the trials within one say nothing of others.
            assert result.value.error == pytest.approx(0, abs=0.01)
        elif task == "passkey":
            assert result.value.error == pytest.approx((mean * (1 - mean) / (result.n - 1)) ** 0.5)
    options["journal"] = Journal(tmp_path / "run.jsonl")
    assert run(Scripted(small_model, lambda mode, seen: pytest.fail("read again")), task, [NONE, INT4], **options) == found
    with pytest.raises(SystemExit):
        run(Scripted(small_model, answers), task, [INT2, NONE], **options)


@pytest.mark.quick
@pytest.mark.parametrize(("form", "right"), [("3 + 4 = 7. #### {}\n", [1, 1]), ("It is {}.\n", [0, 1]), ("#### {} or 1234567\n", [1, 0])])
def test_answers_to_word_problems_are_matched_strictly_and_flexibly(form: str, right: list[int], small_model: TinyModel) -> None:
    (item,) = TASKS["arithmetic"].items(TinySubject(small_model), [], 0, 1)
    text = (" " + form.format(item.expected)).encode()
    found = run(Scripted(small_model, lambda mode, seen: text[max(len(seen) - len(item.prompt), 0)]), "arithmetic", [NONE], count=1)
    assert [found["none", label].value.mean for label in ("strict", "flexible")] == right


def test_a_group_that_was_cut_off_is_read_whole(small_model: TinyModel, tmp_path: Path) -> None:
    """Its items have a part in the mean of their keys; so has another group's."""

    class Counted(TinySubject):
        def open(self, backend: QuantKVBackend, passages: Sequence[Passage], calibration: Passage, **options: Any) -> Any:
            opened.append(len(passages))
            return super().open(backend, passages, calibration, **options)

    opened: list[int] = []
    subject, configs, path = Counted(small_model), [NONE, parse_mode("int4:smoothing=first_prefill")], tmp_path / "run.jsonl"

    def again(count: int, batch: int) -> list[int]:
        opened.clear()
        run(subject, "copy", configs, count=count, batch=batch, journal=Journal(path))
        return list(opened)

    assert again(3, 3) == [3, 3] and again(3, 3) == []
    path.write_bytes(path.read_bytes()[:-40])
    assert again(3, 3) == [3] and again(2, 2) == [2] and again(3, 3) == []


def test_models_are_told_apart_by_every_weight_and_by_their_sizes(small_model: TinyModel, llama_folder: Path) -> None:
    def other(change: Callable[[TinyModel], object]) -> str:
        change(model := copy.deepcopy(small_model))
        return TinySubject(model).fingerprint()

    known = TinySubject(small_model).fingerprint()
    assert other(lambda model: None) == known != other(lambda model: model.embed.weight[3, 5].add_(1e-3))
    assert other(lambda model: setattr(model, "config", replace(model.config, rope_theta=500.0))) != known
    pytest.importorskip("kvq_transformers")
    subject, same = (load(str(llama_folder), torch.device("cpu")) for _ in range(2))
    assert subject.fingerprint() == same.fingerprint()
    same.model.config.rms_norm_eps = 0.1
    assert subject.fingerprint() != same.fingerprint()


@pytest.mark.parametrize("name", ["copy", "generate"])
def test_items_side_by_side_are_those_one_by_one(name: str, tiny: TinySubject) -> None:
    """Through real caches: prompts of different lengths and in pieces, texts that end at different tokens."""
    alone, together = (run(tiny, name, [NONE], count=2, batch=n, chunk=size) for n, size in ((1, 128), (2, 7)))
    assert alone == together


DOCUMENTS = [Document(str(j), bytes(33 + (7 * i + i * i // (j + 3)) % 90 for i in range(300))) for j in range(4)]


def test_a_report_orders_modes_as_the_evaluation_does(tiny: TinySubject) -> None:
    small = report.Sizes(documents=3, ends=(30, 90), smoothed=2, recorded=2, recorded_length=40, distances=(64, 120), chunk=50, batch=2)
    backends = [get_backend(mode) for mode in ("none", "int8", "int2")]
    none, fine, coarse = report.measure(tiny, backends, DOCUMENTS, small)
    assert none.layers == () and none.whole.difference.mean == none.whole.difference.error == 0
    for one, two in zip(fine.layers, coarse.layers, strict=True):
        assert one.key_snr.mean > two.key_snr.mean + 20 and one.output_error.mean < two.output_error.mean / 5
    assert len({one.whole.bits.mean for one in coarse.smoothed}) == 4, "of each kind of smoothing"
    *scored, last = (tiny.passages([document], 90)[0] for document in DOCUMENTS)
    expected = evaluate(tiny, backends, scored, calibration=last, chunk=50, batch=2).results[2]
    assert coarse.whole.bits.mean == pytest.approx(expected.bits_per_byte.mean, rel=1e-4)
    assert coarse.whole.difference.mean == pytest.approx(expected.difference.mean, rel=1e-3)


@pytest.mark.quick
def test_a_run_is_judged_against_the_page_which_it_leaves_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    committed, out = report.DATA.read_text(encoding="utf-8"), tmp_path / "results" / "gpu.json"
    other = json.loads(committed)
    monkeypatch.setattr(report, "measured", lambda device: other)
    assert report.main(["--device", "cpu", "--out", str(out)]) == 0
    assert json.loads(out.read_text()) == other and report.DATA.read_text(encoding="utf-8") == committed
    other["modes"][1]["layers"][0]["key_snr"]["mean"] += 9 * other["modes"][1]["layers"][0]["key_snr"]["error"]
    assert report.main(["--device", "cpu", "--out", str(out)]) == 1 and other["modes"][1]["mode"] in capsys.readouterr().out


def test_a_format_of_others_is_measured_and_one_that_is_not_installed_left_out(small_model: TinyModel) -> None:
    coarse = compare.Format("coarse rows", 2, lambda: compare.Through(compare.norm_int2))
    absent = compare.Format("absent", 1, lambda: import_module("no_such_package"))
    sizes = compare.Sizes(documents=3, length=80, chunk=30, batch=2)
    found, missing = compare.measure(small_model, DOCUMENTS, sizes, [coarse, absent])
    table = compare.table(json.loads(json.dumps(compare.content_of(found, missing, sizes))))
    assert table.endswith("Left out: absent: No module named 'no_such_package'\n") and f"{found[0][1].kl.mean:.5f}" in table


@pytest.mark.quick
def test_kivi_reads_its_window_exact_and_quantizes_keys_by_channel_and_values_by_token() -> None:
    """After 40, 50 and 10 tokens with a window of 32: 96 keys are packed, and the 68 values that are not among the newest 32."""
    whole, layer = torch.randn(2, 3, 100, 64, generator=torch.Generator().manual_seed(0)), peers.KIVILayer(2, 32)
    for new in whole.split((40, 50, 10), dim=2):
        assert all(torch.equal(held[..., -new.shape[2] :, :], new) for held in layer.update(new, new)), "new tokens are exact"
    assert torch.equal(layer.keys[..., 96:, :], whole[..., 96:, :]) and torch.equal(layer.values[..., 68:, :], whole[..., 68:, :])
    for held, group in ((layer.keys[1, 2, 32:64, 5], whole[1, 2, 32:64, 5]), (layer.values[1, 2, 40, 32:], whole[1, 2, 40, 32:])):
        zero, step = group.min().half().float(), ((group.max() - group.min()) / 3).half().float()
        torch.testing.assert_close(held, ((group - zero) / step).round().clamp(0, 3) * step + zero)


def test_caches_of_others_have_a_line_each(llama_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("kvq_transformers")
    (tmp_path / "text").write_text(CODE)
    given = ["--model", str(llama_folder), "--text", str(tmp_path / "text"), "--device", "cpu", "--out", str(tmp_path / "out")]
    given += ["--peer", "residual 32", "--peer", "TurboQuant", "--mode", "int2:residual_length=16"]
    peers.main([*given, "--length", "100", "--documents", "1", "--batch", "1", "--chunk", "32", "--copy", "1"])
    lines = {line["mode"]: line for line in map(json.loads, (tmp_path / "out" / "peers.jsonl").read_text().splitlines()[1:])}
    names = [f"{name} (re-implemented)" for name in ("KIVI-2", "KIVI-4", "TurboQuant 3 bits", "TurboQuant 4 bits")]
    kivi2, kivi4, turbo3, turbo4 = (next(line for mode, line in lines.items() if mode.startswith(name)) for name in names)
    assert lines["none"]["kl"]["mean"] == 0 < kivi4["kl"]["mean"] < kivi2["kl"]["mean"] and turbo4["kl"]["mean"] < turbo3["kl"]["mean"]
    assert turbo3["bits"] == 3.25 and kivi2["bits"] < kivi4["bits"] and all(line["copied"]["n"] > 30 for line in lines.values())
    table = (tmp_path / "out" / "peers.md").read_text().splitlines()
    shown = [float(line.split("|")[2]) for line in table[3:] if line.startswith("|")]
    assert shown == sorted(shown, reverse=True) and len(shown) == len(lines) - 1
