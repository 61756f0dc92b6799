"""Caches under any order of events, with several live steps and with or without a residual window, against a plain model of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from cache_checks import MODES
from cache_model import Model
from kvq_core.cache.layout import LAYOUTS

KINDS = {
    "plain": st.fixed_dictionaries(
        {
            "mode": st.sampled_from([*MODES, "k8v4"]),
            "layout": st.sampled_from(LAYOUTS),
            "dtype": st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
            "num_blocks": st.sampled_from([6, 40]),
            "block_size": st.just(8),
        }
    ),
    "windowed": st.just({"sink_tokens": 20})
    | st.fixed_dictionaries(
        {
            "residual_length": st.integers(1, 100),
            "sink_tokens": st.sampled_from([0, 4, 20]),
            "residual_mode": st.sampled_from(["none", "none", "int8"]),
            "num_blocks": st.sampled_from([20, 300]),
        }
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_holds_what_its_model_holds(kind: str, device: torch.device, tmp_path: Path) -> None:
    """After every act. Not shrunk: that takes minutes, and the names of forty acts can be read."""

    @settings(phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.integers(0, 10**6), KINDS[kind])
    def holds(seed: int, options: dict[str, Any]) -> None:
        model = Model(device, seed, sequences=2, **options)
        for _ in range(12 if model.kernels else 40):
            model.act(tmp_path / "cache")
            model.check()
        if model.left is not None:
            model.left.check()
        for call in model.random.sample(model.live, len(model.live)):
            model.finish(call)
        for seq in model.texts:
            model.cache.free(seq)
        assert model.cache.num_free_blocks == model.cache.geometry.num_blocks
        assert model.cache._exact is None or model.cache._exact.table.end_block == 0

    holds()
