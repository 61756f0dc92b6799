"""The tiny model of the examples: its file, and its training script with the texts that it keeps for the test."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from kvq_core.evaluation import read_documents
from kvq_core.evaluation.tiny_model import SEPARATOR, TinyModel, load_model, save_model
from tiny_model.corpus import is_held_out

FOLDER = Path(__file__).parents[2] / "examples" / "tiny_model"


def test_saved_weights_come_back_rounded_to_bf16_and_other_files_are_refused(small_model: TinyModel, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_model(small_model, path)
    loaded = load_model(path)
    assert loaded.config == small_model.config and [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    for (name, saved), (_, found) in zip(small_model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(saved.bfloat16().float(), found), name
    for content in (None, b"", b"not safetensors", b"\x02\0\0\0\0\0\0\0{}"):
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(ValueError, match=r"model\.safetensors: not a tiny model's weights"):
            load_model(path)


def test_training_leaves_weights_card_and_curve_and_never_reads_the_held_out_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = read_documents(FOLDER / "heldout.txt")
    assert len(documents) >= 24 and all(is_held_out(d.name) and SEPARATOR not in d.text for d in documents)
    for name in ("queue", "ast", "json"):  # copies and tests of a file fall on its side
        assert is_held_out(f"{name}.py") == is_held_out(f"test/test_{name}.py") == is_held_out(f"elsewhere/_{name}.py")
    given = ["--out", str(tmp_path), "--device", "cpu", "--no-compile", "--minutes", "5", "--max-steps", "2"]
    sizes = ["--batch", "1", "--length", "64", "--log-every", "1", "--eval-rows", "2"]
    monkeypatch.setattr(sys, "argv", ["train.py", *given, *sizes])
    runpy.run_path(str(FOLDER / "train.py"), run_name="__main__")
    facts = json.loads((tmp_path / "training.json").read_text())
    assert facts["steps"] == 2 and len(facts["points"]) == 2 and 3 < facts["held_out_bits_per_byte"] < 9
    assert "PSF" in (tmp_path / "CARD.md").read_text()
    assert load_model(tmp_path / "model.safetensors").num_parameters == facts["parameters"]
