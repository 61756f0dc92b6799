"""The accuracy scripts, each once on a small random model: kvq's modes, formats and caches of others, and how two runs are judged."""

import copy
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import accuracy_agreement as agreement
import accuracy_compare as compare
import accuracy_report as report
import peer_caches as peers
from kvq_core import get_backend
from kvq_core.evaluation import Document, TinySubject, evaluate
from kvq_core.evaluation.tiny_model import TinyModel

TEXTS = [bytes(33 + (7 * i + i * i // (j + 3)) % 90 for i in range(300)) for j in range(4)]
DOCUMENTS = [Document(str(i), text) for i, text in enumerate(TEXTS)]
MODES = ["none", "int8", "fp8_per_tensor", "int2"]
SMALL = report.Sizes(documents=3, ends=(30, 90), smoothed=2, recorded=2, recorded_length=40, distances=(64, 120), chunk=50, batch=2)


def measured(model: TinyModel) -> agreement.Content:
    figures = report.measure(TinySubject(model), [get_backend(mode) for mode in MODES], DOCUMENTS, SMALL)
    back: agreement.Content = json.loads(json.dumps({"machine": {}, "sizes": asdict(SMALL), "modes": [asdict(x) for x in figures]}))
    return back


@pytest.fixture(scope="module")
def plain(small_model: TinyModel) -> agreement.Content:
    """A small report, in plain torch."""
    return measured(small_model)


def test_a_report_orders_modes_as_the_evaluation_does(plain: agreement.Content, small_model: TinyModel) -> None:
    found = {one["mode"]: one for one in plain["modes"]}
    none, fine, coarse = (found[mode] for mode in ("none", "int8_per_token_head", "int2_per_token_head"))
    assert none["layers"] == [] and none["whole"]["difference"] == {"mean": 0, "error": 0}
    for one, two in zip(fine["layers"], coarse["layers"], strict=True):
        assert one["key_snr"]["mean"] > two["key_snr"]["mean"] + 20 and one["output_error"]["mean"] < two["output_error"]["mean"] / 5
    assert len({one["whole"]["bits"]["mean"] for one in coarse["smoothed"]}) == 4, "of each kind of smoothing"
    subject = TinySubject(small_model)
    *scored, last = (subject.passages([document], 90)[0] for document in DOCUMENTS)
    backends = [get_backend(mode) for mode in ("none", "int2")]
    expected = evaluate(subject, backends, scored, calibration=last, chunk=50, batch=2).results[1]
    assert coarse["whole"]["bits"]["mean"] == pytest.approx(expected.bits_per_byte.mean, rel=1e-4)
    assert coarse["whole"]["difference"]["mean"] == pytest.approx(expected.difference.mean, rel=1e-3)


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
    assert all(mode.farthest.errors_apart == 0 for mode in found if mode is not found[2])
    with pytest.raises(ValueError, match=r"^sizes: "):
        agreement.agreements(plain, plain | {"sizes": asdict(report.Sizes())})


@pytest.mark.quick
def test_the_command_writes_a_file_and_judges_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Against the page's figures, which it leaves alone."""
    committed = report.DATA.read_text(encoding="utf-8")
    other, out = json.loads(committed), tmp_path / "results" / "gpu.json"
    monkeypatch.setattr(report, "measured", lambda device: other)
    assert report.main(["--device", "cpu", "--out", str(out)]) == 0
    assert json.loads(out.read_text(encoding="utf-8")) == other and report.DATA.read_text(encoding="utf-8") == committed
    other["modes"][1]["whole"]["difference"]["mean"] += 1
    assert report.main(["--device", "cpu", "--out", str(out)]) == 1 and "difference, all bytes" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.timeout(500)  # a whole report, where other processes have the cores
def test_a_gpu_agrees_with_plain_torch(plain: agreement.Content, small_model: TinyModel) -> None:
    """Of three documents standard errors say little. The kernels' share is held against what a mode loses, or int8 where it is ``none``."""
    kernels = measured(copy.deepcopy(small_model).cuda())
    assert kernels["modes"] != plain["modes"], "otherwise these are no kernels"
    losses = {mode["mode"]: abs(mode["layers"][0]["output_error"]["mean"]) if mode["layers"] else 0.0 for mode in plain["modes"]}
    for found in agreement.agreements(plain, kernels):
        assert abs(found.difference.mean) < 0.02 * max(losses[found.mode], losses["int8_per_token_head"]) * found.bits[0], found


def test_formats_of_others_lose_what_their_descriptions_say_and_are_measured_through_the_model(small_model: TinyModel) -> None:
    """On Gaussian rows, with heads of 64. A format that is not installed is left out."""
    rows = torch.randn(400, 2, 64, generator=torch.Generator().manual_seed(0))
    for keep, error in ((compare.min_max_int4, 0.0080), (compare.norm_int2, 0.1175), (compare.groups_of_32(4), 0.0079)):
        assert float((keep(rows) - rows).square().mean()) == pytest.approx(error, rel=0.06), keep

    def absent() -> object:
        raise ImportError("no such package")

    exact = compare.Format("exact rows", 32, lambda: compare.Through(lambda x: x))
    coarse = compare.Format("coarse rows", 2, lambda: compare.Through(compare.norm_int2))
    formats = [*compare.kvq(2, "mean"), exact, coarse, compare.Format("absent", 1, absent)]
    sizes = compare.Sizes(documents=3, length=80, chunk=30, batch=2)
    found, missing = compare.measure(small_model, DOCUMENTS, sizes, formats)
    kl = {line.name: result.kl.mean for line, result in found}
    assert kl["exact rows"] < 1e-3 * kl["coarse rows"] and kl["kvq int2"] != kl["kvq int2, mean"]
    table = compare.table(json.loads(json.dumps(compare.content_of(found, missing, sizes))))
    assert table.endswith("Left out: absent: no such package\n") and f"{kl['coarse rows']:.5f}" in table


@pytest.mark.quick
def test_kivi_reads_its_window_exact_and_quantizes_keys_by_channel_and_values_by_token() -> None:
    """After 40, 50 and 10 tokens with a window of 32: 96 keys are packed, and the 68 values that are not among the newest 32."""
    whole = torch.randn(2, 3, 100, 64, generator=torch.Generator().manual_seed(0))
    layer = peers.KIVILayer(2, 32)
    for new in whole.split((40, 50, 10), dim=2):
        keys, values = layer.update(new, -new)
        assert torch.equal(keys[..., -new.shape[2] :, :], new) and torch.equal(values[..., -new.shape[2] :, :], -new), (
            "new tokens are exact"
        )
    assert torch.equal(layer.keys[..., 96:, :], whole[..., 96:, :]) and torch.equal(layer.values[..., 68:, :], -whole[..., 68:, :])
    for held, group in ((layer.keys[1, 2, 32:64, 5], whole[1, 2, 32:64, 5]), (layer.values[1, 2, 40, 32:], -whole[1, 2, 40, 32:])):
        zero, step = group.min().half().float(), ((group.max() - group.min()) / 3).half().float()
        torch.testing.assert_close(held, ((group - zero) / step).round().clamp(0, 3) * step + zero)


def test_caches_of_others_have_a_line_each(llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kvq_transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "text").write_text("".join(f"def f{i}(x):\n    return x * {i}\n" for i in range(30)))
    given = ["--model", str(llama_folder), "--text", str(tmp_path / "text"), "--device", "cpu", "--out", str(tmp_path / "out")]
    given += ["--peer", "residual 32", "--peer", "TurboQuant", "--mode", "int2:residual_length=16"]
    peers.main([*given, "--length", "100", "--documents", "1", "--batch", "1", "--chunk", "32", "--copy", "1"])
    lines = [json.loads(line) for line in (tmp_path / "out" / "peers.jsonl").read_text().splitlines()[1:]]
    kl, bits = ({line["mode"]: line[what] for line in lines} for what in ("kl", "bits"))
    kivi2, kivi4, turbo3, turbo4 = (
        f"{name} (re-implemented){window}"
        for name, window in (("KIVI-2", ", residual 32"), ("KIVI-4", ", residual 32"), ("TurboQuant 3 bits", ""), ("TurboQuant 4 bits", ""))
    )
    assert kl["none"]["mean"] == 0 < kl[kivi4]["mean"] < kl[kivi2]["mean"] and kl[turbo4]["mean"] < kl[turbo3]["mean"]
    assert bits[turbo3] == 3.25 and bits[kivi2] < bits[kivi4] and all(line["copied"]["n"] > 30 for line in lines)
    table = (tmp_path / "out" / "peers.md").read_text().splitlines()
    shown = [float(line.split("|")[2]) for line in table[3:] if line.startswith("|")]
    assert shown == sorted(shown, reverse=True) and len(shown) == len(kl) - 1
