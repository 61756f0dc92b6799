"""Tiny random models with a tokenizer, made without a network."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

TEXT = ["the quick brown fox jumps over the lazy dog", "a kv cache keeps keys and values of every token", "pages of codes and scales"]
SPECIAL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
}
WINDOWS: dict[str, Any] = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
GEMMA = WINDOWS | {"tie_word_embeddings": True, "query_pre_attn_scalar": 64, "hidden_activation": "gelu_pytorch_tanh"}
# All experts take part in each token: where a router leaves some out, a rounding error can change which. With larger weights a code that
# moves by one changes log-probabilities by a tenth and more.
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 4, "intermediate_size": 128, "initializer_range": 0.04}
KINDS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
    "gemma2": (Gemma2Config, GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0}),
    "gemma3": (Gemma3TextConfig, GEMMA),
    "gpt_oss": (GptOssConfig, WINDOWS | EXPERTS | {"rope_parameters": None}),
}
"""Keys of a Qwen 2 have biases, those of a Qwen 3 and a Gemma 3 pass norms; Gemma 2 has soft caps, gpt-oss sinks."""


@dataclass(frozen=True)
class Tiny:
    """A model: its architecture, and how many heads of which size its attention has."""

    kind: str = "llama"
    query_heads: int = 4
    kv_heads: int = 2
    head_size: int = 64

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.query_heads}-{self.kv_heads}-{self.head_size}"

    def configuration(self) -> PreTrainedConfig:
        if self.kind == "bloom":  # with ALiBi
            common = {name: value for name, value in COMMON.items() if name != "tie_word_embeddings"}  # they are tied
            return BloomConfig(**common | {"hidden_size": self.query_heads * self.head_size, "n_layer": 3, "n_head": self.query_heads})
        shape = COMMON | {"num_attention_heads": self.query_heads, "num_key_value_heads": self.kv_heads, "head_dim": self.head_size}
        made, options = KINDS[self.kind]
        return made(**shape | options)

    def make(self, folder: Path) -> Path:
        """The folder of the model with its tokenizer under ``folder``, made if it is not there."""
        made = folder / self.name
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
        model = AutoModelForCausalLM.from_config(self.configuration(), dtype=torch.float32).eval()
        for name, parameter in model.named_parameters():
            if name.endswith(("k_proj.bias", "sinks")):
                # Biases large enough to take up levels of a low-bit mode, sinks large enough to take part.
                torch.nn.init.normal_(parameter, std=4.0 if name.endswith("bias") else 1.0)
        for module in model.modules():
            if hasattr(module, "k_norm"):
                # Sizes of channels as a low-bit mode suffers from, which queries make up for.
                sizes, added = torch.randn(self.head_size).exp(), float(self.kind == "gemma3")
                module.k_norm.weight.data, module.q_norm.weight.data = sizes - added, 1 / sizes - added
        model.save_pretrained(made)
        return made
