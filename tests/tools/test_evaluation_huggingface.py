"""``kvq eval`` of Hugging Face models: tiny random Llamas, in a folder and in a GGUF file, and packages that bring such files."""

import copy
import math
import sys
from pathlib import Path

import pytest
import torch

import kvq_core.evaluation.pretrained as pretrained
from command_line import kvq
from kvq_core import ArgumentError, get_backend
from kvq_core.evaluation import Document, evaluate, parse_mode
from kvq_core.evaluation.huggingface import HuggingFaceSubject, load, load_gguf
from kvq_core.evaluation.pretrained import PRETRAINED, MissingPackageError

gguf = pytest.importorskip("gguf")
for needed in ("accelerate", "kvq_transformers"):
    pytest.importorskip(needed)
transformers = pytest.importorskip("transformers")

TEXT = "".join(f"def f{i}(x):\n    return x * {i}\n" for i in range(12))
DIM, KV = 64, 32
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def subject(llama_folder: Path) -> HuggingFaceSubject:
    return load(str(llama_folder), CPU)


def test_passages_count_bytes_and_open_as_the_tokenizer_says(subject: HuggingFaceSubject) -> None:
    """Having a beginning-of-text token does not mean that the model was trained with one before every text."""
    first, second = subject.passages([Document("a", b"abc\xc3\xa9fgh")], 5)
    assert first.num_predicted == 5 and first.nbytes + second.nbytes == 8
    assert first.tokens[0] == second.tokens[0] == subject.tokenizer.bos_token_id == subject.opening("ab")[0]
    bare = HuggingFaceSubject("bare", subject.model, copy.deepcopy(subject.tokenizer), subject.kvq)
    bare.tokenizer.backend_tokenizer.post_processor = None
    (passage,) = bare.passages([Document("a", b"abcd")], 5)
    assert passage.tokens == tuple(bare.encode("abcd")) and passage.nbytes == 3


def test_no_token_is_read_past_the_last_position(subject: HuggingFaceSubject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject.model.config, "max_position_embeddings", 8)
    bare = HuggingFaceSubject("bare", subject.model, copy.deepcopy(subject.tokenizer), subject.kvq)
    bare.tokenizer.backend_tokenizer.post_processor = None
    for one in (subject, bare):
        # The last token of a passage is predicted and not read.
        assert {len(passage.tokens) for passage in one.passages([Document("a", TEXT.encode()[:90])], 50)} == {9}


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
    assert 0 < int8.kl.mean < int2.kl.mean and (none.times_smaller, int2.times_smaller) == (1, 128 / 20)
    assert (none.bytes_per_token, int2.bytes_per_token) == (2 * 2 * 64 * 2, 2 * 2 * (16 + 4)), "layers, K and V; bf16, whatever the rows"


def test_rows_of_a_batch_are_read_as_they_are_alone(subject: HuggingFaceSubject) -> None:
    """Chunks of different lengths, some of them empty."""
    config = parse_mode("int2:residual_length=16,sink_tokens=4")
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
    assert smoothed["int2_per_token_head:smoothing=balanced"] != plain["int2_per_token_head"] and smoothed["none"] == plain["none"] == 0


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer of random weights with SmolLM's pre-tokenizer; the vocabulary is bytes, and the merge of two digits."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", add_bos_token=False)


def write_gguf(path: Path, add_bos_token: bool) -> Path:
    from tokenizers.pre_tokenizers import ByteLevel

    writer = gguf.GGUFWriter(path, "llama")
    tokens = ["<s>", *sorted(ByteLevel.alphabet()), "12"]
    facts = {"context_length": 256, "embedding_length": DIM, "block_count": 1, "feed_forward_length": 96, "rope_dimension_count": KV}
    facts |= {"head_count": 2, "head_count_kv": 1, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 10000.0, "vocab_size": len(tokens)}
    kinds = [gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (len(tokens) - 1)]
    facts |= {"tokenizer_model": "gpt2", "tokenizer_pre": "smollm", "token_list": tokens, "token_types": kinds, "token_merges": ["1 2"]}
    for name, value in (facts | dict.fromkeys(("bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id"), 0)).items():
        getattr(writer, f"add_{name}")(value)
    writer.add_string("general.license", "apache-2.0")
    writer.add_add_bos_token(add_bos_token)
    shapes: dict[str, tuple[int, ...]] = {"attn_norm": (DIM,), "ffn_norm": (DIM,), "attn_q": (DIM, DIM), "attn_output": (DIM, DIM)}
    shapes |= {"attn_k": (KV, DIM), "attn_v": (KV, DIM), "ffn_gate": (96, DIM), "ffn_up": (96, DIM), "ffn_down": (DIM, 96)}
    shapes = {"token_embd": (len(tokens), DIM), "output_norm": (DIM,)} | {f"blk.0.{name}": shape for name, shape in shapes.items()}
    torch.manual_seed(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", (torch.randn(shape) * 0.2).numpy())
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write()
    return path


def test_a_gguf_file_is_a_model(file: Path, tmp_path: Path) -> None:
    """Digits are tokens of their own, as SmolLM2 was trained; the reader's own pre-tokenizer lets the merge through."""
    subject = load_gguf(file, CPU)
    embedding = next(tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == "token_embd.weight")
    assert torch.equal(subject.model.get_input_embeddings().weight, torch.tensor(embedding.data))
    assert [subject.decode([token]) for token in subject.encode("a12 b")] == ["a", "1", "2", " ", "b"]
    assert (subject.rows_dtype, load_gguf(file, CPU, dtype=torch.bfloat16).rows_dtype) == (torch.float32, torch.bfloat16)
    (tmp_path / "text.txt").write_text("x = 12\n" * 30)
    given = ["--model", str(file), "--text", str(tmp_path / "text.txt"), "--mode", "int4", "--length", "60", "--device", "cpu"]
    ran = kvq("eval", *given)
    assert ran.status == 0 and "tiny.gguf on" in ran.out and "licence of the weights: apache-2.0" in ran.out
    assert "differences are to none with float32 rows" in ran.out


def test_a_reader_that_drops_the_token_that_opens_a_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers 5.17 does with Gemma 3."""
    monkeypatch.setattr(HuggingFaceSubject, "opening", lambda self, text: self.encode(text))
    with pytest.raises(ArgumentError, match="does not open texts with the token that the file asks for"):
        load_gguf(write_gguf(tmp_path / "bos.gguf", add_bos_token=True), CPU)


def test_what_is_no_model_or_missing_is_refused_with_what_is_needed(
    llama_folder: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for config in ((llama_folder / "config.json").read_text(), "{}"):
        (tmp_path / "config.json").write_text(config)
        with pytest.raises(ArgumentError, match="need a folder with a model and its tokenizer"):
            load(str(tmp_path), CPU)
    (tmp_path / "bad.gguf").write_bytes(b"nothing of the kind")
    with pytest.raises(ArgumentError, match="need a GGUF file"):
        load_gguf(tmp_path / "bad.gguf", CPU)
    monkeypatch.setitem(sys.modules, "gguf", None)  # as if it were not installed
    with pytest.raises(MissingPackageError, match=r'pip install "kvq-core\[models\]"'):
        load_gguf(file, CPU)
    monkeypatch.setattr(pretrained, "find_spec", lambda name: None)
    for one in PRETRAINED.values():
        with pytest.raises(MissingPackageError) as missing:
            one.file()
        assert f"pip install {one.install}" in str(missing.value) and one.licence in str(missing.value)
