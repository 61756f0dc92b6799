"""The accuracy scripts, each once on a small random model: kvq's modes, formats and caches of others, and how two runs are judged."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import accuracy_compare as compare
import accuracy_report as report
import peer_caches as peers
from kvq_core import get_backend
from kvq_core.evaluation import Document, TinySubject, evaluate
from kvq_core.evaluation.tiny_model import TinyModel

DOCUMENTS = [Document(str(j), bytes(33 + (7 * i + i * i // (j + 3)) % 90 for i in range(300))) for j in range(4)]
SMALL = report.Sizes(documents=3, ends=(30, 90), smoothed=2, recorded=2, recorded_length=40, distances=(64, 120), chunk=50, batch=2)


def test_a_report_orders_modes_as_the_evaluation_does(small_model: TinyModel) -> None:
    subject, backends = TinySubject(small_model), [get_backend(mode) for mode in ("none", "int8", "int2")]
    none, fine, coarse = report.measure(subject, backends, DOCUMENTS, SMALL)
    assert none.layers == () and none.whole.difference.mean == none.whole.difference.error == 0
    for one, two in zip(fine.layers, coarse.layers, strict=True):
        assert one.key_snr.mean > two.key_snr.mean + 20 and one.output_error.mean < two.output_error.mean / 5
    assert len({one.whole.bits.mean for one in coarse.smoothed}) == 4, "of each kind of smoothing"
    *scored, last = (subject.passages([document], 90)[0] for document in DOCUMENTS)
    expected = evaluate(subject, backends, scored, calibration=last, chunk=50, batch=2).results[2]
    assert coarse.whole.bits.mean == pytest.approx(expected.bits_per_byte.mean, rel=1e-4)
    assert coarse.whole.difference.mean == pytest.approx(expected.difference.mean, rel=1e-3)


@pytest.mark.quick
def test_a_run_is_judged_against_the_page_which_it_leaves_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    committed = report.DATA.read_text(encoding="utf-8")
    other, out = json.loads(committed), tmp_path / "results" / "gpu.json"
    monkeypatch.setattr(report, "measured", lambda device: other)
    assert report.main(["--device", "cpu", "--out", str(out)]) == 0
    assert json.loads(out.read_text(encoding="utf-8")) == other and report.DATA.read_text(encoding="utf-8") == committed
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


def test_caches_of_others_have_a_line_each(llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kvq_transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "text").write_text("".join(f"def f{i}(x):\n    return x * {i}\n" for i in range(30)))
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
