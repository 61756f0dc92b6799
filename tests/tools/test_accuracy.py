"""The accuracy scripts: figures of a small random model against sums done otherwise, formats against their definitions, runs against each
other, and the page against the committed figures."""

import copy
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import accuracy_agreement as agreement
import accuracy_compare as compare
import accuracy_measure as measure
import accuracy_page as page
import accuracy_report as report
import generated
import plots
from kvq_core import get_backend
from kvq_core.evaluation import Document, Estimate, Passage, TinySubject, evaluate
from kvq_core.evaluation.tiny_model import TinyModel, dense_attention

TEXTS = [bytes(33 + (7 * i + i * i // (j + 3)) % 90 for i in range(300)) for j in range(4)]
DOCUMENTS = [Document(str(i), text) for i, text in enumerate(TEXTS)]
MODES = ["none", "int8", "fp8_per_tensor", "int2"]
SMALL = report.Sizes(documents=3, ends=(30, 90), smoothed=2, recorded=2, recorded_length=40, distances=(64, 120), chunk=50, batch=2)


@pytest.fixture(scope="module")
def subject(small_model: TinyModel) -> TinySubject:
    return TinySubject(small_model)


@pytest.fixture(scope="module")
def passages(subject: TinySubject) -> list[Passage]:
    return [subject.passages([document], 90)[0] for document in DOCUMENTS]


def as_file(figures: Sequence[report.ModeFigures], device: str = "CPU") -> agreement.Content:
    told = {"machine": {"device": device, "torch": "2", "commit": "abc"}, "sizes": asdict(SMALL), "modes": [asdict(x) for x in figures]}
    back: agreement.Content = json.loads(json.dumps(told))
    return back


@pytest.fixture(scope="module")
def figures(subject: TinySubject) -> list[report.ModeFigures]:
    """A small report of all modes, in plain torch."""
    return report.measure(subject, [get_backend(mode) for mode in MODES], DOCUMENTS, SMALL)


@pytest.fixture(scope="module")
def plain(figures: list[report.ModeFigures]) -> agreement.Content:
    return as_file(figures)


def test_positions_add_up_to_the_evaluation(subject: TinySubject, passages: list[Passage]) -> None:
    """Which is held against the dense model by tests of its own."""
    backends = [get_backend("none"), get_backend("fp8_per_tensor")]
    exact, found = (measure.bits(subject, backend, passages[:3], passages[-1], 32) for backend in backends)
    (whole,) = measure.by_position(found, exact, [90])
    expected = evaluate(subject, backends, passages[:3], calibration=passages[-1], chunk=32).results[1]
    for one, two in ((whole.bits, expected.bits_per_byte), (whole.difference, expected.difference)):
        assert (one.mean, one.error) == (pytest.approx(two.mean, rel=1e-4, abs=1e-5), pytest.approx(two.error, rel=1e-3, abs=1e-5))


@pytest.mark.quick
def test_errors_are_paired_and_carried_to_decibels_and_roots() -> None:
    exact, found = torch.tensor([[2.0], [6.0]]).double(), torch.tensor([[3.0], [7.0]]).double()
    (recall,) = measure.by_distance((found, torch.tensor([[0.25], [0.75]])), (exact, exact), [64])
    assert recall == measure.Recall(64, Estimate(5.0, 2.0), Estimate(1.0, 0.0), Estimate(0.5, 0.25))
    ratio, shifted = Estimate(0.01, 0.0005), Estimate(0.0105, 0.0)
    assert (measure.decibels(ratio).mean, measure.root(ratio).mean) == (pytest.approx(20), pytest.approx(0.1))
    assert measure.decibels(ratio).error == pytest.approx(20 - measure.decibels(shifted).mean, rel=0.05)
    assert measure.root(ratio).error == pytest.approx(measure.root(shifted).mean - 0.1, rel=0.05)
    assert measure.decibels(Estimate(0.0, 0.0)).mean == math.inf and measure.root(Estimate(0.0, 0.0)).mean == 0


def test_layers_against_encode_decode_and_dense_attention(subject: TinySubject, passages: list[Passage]) -> None:
    backend, documents = get_backend("int2"), passages[:3]
    layers = measure.by_layer(subject, backend, get_backend("none"), documents, passages[-1], lambda: None)
    assert len(layers) == subject.model.config.num_layers
    rows = [measure.rows_of(subject, passage) for passage in documents]
    for index, layer in enumerate(layers):
        noise, signal = torch.zeros(2, 3, dtype=torch.float64)
        for q, k, v in (document[index] for document in rows):
            lossy = [backend.decode(*encode(x)) for encode, x in ((backend.encode, k), (backend.encode_value, v))]
            outputs = [dense_attention(index, q.float()[None], *(x.float()[None] for x in pair)) for pair in ((k, v), lossy)]
            for i, (x, y) in enumerate(((k, lossy[0]), (v, lossy[1]), outputs)):
                noise[i] += (x.double() - y.double()).square().sum()
                signal[i] += x.double().square().sum()
        decibels = 10 * torch.log10(signal / noise)
        assert [layer.key_snr.mean, layer.value_snr.mean] == pytest.approx(decibels[:2].tolist(), abs=0.01)
        # The doors' outputs are bf16, these are not: 2^-9 of relative rounding on either side.
        assert layer.output_error.mean == pytest.approx(float((noise[2] / signal[2]).sqrt()), rel=0.03, abs=2**-8)


def test_questions_taken_back_leave_no_trace(subject: TinySubject, passages: list[Passage]) -> None:
    """Every answer is that of a text that held this one question, read in one piece."""
    backend, distances, scored = get_backend("int4"), [64, 150], measure.LETTERS - measure.HINT
    asked = measure.needles(TEXTS[:2])
    assert asked == measure.needles(TEXTS[:2]) and asked[0].question != asked[1].question
    scores, likeliest = measure.ask(subject, backend, asked, distances, passages[-1], 40)
    for needle, *found in zip(asked, scores.tolist(), likeliest.tolist(), strict=True):
        name = needle.question[-measure.LETTERS :]
        assert needle.text[needle.defined :][: measure.LETTERS] == name
        for distance, end, score, hits in zip(distances, needle.ends(distances), *found, strict=True):
            tokens = needle.text[:end] + needle.question
            assert tokens[needle.defined + distance :] == name
            passage = Passage(tokens, len(tokens) - 1)
            expected = measure.bits(subject, backend, [passage], passages[-1], len(tokens))[0]
            assert score == pytest.approx(float(expected[-scored:].mean()), rel=0.02)
            with torch.inference_mode():
                logits = subject.open(backend, [passage], passages[-1]).feed([tokens[:-1]])[0][-scored:]
            hit = float((logits.argmax(-1) == torch.tensor(needle.question[-scored:])).double().mean())
            assert hits == pytest.approx(hit, abs=1 / scored + 1e-9), "a tie may fall either way"


def test_all_figures_of_all_modes(figures: list[report.ModeFigures], subject: TinySubject) -> None:
    found = {one.mode: one for one in figures}
    sizes = [one.bytes_per_token for one in figures]
    assert figures[0].mode == "none" and len(found) == len(MODES) and sizes == sorted(sizes, reverse=True), "the largest comes first"
    none, fine, coarse = (found[mode] for mode in ("none", "int8_per_token_head", "int2_per_token_head"))
    assert none.layers == () and none.whole.difference == Estimate(0, 0)
    assert len(fine.layers) == subject.model.config.num_layers and len(fine.stretches) == len(fine.recalls) == 2
    for one, two in zip(fine.layers, coarse.layers, strict=True):
        assert one.key_snr.mean > two.key_snr.mean + 20 and one.output_error.mean < two.output_error.mean / 5
    for one in figures:
        assert len(one.documents) == 3 and sum(one.documents) / 3 == pytest.approx(one.whole.bits.mean)
        assert [s.kind for s in one.smoothed] == ["", "first_prefill", "mean", "balanced"]
    for exact in none.smoothed:
        assert exact.whole.bits.mean == pytest.approx(none.smoothed[0].whole.bits.mean, rel=3e-3), "smoothing changes nothing by itself"
    assert len({s.whole.bits.mean for s in coarse.smoothed}) == 4 and subject.smoothing is None, "as it was"
    with pytest.raises(ValueError, match=r"documents: got 3, need 3 and one that calibrates"):
        report.measure(subject, [get_backend("none")], DOCUMENTS[:3], SMALL)


def test_a_run_agrees_with_no_other_kind(plain: agreement.Content) -> None:
    # Whole, stretches, smoothed keys, layers, needles.
    found = agreement.agreements(plain, plain)
    assert [mode.cells for mode in found] == [2 + 2 * 2 + 4 * 2 + 3 * layers + 2 * 3 for layers in (0, 2, 2, 2)]
    for other, said in (({"sizes": asdict(report.Sizes())}, "sizes"), ({"modes": plain["modes"][:2]}, "modes")):
        with pytest.raises(ValueError, match=f"^{said}: "):
            agreement.agreements(plain, plain | other)


@pytest.mark.parametrize("share", [0.99, 1.01])
@pytest.mark.parametrize("place", ["stretches 1 bits", "layers 0 output_error", "recalls 0 difference"])
def test_a_figure_that_is_off_is_found(place: str, share: float, plain: agreement.Content) -> None:
    other = copy.deepcopy(plain)
    cell = other["modes"][2]
    for step in place.split():
        cell = cell[int(step) if step.isdigit() else step]
    rounding = math.hypot(cell["mean"], agreement.ROUNDING) - cell["mean"] if "output_error" in place else 0
    cell["mean"] += rounding + share * agreement.LIMIT * math.hypot(cell["error"], cell["error"])
    found = agreement.agreements(plain, other)
    assert agreement.agree(found) == (share < 1)
    assert found[2].farthest.errors_apart == pytest.approx(share * agreement.LIMIT, rel=1e-3)
    assert all(mode.farthest.errors_apart == 0 for mode in found if mode is not found[2])


@pytest.mark.quick
def test_the_command_writes_a_file_and_judges_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against the page's figures, which it leaves alone."""
    committed = report.DATA.read_text(encoding="utf-8")
    other = json.loads(committed)
    monkeypatch.setattr(report, "measured", lambda device: other)
    out = tmp_path / "results" / "gpu.json"
    assert report.main(["--device", "cpu", "--out", str(out)]) == 0
    assert json.loads(out.read_text(encoding="utf-8")) == other and report.DATA.read_text(encoding="utf-8") == committed
    other["modes"][1]["whole"]["difference"]["mean"] += 1
    assert report.main(["--device", "cpu", "--out", str(out)]) == 1
    same, off = (part.splitlines()[5] for part in capsys.readouterr().out.split("*CPU*")[1:])
    assert "0.0 standard errors" in same and "difference, all bytes" in off


@pytest.mark.gpu
@pytest.mark.timeout(500)  # a whole report, where other processes have the cores
def test_a_gpu_agrees_with_plain_torch(plain: agreement.Content, small_model: TinyModel) -> None:
    """Of three documents standard errors say little. The kernels' share is held against what a mode loses, or int8 where it is ``none``."""
    on_gpu = TinySubject(copy.deepcopy(small_model).cuda())
    kernels = as_file(report.measure(on_gpu, [get_backend(mode) for mode in MODES], DOCUMENTS, SMALL), "GPU")
    assert kernels["modes"] != plain["modes"], "otherwise these are no kernels"
    losses = {mode["mode"]: abs(mode["layers"][0]["output_error"]["mean"]) if mode["layers"] else 0.0 for mode in plain["modes"]}
    for found in agreement.agreements(plain, kernels):
        assert abs(found.difference.mean) < 0.02 * max(losses[found.mode], losses["int8_per_token_head"]) * found.bits[0], found


FEW = compare.Sizes(documents=3, length=80, chunk=30, batch=2)
ROWS = torch.randn(400, 2, 64, generator=torch.Generator().manual_seed(0))


def test_other_formats_lose_what_they_are_known_to() -> None:
    """On Gaussian rows, with heads of 64: the figures of the formats' own descriptions, and what their levels lose at the least."""

    def mse(keep: compare.Rows) -> float:
        return float((keep(ROWS) - ROWS).square().mean() / ROWS.square().mean())

    for keep, error in ((compare.min_max_int4, 0.0080), (compare.norm_int2, 0.1175), (compare.groups_of_32(4), 0.0079)):
        assert mse(keep) == pytest.approx(error, rel=0.06), keep
    assert mse(compare.groups_of_32(2)) > mse(compare.norm_int2), "uniform levels up to the largest value"
    int4 = get_backend("int4")  # clips the range by 5 %
    assert 0.5 < mse(lambda rows: int4.decode(*int4.encode(rows))) / mse(compare.min_max_int4) < 1


def test_formats_are_measured_through_the_model(small_model: TinyModel) -> None:
    from transformers.cache_utils import DynamicLayer

    def absent() -> object:
        raise ImportError("no such package")

    exact = compare.Format("exact rows", 32, lambda: compare.Through(lambda x: x))
    layers = compare.Format("Hugging Face's own layers", 16, lambda: compare.HuggingFace(DynamicLayer))
    coarse = compare.Format("coarse rows", 2, lambda: compare.Through(compare.norm_int2))
    formats = [*compare.kvq(2, "mean"), exact, coarse, layers, compare.Format("absent", 1, absent)]
    found, missing = compare.measure(small_model, DOCUMENTS, FEW, formats)
    kl = {line.name: result.kl.mean for line, result in found}
    assert missing == {"absent": "no such package"} and list(kl) == [line.name for line in formats[:-1]]
    # none keeps bfloat16 rows, as the layers are given; exact rows are those rows.
    assert max(kl["exact rows"], kl["Hugging Face's own layers"]) < 1e-3 * kl["coarse rows"]
    assert kl["kvq int2"] != kl["kvq int2, mean"]
    table = compare.table(json.loads(json.dumps(compare.content_of(found, missing, FEW))))
    assert len(table.splitlines()) == 2 + 5 + 2 and table.endswith("Left out: absent: no such package\n")
    assert f"{kl['coarse rows']:.5f}" in table


@pytest.mark.quick
def test_the_page_shows_the_committed_figures() -> None:
    """Otherwise: ``hatch run accuracy --from-data``, ``hatch run compare --from-data``."""
    text, content, others = page.PAGE.read_text(encoding="utf-8"), *(json.loads(f.read_text("utf-8")) for f in (report.DATA, compare.DATA))
    assert content["sizes"] == json.loads(json.dumps(asdict(report.Sizes()))), "measured with the sizes that the script has now"
    gpu = json.loads(report.GPU_DATA.read_text(encoding="utf-8")) if report.GPU_DATA.exists() else None
    assert gpu is None or agreement.agree(agreement.agreements(content, gpu))
    for marks, expected in (page.parts(content, gpu) | {compare.MARKS: compare.table(others)}).items():
        assert generated.part(text, marks) == expected
    for name in ("position", "layers", "needles"):
        for theme in plots.THEMES:
            assert plots.kept_in(f"accuracy-{name}", theme) == (page.SCRIPT, page.figure_key(content)), f"{name}, {theme}"
    assert [line["name"] for line in others["formats"]] == [line.name for line in compare.FORMATS]
    assert all(line[what]["error"] > 0 for line in others["formats"] for what in ("difference", "kl"))
