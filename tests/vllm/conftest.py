"""Stand-ins for the modules of vLLM that the attention backend imports, so its parts can be asked without vLLM."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import kvq_vllm
from kvq_core.testing import places

PARTS = ("weights", "demands", "builder", "page_backend", "sink_window", "residual", "impl", "backend")
"""Modules of kvq-vllm that import vLLM, or one that does."""
space = types.SimpleNamespace


@dataclass(frozen=True)
class MultipleOf:
    base: int


class AttentionBackend:
    """As far as vLLM's own tells of block sizes, in all versions."""

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        sizes = cls.get_supported_kernel_block_sizes()  # type: ignore[attr-defined]
        return block_size is None or any(block_size % size.base == 0 for size in sizes)

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return default_block_size


class Generic:
    """What kvq derives from and subscripts."""

    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    def __init__(self, *args: Any) -> None:
        pass


class QKVParallelLinear(torch.nn.Module):
    """Of ``bias`` [q|k|v] in any order, which ``quant_method`` adds to the channels that it belongs to."""

    tp_rank, input_size_per_partition, params_dtype = 0, 8, torch.float32

    def __init__(self, num_heads: int, num_kv_heads: int, head_size: int, bias: torch.Tensor | None, quant_method: Any) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.bias, self.quant_method = None if bias is None else torch.nn.Parameter(bias, requires_grad=False), quant_method


class RotaryEmbedding(torch.nn.Module):
    """Of all channels of a head, in halves."""

    is_neox_style = True

    def __init__(self, head_size: int) -> None:
        super().__init__()
        self.rotary_dim = head_size

    def _compute_cos_sin_cache(self) -> torch.Tensor:
        angles = torch.arange(512.0)[:, None] * 1e4 ** -(torch.arange(self.rotary_dim / 2) * 2 / self.rotary_dim)
        return torch.cat((angles.cos(), angles.sin()), 1)


@pytest.fixture(autouse=True)
def torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    places.enter("eager", monkeypatch)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[..., types.ModuleType]:
    """``stand_in(name, **members)``: in place of the module ``vllm.name``."""

    def add(name: str, **members: Any) -> types.ModuleType:
        full = f"vllm.{name}"
        for end, letter in enumerate(f"{full}."):
            if letter == ".":
                monkeypatch.setitem(sys.modules, full[:end], added.setdefault(full[:end], types.ModuleType(full[:end])))
        vars(added[full]).update(members)
        return added[full]

    added: dict[str, types.ModuleType] = {}
    return add


@pytest.fixture
def kvq_in_vllm(stand_in: Callable[..., types.ModuleType], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """kvq-vllm's modules by name, over stand-ins; ``config``: what vLLM's current config is, in a list of one."""
    config: list[Any] = [None]
    stand_in("config", get_current_vllm_config_or_none=lambda: config[0])
    stand_in("distributed", get_tensor_model_parallel_rank=lambda: 0, get_tensor_model_parallel_world_size=lambda: 1)
    stand_in("forward_context", get_forward_context=None)
    sys.modules["vllm"].envs = space(VLLM_BATCH_INVARIANT=False)  # type: ignore[attr-defined]
    support = space(UNIFORM_BATCH="uniform", NEVER="never")
    generic = {name: type(name, (Generic,), {}) for name in ("AttentionImpl", "AttentionMetadataBuilder")}
    stand_in("v1.attention.backend", AttentionBackend=AttentionBackend, MultipleOf=MultipleOf, AttentionCGSupport=support, **generic)
    stand_in("model_executor.layers.attention_layer_base", AttentionLayerBase=object)
    stand_in("model_executor.layers.linear", QKVParallelLinear=QKVParallelLinear)
    stand_in("model_executor.layers.rotary_embedding.base", RotaryEmbedding=RotaryEmbedding)
    stand_in("model_executor.models.utils", extract_layer_index=lambda name: int(next(filter(str.isdigit, name.split(".")))))
    stand_in("v1.core.kv_cache_utils", resolve_block_hashes=None)
    stand_in("v1.core.single_type_kv_cache_manager", SlidingWindowManager=object)
    stand_in("v1.kv_cache_interface", SlidingWindowSpec=object)
    registry = space(check_kv_cache_spec_registry=lambda specs: None, register=lambda spec, manager: None)
    stand_in("v1.kv_cache_spec_registry", KVCacheSpecRegistry=registry)
    for name in PARTS:
        monkeypatch.delitem(sys.modules, f"kvq_vllm.{name}", raising=False)
    yield space(config=config, **{name: importlib.import_module(f"kvq_vllm.{name}") for name in PARTS})
    for name in PARTS:
        del sys.modules[f"kvq_vllm.{name}"]
        delattr(kvq_vllm, name)
