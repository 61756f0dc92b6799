"""The comparison with other formats: its formats against their definitions, its sessions against the dense model, its table in the page."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers.cache_utils import DynamicLayer

import accuracy_compare as compare
import generated
from kvq_core import get_backend
from kvq_core.evaluation import Document
from kvq_core.evaluation.tiny_model import TinyModel

ROOT = Path(__file__).parents[2]

TEXTS = [Document(str(j), bytes(33 + (7 * i + i * i // (j + 3)) % 90 for i in range(120))) for j in range(4)]
SMALL = compare.Sizes(documents=3, length=80, chunk=30, batch=2)
ROWS = torch.randn(400, 2, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def relative_mse(keep: compare.Rows) -> float:
    return float((keep(ROWS) - ROWS).square().mean() / ROWS.square().mean())


def test_the_table_has_every_format_in_both_sizes() -> None:
    names = [line.name for line in compare.FORMATS]
    assert len(set(names)) == len(names) == 2 + 2 * 10
    for bits, mode in ((4, "int4"), (2, "int2")):
        lines = {line.name: line for line in compare.FORMATS if f"{bits} bits" in line.name or mode in line.name}
        assert len(lines) == 10
        kvq = [line for name, line in lines.items() if name.startswith("kvq")]
        assert [line.smoothing for line in kvq] == ["", "first_prefill", "mean", "balanced"]
        assert {line.make() for line in kvq} == {get_backend(mode)}
        assert {line.bits for line in kvq} == {bits + 0.5}, "of heads of 64"


def test_other_formats_lose_what_they_are_known_to() -> None:
    """On Gaussian rows, with heads of 64: the figures of the formats' own descriptions, and what their levels lose at the least."""
    known = {compare.min_max_int4: 0.0080, compare.norm_int2: 0.1175, compare.groups_of_32(4): 0.0079}
    for keep, error in known.items():
        assert relative_mse(keep) == pytest.approx(error, rel=0.06), keep
    assert relative_mse(compare.groups_of_32(2)) > relative_mse(compare.norm_int2), "uniform levels up to the largest value"


def test_the_same_bytes_with_the_usual_scales_are_kvqs_format() -> None:
    """Codes of both stay within a step: kvq's int4 clips the range by 5 %."""
    backend = get_backend("int4")
    kvq = backend.decode(*backend.encode(ROWS))
    usual = compare.min_max_int4(ROWS)
    assert 0.5 < float((kvq - ROWS).square().mean() / (usual - ROWS).square().mean()) < 1


def test_formats_are_measured_through_the_model(small_model: TinyModel) -> None:
    exact = compare.Format("exact rows", 32, lambda: compare.Through(lambda x: x))
    layers = compare.Format("Hugging Face's own layers", 16, lambda: compare.HuggingFace(DynamicLayer))
    coarse = compare.Format("coarse rows", 2, lambda: compare.Through(compare.norm_int2))

    def absent() -> object:
        raise ImportError("no such package")

    formats = [*compare.kvq(2, "mean"), exact, coarse, layers, compare.Format("absent", 1, absent)]
    found, missing = compare.measure(small_model, TEXTS, SMALL, formats)
    results = {line.name: result for line, result in found}
    assert missing == {"absent": "no such package"}
    assert list(results) == [line.name for line in formats[:-1]]
    # none keeps bfloat16 rows, as the layers are given; exact rows are those rows.
    for name in ("exact rows", "Hugging Face's own layers"):
        assert results[name].kl.mean < 1e-3 * results["coarse rows"].kl.mean
    assert results["kvq int2"].kl.mean != results["kvq int2, mean"].kl.mean
    table = compare.table(json.loads(json.dumps(compare.content_of(found, missing, SMALL))))
    assert len(table.splitlines()) == 2 + 5 + 2 and table.endswith("Left out: absent: no such package\n")
    assert f"{results['coarse rows'].kl.mean:.5f}" in table


@pytest.mark.parametrize("kind", ["quanto", "hqq"])
@pytest.mark.parametrize("every_token", [False, True])
def test_hugging_faces_caches_quantize(kind: str, every_token: bool, small_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec({"quanto": "optimum", "hqq": "hqq"}[kind]) is None:
        formats = [line for line in compare.FORMATS if f"Hugging Face {kind}" in line.name]
        found, missing = compare.measure(small_model, TEXTS, SMALL, formats)
        assert not found and set(missing) == {line.name for line in formats}
        return
    monkeypatch.setattr(compare, "RESIDUAL", 16)
    make = compare.hugging_face(kind, 4, every_token)
    ((_, result),), missing = compare.measure(small_model, TEXTS, SMALL, [compare.Format("", 5, make)])
    assert not missing and result.kl.mean > 1e-4


def test_the_page_shows_the_committed_figures() -> None:
    """Otherwise: ``python docs/hatch run compare --from-data``."""
    content = json.loads(compare.DATA.read_text(encoding="utf-8"))
    text = compare.PAGE.read_text(encoding="utf-8")
    assert generated.part(text, compare.MARKS) == compare.table(content)
    assert [line["name"] for line in content["formats"]] == [line.name for line in compare.FORMATS]
    for line in content["formats"]:
        assert line["difference"]["error"] > 0 and line["kl"]["error"] > 0
