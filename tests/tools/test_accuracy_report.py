"""The accuracy report: its figures on a small random model against sums done otherwise, and its page against the committed figures."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import accuracy_agreement as agreement
import accuracy_measure as measure
import accuracy_page as page
import accuracy_report as report
import generated
import plots
from kvq_core import get_backend, list_backends
from kvq_core.evaluation import Document, Estimate, Passage, TinySubject, evaluate
from kvq_core.evaluation.tiny_model import TinyModel, dense_attention

ROOT = Path(__file__).parents[2]

TEXTS = [bytes(33 + (7 * i + i * i // (j + 3)) % 90 for i in range(300)) for j in range(4)]
MODES = ["int8", "fp8_per_tensor", "int4", "int2"]


@pytest.fixture(autouse=True)
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture(scope="module")
def subject(small_model: TinyModel) -> TinySubject:
    return TinySubject(small_model)


@pytest.fixture(scope="module")
def passages(subject: TinySubject) -> list[Passage]:
    return [subject.passages([Document("", text)], 90)[0] for text in TEXTS]


def dense_bits(model: TinyModel, tokens: tuple[int, ...]) -> torch.Tensor:
    """Bits of every byte but the first, in one pass without a cache."""
    ids = torch.tensor(tokens)
    logits = model(ids[:-1], torch.arange(len(ids) - 1), dense_attention)
    return F.cross_entropy(logits, ids[1:], reduction="none").double() / math.log(2)


# -- bits by position ---------------------------------------------------------------------------------------------------------


def test_bits_of_none_are_those_of_the_dense_model(subject: TinySubject, passages: list[Passage]) -> None:
    found = measure.bits(subject, get_backend("none"), passages[:2], passages[-1], 32)
    expected = torch.stack([dense_bits(subject.model, p.tokens) for p in passages[:2]])
    assert found.shape == (2, 90)
    # Pages and queries are bf16: that is all the difference, at no position more than at others.
    assert float((found - expected).square().mean().sqrt()) < 0.03 * float(expected.std())


@pytest.mark.parametrize("mode", MODES)
def test_positions_add_up_to_the_evaluation(mode: str, subject: TinySubject, passages: list[Passage]) -> None:
    backends = [get_backend("none"), get_backend(mode)]
    exact, found = (measure.bits(subject, backend, passages[:3], passages[-1], 32) for backend in backends)
    (whole,) = measure.by_position(found, exact, [90])
    expected = evaluate(subject, backends, passages[:3], calibration=passages[-1], chunk=32).results[1]
    for one, two in ((whole.bits, expected.bits_per_byte), (whole.difference, expected.difference)):
        assert (one.mean, one.error) == (pytest.approx(two.mean, rel=1e-4, abs=1e-5), pytest.approx(two.error, rel=1e-3, abs=1e-5))


@pytest.mark.quick
def test_stretches_and_their_paired_errors() -> None:
    exact = torch.tensor([[1.0, 1, 4, 4], [3, 3, 8, 8]], dtype=torch.float64)
    found = exact + torch.tensor([[0.5, 0.5, 0, 0.2], [0.5, 0.5, 0.4, 0.2]])
    first, second = measure.by_position(found, exact, [2, 4])
    assert (first.first, first.last, second.first, second.last) == (1, 2, 3, 4)
    assert (first.bits.mean, first.bits.error) == (2.5, 1.0)
    # Documents differ by 2 bits and the mode by none: pairing takes them out.
    assert (first.difference.mean, first.difference.error) == (pytest.approx(0.5), pytest.approx(0, abs=1e-7))
    assert (second.difference.mean, second.difference.error) == (pytest.approx(0.2), pytest.approx(0.1))


# -- layers -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["int8", "int4", "int2"])
def test_layers_against_encode_decode_and_dense_attention(mode: str, subject: TinySubject, passages: list[Passage]) -> None:
    backend = get_backend(mode)
    layers = measure.by_layer(subject, backend, get_backend("none"), passages[:3], passages[-1], lambda: None)
    assert len(layers) == subject.model.config.num_layers
    rows = [measure.rows_of(subject, p) for p in passages[:3]]
    for index, layer in enumerate(layers):
        noise, signal = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
        for q, k, v in (document[index] for document in rows):
            lossy = [backend.decode(*encode(x)) for encode, x in ((backend.encode, k), (backend.encode_value, v))]
            outputs = [dense_attention(index, q.float()[None], *(x.float()[None] for x in pair)) for pair in ((k, v), lossy)]
            for i, (x, y) in enumerate(((k, lossy[0]), (v, lossy[1]), outputs)):
                noise[i] += (x.double() - y.double()).square().sum()
                signal[i] += x.double().square().sum()
        decibels = 10 * torch.log10(signal / noise)
        assert layer.key_snr.mean == pytest.approx(float(decibels[0]), abs=0.01)
        assert layer.value_snr.mean == pytest.approx(float(decibels[1]), abs=0.01)
        # The doors' outputs are bf16, these are not: 2^-9 of relative rounding on either side.
        assert layer.output_error.mean == pytest.approx(float((noise[2] / signal[2]).sqrt()), rel=0.03, abs=2**-8)


@pytest.mark.quick
def test_errors_of_ratios_are_carried_to_decibels_and_roots() -> None:
    ratio = Estimate(0.01, 0.0005)
    shifted = Estimate(0.0105, 0.0)
    assert measure.decibels(ratio).mean == pytest.approx(20)
    assert measure.decibels(ratio).error == pytest.approx(20 - measure.decibels(shifted).mean, rel=0.05)
    assert measure.root(ratio).mean == pytest.approx(0.1)
    assert measure.root(ratio).error == pytest.approx(measure.root(shifted).mean - 0.1, rel=0.05)
    assert measure.decibels(Estimate(0.0, 0.0)).mean == math.inf and measure.root(Estimate(0.0, 0.0)).mean == 0


# -- needles ------------------------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_needles_stand_where_they_say() -> None:
    distances = [64, 100, 150]
    for needle, text in zip(measure.needles(TEXTS), TEXTS, strict=True):
        name = needle.question[-measure.LETTERS :]
        assert needle.text[needle.defined :][: measure.LETTERS] == name
        kept = bytes(needle.text)
        assert kept[1 : kept.index(b"\ndef ")] + kept[kept.index(b"return 1\n") + 9 :] == text
        for distance, end in zip(distances, needle.ends(distances), strict=True):
            whole = needle.text[:end] + needle.question
            assert whole[needle.defined + distance :] == name
    assert len({needle.question for needle in measure.needles(TEXTS)}) == len(TEXTS)
    assert measure.needles(TEXTS) == measure.needles(TEXTS), "the same needles every time"


@pytest.mark.parametrize("mode", ["none", "int4"])
def test_questions_taken_back_leave_no_trace(mode: str, subject: TinySubject, passages: list[Passage]) -> None:
    """Every answer is that of a text that held this one question, read in one piece."""
    backend, distances, scored = get_backend(mode), [64, 110, 150], measure.LETTERS - measure.HINT
    asked = measure.needles(TEXTS[:3])
    scores, likeliest = measure.ask(subject, backend, asked, distances, passages[-1], 40)
    assert scores.shape == likeliest.shape == (3, 3)
    for i, needle in enumerate(asked):
        for j, end in enumerate(needle.ends(distances)):
            tokens = needle.text[:end] + needle.question
            passage = Passage(tokens, len(tokens) - 1)
            expected = measure.bits(subject, backend, [passage], passages[-1], len(tokens))[0]
            assert float(scores[i, j]) == pytest.approx(float(expected[-scored:].mean()), rel=0.02)
            with torch.inference_mode():
                logits = subject.open(backend, [passage], passages[-1]).feed([tokens[:-1]])[0][-scored:]
            hit = float((logits.argmax(-1) == torch.tensor(needle.question[-scored:])).double().mean())
            assert float(likeliest[i, j]) == pytest.approx(hit, abs=1 / scored + 1e-9), "a tie may fall either way"


@pytest.mark.quick
def test_recall_is_compared_with_none_by_document() -> None:
    exact, found = torch.tensor([[2.0], [6.0]]).double(), torch.tensor([[3.0], [7.0]]).double()
    (recall,) = measure.by_distance((found, torch.tensor([[0.25], [0.75]])), (exact, exact), [64])
    assert recall == measure.Recall(64, Estimate(5.0, 2.0), Estimate(1.0, 0.0), Estimate(0.5, 0.25))


# -- the report ---------------------------------------------------------------------------------------------------------------


SMALL = report.Sizes(documents=3, ends=(30, 90), smoothed=2, recorded=2, recorded_length=40, distances=(64, 120), chunk=50, batch=2)


@pytest.fixture(scope="module")
def small_report(subject: TinySubject) -> list[report.ModeFigures]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        documents = [Document(str(i), text) for i, text in enumerate(TEXTS)]
        return report.measure(subject, [get_backend(mode) for mode in ("none", "int2", "int8")], documents, SMALL)


def test_all_figures_of_all_modes(small_report: list[report.ModeFigures], subject: TinySubject) -> None:
    assert [figures.mode for figures in small_report] == ["none", "int8_per_token_head", "int2_per_token_head"]
    none, fine, coarse = small_report
    assert none.layers == () and none.whole.difference == Estimate(0, 0)
    assert len(fine.layers) == subject.model.config.num_layers and len(fine.stretches) == len(fine.recalls) == 2
    for one, two in zip(fine.layers, coarse.layers, strict=True):
        assert one.key_snr.mean > two.key_snr.mean + 20 and one.output_error.mean < two.output_error.mean / 5
    for figures in small_report:
        assert len(figures.documents) == 3 and sum(figures.documents) / 3 == pytest.approx(figures.whole.bits.mean)
    with pytest.raises(ValueError, match=r"documents: got 3, need 3 and one that calibrates"):
        report.measure(subject, [get_backend("none")], [Document("", text) for text in TEXTS[:3]], SMALL)


def test_smoothed_figures_are_those_of_the_evaluation(small_report: list[report.ModeFigures], subject: TinySubject) -> None:
    documents = [Document(str(i), text) for i, text in enumerate(TEXTS)]
    *passages, calibration = (subject.passages([document], 90)[0] for document in (*documents[:2], documents[-1]))
    none, _, coarse = small_report
    assert [s.kind for s in none.smoothed] == ["", "first_prefill", "mean", "balanced"]
    for exact in none.smoothed:
        assert exact.whole.bits.mean == pytest.approx(none.smoothed[0].whole.bits.mean, rel=3e-3), "smoothing changes nothing by itself"
    smoothings = ("", None), ("first_prefill", "first_prefill"), ("mean", subject.calibrate(calibration))
    for found, (kind, smoothing) in zip(coarse.smoothed, smoothings, strict=False):
        one = TinySubject(subject.model, smoothing=smoothing)
        expected = evaluate(one, [get_backend("none"), get_backend("int2")], passages, calibration=calibration, chunk=SMALL.chunk)
        assert found.kind == kind
        assert found.whole.bits.mean == pytest.approx(expected.results[1].bits_per_byte.mean, rel=1e-4)
    assert len({s.whole.bits.mean for s in coarse.smoothed}) == 4
    assert subject.smoothing is None, "as it was"


# -- the page -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def content() -> page.Content:
    committed: page.Content = json.loads(report.DATA.read_text(encoding="utf-8"))
    return committed


@pytest.mark.quick
def test_the_page_shows_the_committed_figures(content: page.Content) -> None:
    """Otherwise: ``hatch run accuracy --from-data``."""
    text = page.PAGE.read_text(encoding="utf-8")
    gpu = json.loads(report.GPU_DATA.read_text(encoding="utf-8")) if report.GPU_DATA.exists() else None
    for marks, expected in page.parts(content, gpu).items():
        assert generated.part(text, marks) == expected
    assert gpu is None or agreement.agree(agreement.agreements(content, gpu))
    for name in ("position", "layers", "needles"):
        for theme in plots.THEMES:
            assert plots.kept_in(f"accuracy-{name}", theme) == page.figure_key(content), f"{name}, {theme}"


@pytest.mark.quick
def test_the_committed_figures_are_of_known_modes_and_in_proportion(content: page.Content) -> None:
    modes = {mode["mode"]: mode for mode in content["modes"]}
    assert next(iter(modes)) == "none" and set(modes) <= {entry.mode for entry in list_backends()}
    assert content["sizes"] == json.loads(json.dumps(asdict(report.Sizes()))), "measured with the sizes that the script has now"
    for mode in list(modes.values())[1:]:
        weights = [s["last"] - s["first"] + 1 for s in mode["stretches"]]
        for what in ("bits", "difference"):
            parts = sum(w * s[what]["mean"] for w, s in zip(weights, mode["stretches"], strict=True)) / sum(weights)
            assert parts == pytest.approx(mode["whole"][what]["mean"], rel=1e-6, abs=1e-9)
        assert mode["whole"]["bits"]["mean"] - mode["whole"]["difference"]["mean"] == pytest.approx(modes["none"]["whole"]["bits"]["mean"])
    assert modes["int2_per_token_head"]["whole"]["difference"]["mean"] > 5 * modes["int4_per_token_head"]["whole"]["difference"]["mean"]
