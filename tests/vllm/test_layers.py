"""Layers, their backends and their builders, over stand-ins for what vLLM gives them: real engines are checked by ``.ci/vllm``."""

from __future__ import annotations

import itertools
import math
import types
from typing import Any

import pytest
import torch

from kvq_core.testing import places

pytestmark = pytest.mark.quick
space = types.SimpleNamespace


@pytest.fixture(autouse=True)
def torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    places.enter("eager", monkeypatch)


def config(dtype: str, **section: Any) -> Any:
    """A vLLM config without layers; ``section``: what ``--additional-config`` says of kvq."""
    return space(
        cache_config=space(cache_dtype=dtype),
        model_config=space(dtype=torch.bfloat16, get_head_size=lambda: 128),
        additional_config={"kvq": section},
        compilation_config=space(static_forward_context={}),
        device_config=space(device=torch.device("cpu")),
    )


# -- block sizes ----------------------------------------------------------------------------------------------------------


def chosen(backends: list[Any], default: int) -> int:
    """The block size that vLLM takes where the user asks for none: until 0.31 that of the first backend, later one that fits all."""
    if len(backends) == 1:
        return int(backends[0].get_preferred_block_size(default))
    if all(backend.supports_block_size(default) for backend in backends):
        return default
    sizes = [[size.base for size in backend.get_supported_kernel_block_sizes()] for backend in backends]
    candidates = sorted({math.lcm(*each) for each in itertools.product(*sizes)})
    return next(size for size in candidates if all(backend.supports_block_size(size) for backend in backends))


@pytest.mark.parametrize(("dtype", "size"), [("int8_per_token_head", 32), ("int4_per_token_head", 64), ("kvq_int2", 128)])
def test_every_vllm_finds_blocks_that_a_window_fits(kvq_in_vllm: Any, dtype: str, size: int) -> None:
    packed, exact = kvq_in_vllm.backend.KVQBackend, kvq_in_vllm.residual.ResidualBackend
    kvq_in_vllm.config[:] = [config(dtype, residual_length=64)]
    assert chosen([packed], 16) == chosen([packed, exact], 16) == chosen([exact, packed], 16) == size
    assert chosen([packed, exact], 128) == 128
    # A size that the user asks for, and the exact rows' own blocks.
    assert packed.supports_block_size(size + 16) and exact.supports_block_size(size + 16)
    assert {size.base for size in exact.get_supported_kernel_block_sizes(None)} >= {16}
    kvq_in_vllm.config[:] = [config(dtype)]
    assert chosen([packed], 16) == 16
