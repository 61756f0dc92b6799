"""The Triton kernels behind a KVQCache, in the interpreter: what only they could get wrong about padding and windows."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from transformers import DynamicCache
from transformers_families import eager_twin, exact_twin, logits_in_steps, make_model, prompts, worst

from kvq_transformers import KVQCache


@pytest.mark.parametrize("capacity", [{}, {"max_cache_len": 24}], ids=["growing", "fixed"])
def test_padding_rows_at_negative_positions(capacity: dict[str, Any], interpreted: torch.device) -> None:
    """In fixed pages a row's padding is part of the batch, before its first token."""
    model = make_model("Mistral", num_hidden_layers=1, head_dim=64)
    inputs, steps = prompts(2, 20, (0, 6)), [17, 1, 2]
    exact = logits_in_steps(exact_twin(model), inputs, DynamicCache(config=model.config), steps)
    eager = logits_in_steps(eager_twin(model), inputs, DynamicCache(config=model.config), steps)
    found = logits_in_steps(model, inputs, KVQCache(model.config, "none", **capacity), steps)
    mask = inputs["attention_mask"]
    assert worst(found, exact, mask) <= 2 * worst(eager, exact, mask)
