"""Tiny random models with a tokenizer, made without a network."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, LlamaConfig, PreTrainedConfig, PreTrainedTokenizerFast

TEXT = ["the quick brown fox jumps over the lazy dog", "a kv cache keeps keys and values of every token", "pages of codes and scales"]
SPECIAL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
}
GEMMA: dict[str, Any] = {
    **SHAPE,
    "tie_word_embeddings": True,
    "sliding_window": 32,
    "query_pre_attn_scalar": 64,
    "hidden_activation": "gelu_pytorch_tanh",
}
KINDS = ("sliding_attention", "full_attention", "sliding_attention")


def configuration(model: str) -> PreTrainedConfig:
    """Of a Llama; of a Gemma 2, with windows and soft caps; of a Gemma 3, with windows."""
    if model == "gemma2":
        return Gemma2Config(**GEMMA, layer_types=list(KINDS), attn_logit_softcapping=5.0, final_logit_softcapping=30.0)
    if model == "gemma3":
        return Gemma3TextConfig(**GEMMA, layer_types=list(KINDS))
    return LlamaConfig(**SHAPE)


def make(model: str, folder: Path) -> Path:
    """The folder of a model with its tokenizer under ``folder``, made if it is not there."""
    made = folder / model
    if made.exists():
        return made
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=list(SPECIAL.values()), initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXT, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL).save_pretrained(made)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(configuration(model), dtype=torch.float32).eval().save_pretrained(made)
    return made
