"""KVQCache with a residual window: the keys that a row reads exact, in models of each kind."""

import copy
import io
import pickle
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import DynamicCache

from kvq_core.cache.pages import Pages
from kvq_transformers import KVQCache
from kvq_transformers.fixed_window import FixedWindow
from kvq_transformers.naming import GENERATE
from transformers_families import eager_twin, logits_in_steps, make_model, prompts, through_mode, whole_text, worst

pytestmark = pytest.mark.usefixtures("torch_path")
STEPS = [19, 40, 1, 1, 3, 1]
"""A prompt, a chunk that is longer than the windows below, single tokens and drafts."""
SINKS: dict[str, Any] = {"residual_length": 16, "sink_tokens": 20}


@pytest.mark.parametrize("window", [{"residual_length": 8}, {"sink_tokens": 4}, SINKS, SINKS | {"residual_mode": "int8"}], ids=str)
@torch.no_grad()
def test_the_newest_and_the_first_rows_are_exact_and_all_others_packed(window: dict[str, Any], capacity: dict[str, Any]) -> None:
    """What a token reads is what eager attention gives over some such rows: as many as were asked for, and up to two blocks more."""
    model = make_model("Llama", num_hidden_layers=1)
    inputs, twin, given = prompts(2, sum(STEPS), (0, 5)), eager_twin(model), DynamicCache(config=model.config)
    found = logits_in_steps(model, inputs, KVQCache(model.config, "int2", **window, **capacity), STEPS)[:, -1]
    logits_in_steps(twin, inputs, given, STEPS)
    rows = given.layers[0].keys, given.layers[0].values
    packed, exact = (
        [through_mode(mode, x, is_value=bool(i)) for i, x in enumerate(rows)] for mode in ("int2", window.get("residual_mode", "none"))
    )
    real = inputs["attention_mask"].bool()
    position = real.cumsum(1) - 1
    newest, sinks = window.get("residual_length", 0), window.get("sink_tokens", 0)
    given.crop(-1)
    apart = []
    for more in range(32):
        for first in {sinks, -(-sinks // 16) * 16}:
            is_exact = (position < first) | (position > position[:, -1:] - newest - more)
            mixed = [torch.where(is_exact[:, None, :, None], one, other) for one, other in zip(exact, packed, strict=True)]
            given.layers[0].update = lambda *arguments, mixed=mixed, **options: mixed
            logits = twin(
                inputs["input_ids"][:, -1:], attention_mask=real.long(), position_ids=position[:, -1:], **{GENERATE: given}
            ).logits
            apart.append((logits[:, -1] - found).abs().amax(-1))
    assert bool((torch.stack(apart).amin(0) < 1e-4).all()), torch.stack(apart)


@pytest.mark.parametrize("window", [{"residual_length": 8}, SINKS | {"residual_mode": "int8"}], ids=str)
@torch.no_grad()
def test_rows_that_moved_are_read_as_before(window: dict[str, Any], capacity: dict[str, Any]) -> None:
    """Reordered, selected and cropped rows, and copies made in inference mode, give what a cache does that was given their text alone."""
    order = [2, 0, 2] if capacity else [2, 0, 2, 1]
    model, ids = make_model("Llama"), prompts(3, 64)["input_ids"]

    def told(ids: torch.Tensor, rows: list[int]) -> torch.Tensor:
        cache = KVQCache(model.config, "int2", **window, **capacity)
        with torch.inference_mode():
            for part in (ids[:, :30], *ids[:, 30:40].split(1, 1)):
                model(part, **{GENERATE: cache})
            cache.reorder_cache(torch.tensor(rows)) if capacity else cache.batch_select_indices(torch.tensor(rows))
            cache = pickle.loads(pickle.dumps(copy.copy(cache)))
        model(ids[rows, 40:44], **{GENERATE: cache})
        cache.crop(-3)
        return model(ids[rows, 41:42], **{GENERATE: cache}).logits

    # Batches of other sizes round differently, by some 1e-5; logits with another window are 1 to 5 apart.
    for row, found in zip(order, told(ids, order), strict=True):
        torch.testing.assert_close(found, told(ids[row : row + 1], [0])[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@torch.no_grad()
def test_all_rows_go_where_a_loaded_cache_is_mapped(device: str, capacity: dict[str, Any]) -> None:
    """A device is saved with no part of it, and what Python keeps account of stays where that is."""
    model, saved, inputs = make_model("Llama").to(device), io.BytesIO(), prompts(2, 41, (0, 5))
    cache = KVQCache(model, "int4", **SINKS, **capacity)
    model(inputs["input_ids"][:, :40].to(device), attention_mask=inputs["attention_mask"][:, :40].to(device), **{GENERATE: cache})
    with patch.object(Pages, "__getstate__", side_effect=AssertionError("pages that remember their device")):
        torch.save(cache, saved)
    saved.seek(0)
    loaded = torch.load(saved, map_location="cpu", weights_only=False)
    for layer, before in zip(loaded.layers, cache.layers, strict=True):
        assert {x.device for x in (layer.pages.caches.key_cache, *layer.pages.exact_tensors)} == {layer.device} == {torch.device("cpu")}
        for x, y in zip(layer.pages.exact_tensors, before.pages.exact_tensors, strict=True):
            assert torch.equal(x.view(torch.uint8), y.cpu().view(torch.uint8))
    saved.seek(0)
    again = torch.load(saved, map_location=device, weights_only=False)
    last = {"input_ids": inputs["input_ids"][:, 40:].to(device), "attention_mask": inputs["attention_mask"].to(device)}
    assert torch.equal(*(model(**last, **{GENERATE: one}).logits for one in (again, cache)))


def test_sinks_may_take_all_of_a_fixed_cache() -> None:
    model, inputs = make_model("Llama"), prompts(2, 20, (0, 5))
    cache = KVQCache(model, "int2", sink_tokens=4, max_cache_len=20, block_size=32)
    assert worst(logits_in_steps(model, inputs, cache, [9, 8, 1, 2]), whole_text(model, inputs), inputs["attention_mask"]) < 1e-3


@torch.no_grad()
def test_a_fixed_window_fills_again_after_a_long_roll_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a later token has overwritten is read packed, the new tokens but those of the first block exact, and then all of the window."""
    model, ids = make_model("Llama", num_hidden_layers=1), prompts(1, 80)["input_ids"]
    cache = KVQCache(model.config, "int2", residual_length=16, max_cache_len=80)
    model(ids[:, :70], **{GENERATE: cache})
    cache.crop(-60)
    firsts: list[int] = []
    plan = FixedWindow.plan

    def noting(window: Any, *arguments: Any, **options: Any) -> Any:
        planned = plan(window, *arguments, **options)
        firsts.append(int(planned.key_stops[0]))
        return planned

    monkeypatch.setattr(FixedWindow, "plan", noting)
    for column in range(10, 50):
        model(ids[:, column : column + 1], **{GENERATE: cache})
    assert firsts == [*range(11, 17), *[16] * 32, 32, 32]
