"""KVQCache with a residual window: the keys that a row reads exact, in models of each kind."""

import copy
import pickle
from typing import Any

import pytest
import torch

from kvq_core.testing import places
from kvq_transformers import KVQCache
from kvq_transformers.fixed_window import FixedWindow
from kvq_transformers.naming import GENERATE
from transformers_families import logits_in_steps, make_model, prompts
from transformers_watch import Watch

STEPS = [19, 40, 1, 1, 3, 1]
"""A prompt, a chunk that is longer than the windows below, single tokens and drafts."""
SINKS: dict[str, Any] = {"residual_length": 16, "sink_tokens": 20}
INT8_ROWS: dict[str, Any] = {"residual_length": 8, "residual_mode": "int8"}


@pytest.fixture(autouse=True)
def torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed windows note their last plan."""
    places.enter("eager", monkeypatch)
    plan = FixedWindow.plan

    def remembered(window: Any, *arguments: Any, **options: Any) -> Any:
        window.last = plan(window, *arguments, **options)
        return window.last

    monkeypatch.setattr(FixedWindow, "plan", remembered)


WINDOWS: list[tuple[str, str, dict[str, Any]]] = [
    ("Llama", "int2", {"residual_length": 8}),
    ("Llama", "int8", {"sink_tokens": 4}),
    ("Llama", "int2", SINKS | {"residual_mode": "int8"}),
    ("Qwen3Next", "int2", SINKS),
    ("Gemma2", "int2", INT8_ROWS),
]


@pytest.mark.parametrize(("family", "mode", "window"), WINDOWS, ids=str)
def test_attends_over_exact_and_packed_rows(family: str, mode: str, window: dict[str, Any], capacity: dict[str, Any], watch: Watch) -> None:
    """Against float64 attention over just those rows, with padding in front of one row and within another."""
    model, inputs = make_model(family), prompts(2, sum(STEPS), (0, 5))
    cache = KVQCache(model.config, mode, **window, **capacity)
    logits_in_steps(model, inputs, cache, STEPS)
    assert watch.calls == len(STEPS) * len(cache.modes)
    assert 0 < watch.worst <= 1


@pytest.mark.parametrize("window", [{"residual_length": 8}, SINKS | {"residual_mode": "int8"}], ids=str)
@torch.no_grad()
def test_rows_that_moved_are_read_as_before(window: dict[str, Any], capacity: dict[str, Any]) -> None:
    """Reordered, copied, selected and cropped rows give what a cache does that was given their text alone."""
    order = [2, 0, 2] if capacity else [2, 0, 2, 1]
    model, ids = make_model("Llama"), prompts(3, 64)["input_ids"]

    def told(ids: torch.Tensor, rows: list[int]) -> torch.Tensor:
        cache = KVQCache(model.config, "int2", **window, **capacity)
        for part in (ids[:, :30], *ids[:, 30:40].split(1, 1)):
            model(part, **{GENERATE: cache})
        cache.reorder_cache(torch.tensor(rows)) if capacity else cache.batch_select_indices(torch.tensor(rows))
        cache = pickle.loads(pickle.dumps(copy.copy(cache)))
        model(ids[rows, 40:44], **{GENERATE: cache})
        cache.crop(-3)
        return model(ids[rows, 41:42], **{GENERATE: cache}).logits

    for row, found in zip(order, told(ids, order), strict=True):
        torch.testing.assert_close(found, told(ids[row : row + 1], [0])[0], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_fixed_window_fills_again_after_a_long_roll_back() -> None:
    """What a later token has overwritten is read packed, the new tokens but those of the first block exact, and then all of the window."""
    model, ids = make_model("Llama", num_hidden_layers=1), prompts(1, 80)["input_ids"]
    cache = KVQCache(model.config, "int2", residual_length=16, max_cache_len=80)
    model(ids[:, :70], **{GENERATE: cache})
    cache.crop(-60)
    firsts = []
    for column in range(10, 50):
        model(ids[:, column : column + 1], **{GENERATE: cache})
        firsts.append(int(cache.layers[0].exact.last.key_stops[0]))
    assert firsts == [*range(11, 17), *[16] * 32, 32, 32]
