"""The tiny model of the examples: its sizes, its file, its corpus and its training script."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from kvq_core.evaluation import Document, read_documents
from kvq_core.evaluation.tiny_model import SEPARATOR, Config, TinyModel, load_model, save_model
from tiny_model.corpus import is_held_out, standard_library

ROOT = Path(__file__).parents[2]

FOLDER = ROOT / "examples" / "tiny_model"
SMALL = Config(dim=64, num_layers=2, num_query_heads=4, num_kv_heads=1, hidden=96, max_len=256)


@pytest.fixture
def small() -> TinyModel:
    torch.manual_seed(0)
    return TinyModel(SMALL).requires_grad_(False)


def test_saved_weights_come_back_rounded_to_bf16_and_other_files_are_refused(small: TinyModel, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_model(small, path)
    loaded = load_model(path)
    assert loaded.config == SMALL and [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    for (name, saved), (_, found) in zip(small.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(saved.bfloat16().float(), found), name
    for content in (None, b"", b"not safetensors", b"\x02\0\0\0\0\0\0\0{}"):
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(ValueError, match=r"model\.safetensors: not a tiny model's weights"):
            load_model(path)


@pytest.mark.quick
def test_the_library_is_read_in_order_and_split(tmp_path: Path) -> None:
    """Copies and tests of a file fall on its side."""
    for name in ("queue", "ast", "json"):
        side = is_held_out(f"{name}.py")
        assert side == is_held_out(f"test/test_{name}.py") == is_held_out(f"{name}/__init__.py") == is_held_out(f"elsewhere/_{name}.py")
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


def test_the_training_script_leaves_weights_card_and_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--out", str(tmp_path), "--device", "cpu", "--no-compile", "--minutes", "5", "--max-steps", "2"]
    sizes = ["--batch", "1", "--length", "64", "--log-every", "1", "--eval-rows", "2"]
    monkeypatch.setattr(sys, "argv", ["train.py", *given, *sizes])
    runpy.run_path(str(FOLDER / "train.py"), run_name="__main__")
    facts = json.loads((tmp_path / "training.json").read_text())
    assert facts["steps"] == 2 and len(facts["points"]) == 2 and facts["config"]["max_len"] == 64
    assert 3 < facts["held_out_bits_per_byte"] < 9
    assert "PSF" in (tmp_path / "CARD.md").read_text()
    assert load_model(tmp_path / "model.safetensors").num_parameters == facts["parameters"]
