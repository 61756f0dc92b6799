"""The tiny model of the examples: its sizes, its file, its corpus and its training script."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvq_core.evaluation import Document, read_documents
from kvq_core.evaluation.tiny_model import SEPARATOR, Config, TinyModel, dense_attention, load_model, rope, save_model
from tiny_model.corpus import is_held_out, standard_library

ROOT = Path(__file__).parents[2]

FOLDER = ROOT / "examples" / "tiny_model"
SMALL = Config(dim=64, num_layers=2, num_query_heads=4, num_kv_heads=1, hidden=96, max_len=256)


@pytest.fixture
def small() -> TinyModel:
    torch.manual_seed(0)
    return TinyModel(SMALL).requires_grad_(False)


@pytest.mark.quick
def test_the_default_sizes_are_those_of_a_small_grouped_query_model() -> None:
    with torch.device("meta"):
        model = TinyModel()
    assert 3e6 < model.num_parameters < 6e6
    assert model.config.num_query_heads == 4 * model.config.num_kv_heads
    assert 2 * model.num_parameters < 10e6, "bf16 weights must stay under 10 MB"


@pytest.mark.quick
def test_a_row_depends_on_earlier_bytes_only(small: TinyModel) -> None:
    tokens = torch.randint(256, (2, 40))
    changed = tokens.clone()
    changed[:, 25:] = (changed[:, 25:] + 1) % 256
    logits, other = (small(t, torch.arange(40), dense_attention) for t in (tokens, changed))
    torch.testing.assert_close(logits[:, :25], other[:, :25])
    assert not torch.allclose(logits[:, 25:], other[:, 25:])


@pytest.mark.quick
def test_rope_makes_scores_depend_on_distance_alone() -> None:
    q, k = torch.randn(1, 1, 64), torch.randn(1, 1, 64)
    scores = [float((rope(q, torch.tensor([p]), 1e4) * rope(k, torch.tensor([p - 7]), 1e4)).sum()) for p in (7, 100, 1500)]
    assert scores == pytest.approx([scores[0]] * 3, rel=1e-3, abs=1e-3)
    torch.testing.assert_close(rope(q, torch.tensor([0]), 1e4), q)


def test_saved_weights_come_back_rounded_to_bf16(small: TinyModel, tmp_path: Path) -> None:
    save_model(small, tmp_path / "model.safetensors")
    loaded = load_model(tmp_path / "model.safetensors")
    assert loaded.config == SMALL
    for (name, saved), (_, found) in zip(small.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(saved.bfloat16().float(), found), name
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("content", [None, b"", b"not safetensors", b"\x02\0\0\0\0\0\0\0{}"])
def test_a_file_that_is_no_model_is_refused_by_name(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors: not a tiny model's weights"):
        load_model(path)


@pytest.mark.quick
def test_copies_and_tests_of_a_file_fall_on_its_side() -> None:
    for name in ("queue", "ast", "json", "tokenize", "logging"):
        side = is_held_out(f"{name}.py")
        assert side == is_held_out(f"test/test_{name}.py") == is_held_out(f"{name}/__init__.py") == is_held_out(f"elsewhere/_{name}.py")


def test_the_library_is_read_in_order_and_split(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    for name, text in (("b.py", b"y = 2\r\n"), ("a.py", b"x = 1\n"), ("c.txt", b"no"), ("d.py", b"\xff\xfe"), ("site-packages/e.py", b"z")):
        (tmp_path / name).write_bytes(text)
    assert list(standard_library(tmp_path)) == [Document("a.py", b"x = 1\n"), Document("b.py", b"y = 2\n")]


@pytest.mark.quick
def test_the_held_out_text_comes_from_held_out_files() -> None:
    documents = read_documents(FOLDER / "heldout.txt")
    assert len(documents) >= 24
    assert all(is_held_out(d.name) and len(d.text) >= 1500 and SEPARATOR not in d.text for d in documents)
    assert 50_000 < (FOLDER / "heldout.txt").stat().st_size < 80_000


@pytest.mark.skipif(not (FOLDER / "model.safetensors").exists(), reason="the weights have not been trained in this checkout")
def test_the_committed_weights_model_source_text() -> None:
    assert (FOLDER / "model.safetensors").stat().st_size < 10_000_000
    model, losses = load_model(FOLDER / "model.safetensors"), []
    for row in (torch.tensor([SEPARATOR, *document.text[:600]]) for document in read_documents(FOLDER / "heldout.txt")[:4]):
        with torch.inference_mode():
            logits = model(row[:-1], torch.arange(len(row) - 1), dense_attention)
        losses.append(torch.nn.functional.cross_entropy(logits, row[1:]).item())
    assert sum(losses) / len(losses) / 0.6931 < 2.6, "bits per byte; untrained it is above 7"


def test_the_training_script_leaves_weights_card_and_curve(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "train.py"), "--out", str(tmp_path), "--device", "cpu", "--no-compile"]
    sizes = ["--minutes", "5", "--max-steps", "3", "--batch", "2", "--length", "64", "--log-every", "1", "--eval-rows", "2"]
    done = subprocess.run(command + sizes, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "training.json").read_text())
    assert facts["steps"] == 3 and len(facts["points"]) == 3 and facts["config"]["max_len"] == 64
    assert 3 < facts["held_out_bits_per_byte"] < 9
    assert "PSF" in (tmp_path / "CARD.md").read_text()
    assert load_model(tmp_path / "model.safetensors").num_parameters == facts["parameters"]
