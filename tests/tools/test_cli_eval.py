"""``kvq eval`` on a small random model: its table, its files, and what it says of bad input."""

import csv
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

from command_line import kvq, row
from command_line import refused as kvq_refused
from kvq_core import list_backends, register_backend, unregister_backend
from kvq_core.cli.eval import passages_of
from kvq_core.evaluation import Passage, tiny_subject
from kvq_core.evaluation.tiny_model import TinyModel
from kvq_core.none import NoneBackend

MODES = sorted({entry.mode for entry in list_backends()})


@pytest.fixture(scope="module")
def given(small_weights: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"def f{i}(x):\n    return x * {i}\n" for i in range(20)))
    return ("--model", str(small_weights), "--text", str(path), "--length", "60", "--documents", "4", "--device", "cpu")


def refused(*arguments: str) -> str:
    return kvq_refused("eval", *arguments)


class Wide(NoneBackend):
    mode = "wide_test"
    head_size_multiple = 128


def test_the_table_has_a_line_for_every_mode(given: tuple[str, ...]) -> None:
    """One that does not fit the heads is told, and costs the others nothing."""
    register_backend(Wide)
    try:
        ran, said = kvq("eval", *given), refused(*given, "--mode", Wide.mode)
    finally:
        unregister_backend(Wide.mode)
    assert ran.status == 1 and all(row(ran.out, mode) for mode in MODES) and "4 passages, 240 tokens" in ran.out
    assert f"broken: {Wide.mode}: ArgumentError: head_size: got head size 64" in ran.out
    assert "got head size 64, need a multiple of 128" in said
    assert [line.split(",")[0] for line in ran.err.splitlines()] == [f"{n}/4 text.txt" for n in (1, 2, 3, 4)]
    assert row(ran.out, "none")[1:4] == ["512", "16.00", "1.00"] and row(ran.out, "int4_per_token_head")[1:4] == ["144", "4.50", "3.56"]


def test_the_bundled_model_is_the_default() -> None:
    none, int4 = kvq("eval", "--mode", "int4", "--length", "200", "--documents", "2", "--device", "cpu", "--json").json["results"]
    assert none["bits_per_byte"] < 2.6 and abs(int4["difference"]) < 0.2


def test_a_run_goes_on_and_its_figures_lie_in_three_files(given: tuple[str, ...], tmp_path: Path) -> None:
    """Two texts of one name; then the same after an interruption, with a mode that is added later."""
    (tmp_path / "more" / "text.txt").parent.mkdir()
    (tmp_path / "more" / "text.txt").write_text("import os, sys\n" * 20)
    given = (*given, "--text", str(tmp_path / "more" / "text.txt"))
    folder, both = tmp_path / "new" / "folder", ("--mode", "int2,int2:smoothing=first_prefill", "--json")
    ran = kvq("eval", *given, *both, "--out", str(folder))
    whole = {line["mode"]: line for line in ran.json["results"]}
    assert list(whole) == ["none", "int2_per_token_head:smoothing=first_prefill", "int2_per_token_head"], "the best comes first"
    none, smoothed, plain = whole.values()
    assert 0 < smoothed["kl"] < plain["kl"] and none["sample"] == 2 and "text.txt: text.txt, 60 tokens" in ran.err
    figures = {"bits_per_byte", "bits_per_byte_se", "perplexity_se", "kl", "top1", "tokens_per_second", "peak_bytes"}
    assert figures <= set(none) and json.loads((folder / "eval.json").read_text()) == ran.json and "written: " in ran.err
    assert [line["mode"] for line in csv.DictReader((folder / "eval.csv").read_text().splitlines())] == list(whole)
    assert (folder / "eval.png").read_bytes().startswith(b"\x89PNG")
    file = tmp_path / "run.jsonl"
    given = (*given, "--resume", str(file))
    kvq("eval", *given, "--mode", "int2")
    file.write_bytes(file.read_bytes()[:-40])
    again = kvq("eval", *given, *both).json["results"]
    assert [line["kl"] for line in again] == pytest.approx([line["kl"] for line in whole.values()], rel=1e-3)
    assert kvq("eval", *given, *both).json["results"] == again, "down to the seconds: nothing was measured again"
    assert "of another run: chunk 128, now 64" in refused(*given, "--mode", "int2", "--chunk", "64")


@pytest.mark.parametrize(
    ("lengths", "scored", "calibrates"),
    [((9, 9, 9), [0, 1], 2), ((9, 9, 2), [0, 2], 1), ((2, 9), [0], 1), ((9, 2, 1), [1, 2], 0), ((3,), [0], 0)],
)
def test_no_stub_calibrates(lengths: tuple[int, ...], scored: list[int], calibrates: int) -> None:
    every = [Passage((0,) * (length + 1), length, str(n)) for n, length in enumerate(lengths)]
    found, calibration = passages_of(SimpleNamespace(passages=lambda documents, length: every), [], 9, 8)  # type: ignore[arg-type]
    assert (found, calibration) == ([every[n] for n in scored], every[calibrates])


