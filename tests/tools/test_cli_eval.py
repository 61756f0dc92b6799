"""``kvq eval`` on a small random model: its table, its files, and what it says of bad input."""

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from kvq_core import list_backends, register_backend, unregister_backend
from kvq_core.cli.app import app
from kvq_core.evaluation import tiny_subject
from kvq_core.evaluation.tiny_model import TinyModel
from kvq_core.none import NoneBackend

ROOT = Path(__file__).parents[2]
MODES = sorted({entry.mode for entry in list_backends()})
QUICK = ("--length", "60", "--documents", "4", "--device", "cpu")


@pytest.fixture(autouse=True)
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.fixture
def weights(small_weights: Path) -> str:
    return str(small_weights)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"def f{i}(x):\n    return x * {i}\n" for i in range(20)))
    return str(path)


def evaluate(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["eval", *arguments], prog_name="kvq")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def refused(*arguments: str) -> str:
    status, out, err = evaluate(*arguments)
    assert (status, out) == (2, "") and "Error: " in err and "Traceback" not in err
    return err


def test_the_table_has_a_line_for_every_mode(weights: str, text: str) -> None:
    status, out, err = evaluate("--model", weights, "--text", text, *QUICK)
    assert (status, err) == (0, "")
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert set(MODES) <= set(lines)
    assert lines["none"][1:3] == ["512", "1.00"] and lines["int4_per_token_head"][1:3] == ["144", "3.56"]
    assert "4 passages, 240 tokens" in out


def test_figures_lie_in_three_files(weights: str, text: str, tmp_path: Path) -> None:
    given = ("--model", weights, "--text", text, *QUICK, "--modes", "int4,int2")
    status, out, err = evaluate(*given, "--out", str(tmp_path / "new" / "folder"), "--json")
    assert status == 0 and "written: " in err
    content = json.loads(out)
    assert [line["mode"] for line in content["results"]] == ["none", "int4_per_token_head", "int2_per_token_head"]
    assert {"bits_per_byte", "bits_per_byte_se", "perplexity_se", "kl", "top1", "tokens_per_second", "peak_bytes"} <= set(
        content["results"][0]
    )
    assert 0 < content["results"][1]["kl"] < content["results"][2]["kl"]
    folder = tmp_path / "new" / "folder"
    assert json.loads((folder / "eval.json").read_text()) == content
    with (folder / "eval.csv").open() as file:
        assert [line["mode"] for line in csv.DictReader(file)] == [line["mode"] for line in content["results"]]
    assert (folder / "eval.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_of_weights_and_one_passage_will_do(weights: str, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("import os\n")
    status, out, _ = evaluate(
        "--model", str(Path(weights).parent), "--text", str(tmp_path / "short.txt"), *QUICK, "--mode", "int8", "--json"
    )
    content = json.loads(out)
    assert status == 0 and (content["passages"], content["tokens"]) == (1, 10)
    assert content["results"][1]["bits_per_byte_se"] is None, "one passage has no standard error"


def test_the_bundled_model_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, _ = evaluate("--mode", "int4", "--length", "400", "--documents", "3", "--device", "cpu", "--json")
    none, int4 = json.loads(out)["results"]
    assert status == 0 and none["bits_per_byte"] < 2.6 and abs(int4["difference"]) < 0.2


# -- bad input --------------------------------------------------------------------------------------------------------------


def test_models_that_are_none_are_refused(text: str, tmp_path: Path) -> None:
    assert "no such file or folder" in refused("--model", "/no/such/model.safetensors", "--text", text)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    assert "not a tiny model's weights" in refused("--model", str(tmp_path / "model.safetensors"), "--text", text)


def test_a_hugging_face_model_names_what_it_needs(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvq_transformers", None)  # as if it were not installed
    (tmp_path / "config.json").write_text("{}")
    for model in ("Qwen/Qwen3-0.6B", str(tmp_path)):
        assert "pip install kvq-transformers" in refused("--model", model, "--text", text)


def test_no_model_and_no_checkout_is_told(weights: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tiny_subject, "_FOLDER", Path("nowhere"))
    assert "need a checkout of kvq's repository" in refused()
    assert "--text: got none, need a UTF-8 text file" in refused("--model", weights)


def test_texts_that_cannot_be_scored_are_refused(weights: str, tmp_path: Path) -> None:
    assert "No such file or directory" in refused("--model", weights, "--text", str(tmp_path / "none.txt"))
    assert "Is a directory" in refused("--model", weights, "--text", str(tmp_path))
    (tmp_path / "text.bin").write_bytes(b"\xff\xfe\x00")
    assert "no UTF-8" in refused("--model", weights, "--text", str(tmp_path / "text.bin"))
    (tmp_path / "empty.txt").write_text("\n")
    assert "nothing but white space" in refused("--model", weights, "--text", str(tmp_path / "empty.txt"))


def test_modes_devices_and_folders_that_are_not_there_are_refused(weights: str, text: str) -> None:
    assert "installed: " in refused("--model", weights, "--text", text, "--modes", "int9")
    assert "--device: got 'abacus', need a device of this machine" in refused("--model", weights, "--text", text, "--device", "abacus")
    assert "/dev/null" in refused("--model", weights, "--text", text, *QUICK, "--out", "/dev/null/below")


def test_what_would_fail_last_is_tried_first(weights: str, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(TinyModel, "hidden", None)  # nothing is computed
    (tmp_path / "eval.png").mkdir()
    assert "eval.png" in refused("--model", weights, "--text", text, *QUICK, "--out", str(tmp_path))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install matplotlib" in refused("--model", weights, "--text", text, *QUICK, "--out", str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


@pytest.fixture
def wide() -> Iterator[str]:
    class Wide(NoneBackend):
        mode = "wide_test"
        head_size_multiple = 128

    register_backend(Wide)
    yield Wide.mode
    unregister_backend(Wide.mode)


def test_a_mode_that_does_not_fit_the_heads(wide: str, weights: str, text: str) -> None:
    given = ("--model", weights, "--text", text, *QUICK)
    assert "got head size 64, need a multiple of 128" in refused(*given, "--mode", wide)
    status, out, _ = evaluate(*given)  # nobody asked for it by name: the others have their lines
    assert status == 1 and "int4_per_token_head " in out and f"broken: {wide}: ArgumentError: head_size: got head size 64" in out


def test_too_little_memory_is_told(weights: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(TinyModel, "hidden", full)
    said = refused("--model", weights, "--text", text, *QUICK)
    assert "too little memory: CUDA out of memory. Tried to allocate 20.00 GiB.; need" in said and "--length" in said


@pytest.mark.parametrize("kind", ["first_prefill", "mean", "balanced"])
def test_smoothing_is_used_and_said(weights: str, text: str, kind: str) -> None:
    found = []
    for options in ((), ("--smoothing", kind)):
        status, out, _ = evaluate("--model", weights, "--text", text, "--modes", "int2", *QUICK, *options, "--json")
        assert status == 0
        found.append(json.loads(out))
    assert found[1]["smoothing"] == kind and "smoothing" not in found[0]
    plain, smoothed = (next(r for r in content["results"] if r["mode"].startswith("int2")) for content in found)
    assert plain["kl"] != smoothed["kl"]


def test_unknown_smoothing_is_refused(weights: str, text: str) -> None:
    assert "--smoothing: got 'median', need" in refused("--model", weights, "--text", text, *QUICK, "--smoothing", "median")
