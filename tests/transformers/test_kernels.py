"""The Triton kernels behind a KVQCache, in the interpreter: what only they could get wrong about padding and windows."""

import torch
from transformers import DynamicCache

from kvq_transformers import KVQCache
from transformers_families import eager_twin, exact_twin, logits_in_steps, make_model, prompts, worst


def test_padding_rows_at_negative_positions(interpreted: torch.device) -> None:
    """In fixed pages a row's padding is part of the batch, before its first token."""
    model = make_model("Mistral", num_hidden_layers=1, head_dim=64)
    inputs, steps = prompts(2, 20, (0, 6)), [17, 1, 2]
    exact = logits_in_steps(exact_twin(model), inputs, DynamicCache(config=model.config), steps)
    eager = logits_in_steps(eager_twin(model), inputs, DynamicCache(config=model.config), steps)
    found = logits_in_steps(model, inputs, KVQCache(model.config, "none", max_cache_len=24), steps)
    mask = inputs["attention_mask"]
    assert worst(found, exact, mask) <= 2 * worst(eager, exact, mask)
