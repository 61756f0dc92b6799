"""A tiny random Llama with a tokenizer, made without a network: ``python tiny.py FOLDER``."""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = ["the quick brown fox jumps over the lazy dog", "a kv cache keeps keys and values of every token", "pages of codes and scales"]


def make(folder: Path) -> None:
    """Save model and tokenizer to ``folder``."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(TEXT, trainer)
    names = dict(zip(("unk_token", "bos_token", "eos_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.08,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).eval().save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
