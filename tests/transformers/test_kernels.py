"""The Triton kernels behind a KVQCache, in the interpreter: what only they could get wrong about padding and windows."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvq_core.testing import places
from kvq_transformers import KVQCache, calibrate
from transformers_families import eager_twin, exact_twin, logits_in_steps, make_model, prompts, worst


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


def test_the_kernels_take_scales_and_balanced_keys(interpreted: torch.device) -> None:
    model, inputs = make_model("Llama", num_hidden_layers=1), prompts(2, 20, (0, 6))
    found = vars(calibrate(model, **inputs, smoothing="balanced"))
    for mode, options in (("fp8_per_tensor", found), ("int4", {"smoothing": found["smoothing"]})):
        kernels = logits_in_steps(model, inputs, KVQCache(model.config, mode, **options), [17, 1, 2])
        with pytest.MonkeyPatch.context() as patch:
            places.enter("eager", patch)
            plain = logits_in_steps(model, inputs, KVQCache(model.config, mode, **options), [17, 1, 2])
        exact = logits_in_steps(model, inputs, KVQCache(model.config, "none"), [17, 1, 2])
        real = inputs["attention_mask"].bool()
        # Sums in another order put a value here and there into the next code, whose cost is part of what the mode loses anyway.
        assert (kernels - plain)[real].norm() < 0.2 * (plain - exact)[real].norm()
