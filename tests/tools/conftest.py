"""On the CPU these tests take the torch path, as a reader of the documents does: kernels have suites of their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvq_core import list_backends, unregister_backend
from kvq_core.registry import IN_PROCESS


@pytest.fixture(autouse=True, scope="module")
def plain_torch() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TRITON_INTERPRET", "KVQ_DEBUG", "KVQ_BACKENDS"):
            patch.delenv(name, raising=False)
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(autouse=True)
def registered_no_longer() -> Iterator[None]:
    """What a test registers is gone after it."""
    before = {entry.mode for entry in list_backends() if entry.distribution == IN_PROCESS}
    yield
    for mode in {entry.mode for entry in list_backends() if entry.distribution == IN_PROCESS} - before:
        unregister_backend(mode)


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as ``save_pretrained`` leaves it: two layers of random weights, bytes as tokens after a beginning-of-text."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("llama")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(["<s>", *alphabet])}, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>").save_pretrained(path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(vocab_size=257, head_dim=64, max_position_embeddings=512, initializer_range=0.2, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path
