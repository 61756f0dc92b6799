"""Stand-ins for the modules of vLLM that the attention backend imports, so its parts can be asked without vLLM."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import kvq_vllm

PARTS = ("weights", "demands", "builder", "impl", "backend", "sink_window", "residual")
"""Modules of kvq-vllm that import vLLM, or one that does."""


@dataclass(frozen=True)
class MultipleOf:
    base: int


class AttentionBackend:
    """As far as vLLM's own tells of block sizes, in all versions."""

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        sizes = cls.get_supported_kernel_block_sizes()  # type: ignore[attr-defined]
        return block_size is None or any(block_size % getattr(size, "base", size) == 0 for size in sizes)

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


@pytest.fixture
def kvq_in_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """kvq-vllm's modules by name, over stand-ins; ``config``: what vLLM's current config is, in a list of one."""
    config: list[Any] = [None]

    def add(name: str, **members: Any) -> None:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            full = ".".join(parts[:end])
            if full not in added:
                added[full] = types.ModuleType(full)
                monkeypatch.setitem(sys.modules, full, added[full])
        vars(added[name]).update(members)

    added: dict[str, types.ModuleType] = {}
    add("vllm", envs=types.SimpleNamespace(VLLM_BATCH_INVARIANT=False))
    add("vllm.config", get_current_vllm_config_or_none=lambda: config[0])
    add("vllm.distributed", get_tensor_model_parallel_rank=lambda: 0, get_tensor_model_parallel_world_size=lambda: 1)
    add("vllm.forward_context", get_forward_context=None)
    support = types.SimpleNamespace(UNIFORM_BATCH="uniform", NEVER="never")
    generic = {name: type(name, (Generic,), {}) for name in ("AttentionImpl", "AttentionMetadataBuilder")}
    add("vllm.v1.attention.backend", AttentionBackend=AttentionBackend, MultipleOf=MultipleOf, AttentionCGSupport=support, **generic)
    add("vllm.model_executor.layers.attention_layer_base", AttentionLayerBase=object)
    add("vllm.model_executor.layers.linear", QKVParallelLinear=QKVParallelLinear)
    add("vllm.model_executor.layers.rotary_embedding.base", RotaryEmbedding=RotaryEmbedding)
    add("vllm.model_executor.models.utils", extract_layer_index=lambda name: int(next(part for part in name.split(".") if part.isdigit())))
    add("vllm.v1.core.kv_cache_utils", resolve_block_hashes=None)
    add("vllm.v1.core.single_type_kv_cache_manager", SlidingWindowManager=object)
    add("vllm.v1.kv_cache_interface", SlidingWindowSpec=object)
    registry = types.SimpleNamespace(check_kv_cache_spec_registry=lambda specs: None, register=lambda spec, manager: None)
    add("vllm.v1.kv_cache_spec_registry", KVCacheSpecRegistry=registry)
    for name in PARTS:
        monkeypatch.delitem(sys.modules, f"kvq_vllm.{name}", raising=False)
    yield types.SimpleNamespace(config=config, **{name: importlib.import_module(f"kvq_vllm.{name}") for name in PARTS})
    for name in PARTS:
        del sys.modules[f"kvq_vllm.{name}"]
        delattr(kvq_vllm, name)
