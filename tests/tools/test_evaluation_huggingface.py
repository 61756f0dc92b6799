"""``kvq eval`` of a Hugging Face model: a tiny random Llama with a tokenizer of its own. Needs kvq-transformers."""

import copy
import math
from pathlib import Path

import pytest
import torch

from command_line import kvq
from kvq_core import ArgumentError, get_backend
from kvq_core.evaluation import Document, evaluate, parse_mode
from kvq_core.evaluation.huggingface import HuggingFaceSubject, load

pytest.importorskip("kvq_transformers")
transformers = pytest.importorskip("transformers")

TEXT = "".join(f"def f{i}(x):\n    return x * {i}\n" for i in range(12))


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def subject(llama_folder: Path) -> HuggingFaceSubject:
    return load(str(llama_folder), torch.device("cpu"))


def test_passages_count_bytes_and_open_as_the_tokenizer_says(subject: HuggingFaceSubject) -> None:
    """Having a beginning-of-text token does not mean that the model was trained with one before every text."""
    first, second = subject.passages([Document("a", b"abc\xc3\xa9fgh")], 5)
    assert first.num_predicted == 5 and first.nbytes + second.nbytes == 8
    assert first.tokens[0] == second.tokens[0] == subject.tokenizer.bos_token_id == subject.opening("ab")[0]
    bare = HuggingFaceSubject("bare", subject.model, copy.deepcopy(subject.tokenizer), subject.kvq)
    bare.tokenizer.backend_tokenizer.post_processor = None
    assert bare.opening("ab") == subject.opening("ab")[1:] == bare.encode("ab")
    (passage,) = bare.passages([Document("a", b"abcd")], 5)
    assert passage.tokens == tuple(bare.encode("abcd")) and passage.nbytes == 3 and bare.decode(passage.tokens) == "abcd"


def test_none_through_the_cache_is_the_model_itself(subject: HuggingFaceSubject, llama_folder: Path) -> None:
    passages = subject.passages([Document("a", TEXT.encode())], 100)
    dense = transformers.LlamaForCausalLM.from_pretrained(llama_folder, dtype=torch.float32, attn_implementation="eager")
    nats = 0.0
    for ids in (torch.tensor([passage.tokens]) for passage in passages):
        with torch.inference_mode():
            nats += float(torch.nn.functional.cross_entropy(dense(ids).logits[0, :-1], ids[0, 1:], reduction="sum"))
    backends = [get_backend(mode) for mode in ("none", "int8", "int2")]
    none, int8, int2 = evaluate(subject, backends, passages, calibration=passages[0], chunk=32, batch=1).results
    assert none.bits_per_byte.mean == pytest.approx(nats / math.log(2) / sum(p.nbytes for p in passages), rel=1e-4)
    assert none.perplexity.mean == pytest.approx(math.exp(nats / sum(p.num_predicted for p in passages)), rel=1e-4)
    assert 0 < int8.kl.mean < int2.kl.mean
    assert (none.bytes_per_token, int2.bytes_per_token) == (2 * 2 * 64 * 2, 2 * 2 * (16 + 4)), "layers, K and V; bf16, whatever the rows"
    assert (none.times_smaller, int2.times_smaller) == (1, 128 / 20) and (none.bits, int2.bits) == (16, 2.5)


@pytest.mark.parametrize("mode", ["none", "int2:residual_length=16,sink_tokens=4"])
def test_rows_of_a_batch_are_read_as_they_are_alone(mode: str, subject: HuggingFaceSubject) -> None:
    """Chunks of different lengths, some of them empty."""
    config = parse_mode(mode)
    passages = [subject.passages([Document("a", TEXT[n : n + length].encode())], length)[0] for n, length in ((0, 90), (7, 41), (20, 64))]
    parts = [[passage.tokens[first : first + 32] for passage in passages] for first in range(0, 96, 32)]
    parts[1][0], parts[2][0] = parts[1][0][:5], (*parts[1][0][5:], *parts[2][0])
    with torch.inference_mode():
        together = subject.open(config.backend, passages, passages[0], **config.options)
        found = [together.feed(rows) for rows in parts]
        for n, passage in enumerate(passages):
            alone = subject.open(config.backend, [passage], passages[0], **config.options)
            for rows, logits in zip(parts, found, strict=True):
                assert len(logits[n]) == len(rows[n])
                if rows[n]:
                    torch.testing.assert_close(logits[n], alone.feed([rows[n]])[0], rtol=1e-4, atol=1e-4)


def test_the_command_line_takes_a_folder_and_smooths_keys(llama_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    given = ["--model", str(llama_folder), "--text", str(tmp_path / "text.txt"), "--modes", "int2,fp8_per_tensor", "--length", "60"]
    told = [kvq("eval", *given, "--device", "cpu", "--json", *more).json for more in ([], ["--smoothing", "balanced"])]
    assert told[1]["smoothing"] == "balanced" and not told[1]["failures"]
    plain, smoothed = ({line["mode"]: line["kl"] for line in one["results"]} for one in told)
    assert smoothed["int2_per_token_head:smoothing=balanced"] != plain["int2_per_token_head"]
    assert smoothed["none"] == plain["none"] == 0


def test_folders_without_a_model_are_refused(llama_folder: Path, tmp_path: Path) -> None:
    for config in ((llama_folder / "config.json").read_text(), "{}"):
        (tmp_path / "config.json").write_text(config)
        with pytest.raises(ArgumentError, match="need a folder with a model and its tokenizer"):
            load(str(tmp_path), torch.device("cpu"))