def test_one_passage_is_said_to_calibrate_and_be_scored(given: tuple[str, ...], tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("def f(x):\n    return x\n")
    ran = kvq("eval", *given[:2], "--text", str(text), *given[4:], "--mode", "fp8_per_tensor")
    assert ran.status == 0 and "one passage: what calibrates is scored, too" in ran.err


def test_tasks_have_tables_and_files_of_their_own(given: tuple[str, ...], tmp_path: Path) -> None:
    given = (*given, "--mode", "int2", "--items", "2", "--resume", str(tmp_path / "run.jsonl"))
    ran = kvq("eval", *given, "--task", "copy,generate", "--out", str(tmp_path / "out"))
    assert ran.status == 0 and "1/2 copy, " in ran.err and "2/2 generate, " in ran.err and "none 1/1" in ran.err
    assert "Copying a list of random words, tokens of words right (± binomial s.e.)" in ran.out and "bits/byte" not in ran.out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"eval.json", "tasks.csv", "tasks.png"}
    content = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert content["results"] == [] and {line["task"] for line in content["tasks"]} == {"copy", "generate"}
    both = kvq("eval", *given, "--task", "kl,copy", "--json").json
    assert len(both["results"]) == 2 and both["tasks"] == [line for line in content["tasks"] if line["task"] == "copy"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "/no/such/model.safetensors"], "no such file or folder"),
        (["--model", b"not safetensors"], "not a tiny model's weights"),
        (["--model", safetensors.torch.save({"x": torch.zeros(1)}, {"config": "["})], "not a tiny model's weights"),
        (["--text", "/no/such.txt"], "No such file or directory"),
        (["--text", b"\xff\xfe\x00"], "no UTF-8"),
        (["--text", b"\n"], "nothing but white space"),
        (["--modes", "int9"], "installed: "),
        (["--modes", "int4:window=3,int2"], "need name=value, the name one of smoothing, residual_length"),
        (["--modes", "int4:sink_tokens=4,sink_tokens=4"], "sink_tokens twice"),
        (["--modes", "int4:sink_tokens=-1"], "sink_tokens: got '-1', need a number of tokens"),
        (["--modes", "int4:residual_length=4,residual_mode=fp8_per_tensor"], "residual_mode: got fp8_per_tensor"),
        (["--modes", "int4:sink_tokens"], "need a value: int4:sink_tokens=..."),
        (["--modes", "sink_tokens=4"], "need MODE:name=value"),
        (["--dtype", "float16"], "--dtype: got 'float16', need none: the tiny model's rows are bfloat16"),
        (["--device", "abacus"], "--device: got 'abacus', need a device of this machine"),
        (["--out", "/dev/null/below"], "/dev/null"),
        (["--smoothing", "median"], "--smoothing: got 'median', need"),
        (["--task", "kl,gsm8k"], "--task: got 'gsm8k', need some of kl, copy, passkey, arithmetic, generate"),
        (["--task", "kl,copy", "--csv"], "--json prints both"),
    ],
)
def test_bad_input_is_refused(arguments: list[Any], said: str, given: tuple[str, ...], tmp_path: Path) -> None:
    """Bytes stand for a file of that content."""
    path = tmp_path / "given.safetensors"
    for content in arguments:
        if isinstance(content, bytes):
            path.write_bytes(content)
    assert said in refused(*given, *(str(path) if isinstance(part, bytes) else part for part in arguments))


def test_what_would_fail_last_is_tried_first(given: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Packages and folders that are missing, files that cannot be written; too little memory is told when it shows."""
    with monkeypatch.context() as patch:
        patch.setattr(TinyModel, "hidden", None)  # nothing is computed
        patch.setitem(sys.modules, "kvq_transformers", None)  # as if it were not installed
        assert "pip install kvq-transformers" in refused(*given, "--model", "Qwen/Qwen3-0.6B")
        (tmp_path / "eval.png").mkdir()
        assert "eval.png" in refused(*given, "--out", str(tmp_path))
        patch.setitem(sys.modules, "matplotlib", None)
        assert 'pip install "kvq-core[plots]"' in refused(*given, "--out", str(tmp_path / "new")) and not (tmp_path / "new").exists()
        patch.setattr(tiny_subject, "_FOLDER", Path("nowhere"))
        assert "need a checkout of kvq's repository" in refused()
        assert "--text: got none, need a UTF-8 text file" in refused(*given[:2])

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(TinyModel, "hidden", full)
    said = refused(*given)
    assert "too little memory: CUDA out of memory. Tried to allocate 20.00 GiB.; need" in said and "--length" in said

    def busy(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty", busy)
    assert "too little memory: CUDA error: out of memory; need" in refused(*given)
