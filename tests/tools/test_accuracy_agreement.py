"""Two runs of the accuracy report beside each other: what is off is found, and kernels agree with plain torch."""

import copy
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

import accuracy_agreement as agreement
import accuracy_report as report
from kvq_core import get_backend
from kvq_core.evaluation import Document, Estimate, TinySubject
from kvq_core.evaluation.tiny_model import TinyModel
from kvq_core.testing import places

ROOT = Path(__file__).parents[2]

DOCUMENTS = [Document(str(j), bytes(33 + (7 * i + i * i // (j + 3)) % 90 for i in range(300))) for j in range(4)]
SMALL = report.Sizes(documents=3, ends=(20, 40), smoothed=2, recorded=2, recorded_length=30, distances=(64,), chunk=40, batch=3)


def run(model: TinyModel, modes: Sequence[str], device: str = "CPU") -> agreement.Content:
    """A small report, as it comes out of its file."""
    figures = report.measure(TinySubject(model), [get_backend(mode) for mode in modes], DOCUMENTS, SMALL)
    told = {"machine": {"device": device, "torch": "2", "commit": "abc"}, "sizes": asdict(SMALL), "modes": [asdict(x) for x in figures]}
    back: agreement.Content = json.loads(json.dumps(told))
    return back


@pytest.fixture(scope="module")
def plain(small_model: TinyModel) -> agreement.Content:
    """Of all modes, in plain torch."""
    with pytest.MonkeyPatch.context() as patch:
        places.enter("eager", patch)
        return run(small_model, ["none", "int8", "fp8", "fp8_per_tensor", "int4", "int2"])


def test_a_run_agrees_with_itself(plain: agreement.Content) -> None:
    found = agreement.agreements(plain, plain)
    assert agreement.agree(found) and [mode.mode for mode in found] == [mode["mode"] for mode in plain["modes"]]
    layers = [0, *[2] * 5]
    assert [mode.cells for mode in found] == [2 + 2 * 2 + 4 * 2 + 3 * count + 1 * 3 for count in layers]
    assert all(mode.farthest.errors_apart == 0 and mode.difference == Estimate(0, 0) for mode in found)


@pytest.mark.quick
@pytest.mark.parametrize(
    "place",
    [
        ("whole", "difference"),
        ("stretches", 1, "bits"),
        ("smoothed", 3, "whole", "difference"),
        ("layers", 1, "key_snr"),
        ("layers", 0, "value_snr"),
        ("layers", 0, "output_error"),
        ("recalls", 0, "difference"),
    ],
)
def test_a_figure_that_is_off_is_found(place: tuple[str | int, ...], plain: agreement.Content) -> None:
    for far in (False, True):
        other = copy.deepcopy(plain)
        cell = other["modes"][2]
        for step in place:
            cell = cell[step]
        rounding = math.hypot(cell["mean"], agreement.ROUNDING) - cell["mean"] if place[-1] == "output_error" else 0
        cell["mean"] += rounding + (1.01 if far else 0.99) * agreement.LIMIT * math.hypot(cell["error"], cell["error"])
        found = agreement.agreements(plain, other)
        assert agreement.agree(found) == (not far)
        assert found[2].farthest.errors_apart == pytest.approx((1.01 if far else 0.99) * agreement.LIMIT, rel=1e-3)
        assert all(mode.farthest.errors_apart == 0 for mode in found if mode is not found[2])


@pytest.mark.quick
def test_runs_of_different_things_are_not_compared(plain: agreement.Content) -> None:
    with pytest.raises(ValueError, match=r"^sizes: "):
        agreement.agreements(plain, plain | {"sizes": asdict(report.Sizes())})
    with pytest.raises(ValueError, match=r"^modes: "):
        agreement.agreements(plain, plain | {"modes": plain["modes"][:2]})


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
def test_a_gpu_agrees_with_plain_torch(plain: agreement.Content, small_model: TinyModel) -> None:
    """Of three documents standard errors say little. The kernels' share is held against what a mode loses, or int8 where it is ``none``."""
    kernels = run(copy.deepcopy(small_model).cuda(), [mode["mode"] for mode in plain["modes"]], "GPU")
    assert kernels["modes"] != plain["modes"], "otherwise these are no kernels"
    losses = {mode["mode"]: abs(mode["layers"][0]["output_error"]["mean"]) if mode["layers"] else 0.0 for mode in plain["modes"]}
    for found in agreement.agreements(plain, kernels):
        assert abs(found.difference.mean) < 0.02 * max(losses[found.mode], losses["int8_per_token_head"]) * found.bits[0], found
