"""Pages: their size, which vLLM asks for in two ways, and a layer's caches over them."""

from __future__ import annotations

import math
import sys
import types
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kvq_core import get_backend, list_backends
from kvq_core.errors import ArgumentError
from kvq_core.registry import short_pairs
from kvq_vllm.names import VLLM_NAMES
from kvq_vllm.pages import PageViews, content_bytes

pytestmark = pytest.mark.quick
space = types.SimpleNamespace


def config(name: str, **section: Any) -> Any:
    """A vLLM config; ``section``: what ``--additional-config`` says of kvq."""
    cache, model = space(cache_dtype=name), space(dtype=torch.bfloat16)
    return space(cache_config=cache, model_config=model, additional_config={"kvq": section})


@dataclass(frozen=True)
class Spec:
    """vLLM's of a quantized layer, as far as kvq reads it."""

    head_size: int = 64
    kv_quant_mode: int = 4
    state_content_bytes: int | None = None


@pytest.mark.parametrize("name", VLLM_NAMES)
def test_pages_have_the_size_of_the_mode_that_a_name_carries(kvq_in_vllm: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In a vLLM that asks both for the size and for the shape (0.28)."""
    asked = sys.modules["vllm.v1.attention.backend"].AttentionBackend  # type: ignore[attr-defined]
    monkeypatch.setattr(asked, "customize_spec", lambda spec: spec, raising=False)
    backend, modes = kvq_in_vllm.backend.KVQBackend, [*(entry.mode for entry in list_backends()), *short_pairs()]
    for section in ({}, *({"mode": mode} for mode in modes if not get_backend(mode).takes_scales)):
        kvq_in_vllm.config[:] = [config(name, **section)]
        page = 16 * 2 * backend.customize_spec(Spec()).state_content_bytes
        assert math.prod(backend.get_kv_cache_shape(9, 16, 2, 64, name)) == 9 * page, section


@pytest.mark.parametrize(("mode", "fits"), [("int2", True), ("int4", True), ("int8", False)])
def test_pages_of_a_name_s_size_hold_modes_that_need_no_more(kvq_in_vllm: Any, mode: str, fits: bool) -> None:
    """In a vLLM that asks for the shape alone (0.26, 0.27)."""
    kvq_in_vllm.config[:] = [config("int4_per_token_head", mode=mode)]
    refusal = pytest.raises(ArgumentError, match="need a mode with at most 72 bytes a token and head, as int4_per_token_head")
    with nullcontext() if fits else refusal:
        assert kvq_in_vllm.backend.KVQBackend.get_kv_cache_shape(9, 16, 2, 64, "int4_per_token_head") == (9, 2, 16, 72)


def test_views_are_made_once_for_pages_that_stay() -> None:
    backend = get_backend("int4")
    memory = torch.zeros(3, 2, 16, content_bytes(backend, 64, 64, torch.bfloat16), dtype=torch.uint8)
    views = PageViews(backend, 64)
    first = views.over(memory, torch.bfloat16, 64)
    assert views.over(memory, torch.bfloat16, 64) is first and first.key_cache.data_ptr() == memory.data_ptr()
    for moved in (memory[1:], memory.clone(), memory[:2]):
        found = views.over(moved, torch.bfloat16, 64)
        assert found is not first and found.key_cache.data_ptr() == moved.data_ptr() and len(found.key_cache) == len(moved)
