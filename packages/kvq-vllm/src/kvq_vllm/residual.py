"""Residual windows: beside a packed layer a layer of exact rows, whose pages vLLM allocates, frees and caches as a sliding window's.

A step of a sequence with c tokens before it reads, for all of its query rows,

==============  =======================================================================================================
exact rows      keys from block ``max(c - residual_length, 0) // block_size`` on, in blocks of the window's pages
packed rows     the keys before
==============  =======================================================================================================

so the step's own tokens are always exact. Both reads return log-sum-exps, by which they are combined.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from kvq_core.cache.layout import LayerCaches
from kvq_core.errors import ArgumentError
from kvq_core.registry import get_backend
from kvq_core.residual.reads import PagedRead
from kvq_vllm.backend import KVQBackend
from kvq_vllm.demands import blocks_read, longest_decode, longest_prefill, warm_up_group, window_demand_of
from kvq_vllm.pages import content_bytes, layer_views
from kvq_vllm.refusals import check_residual
from kvq_vllm.settings import RESIDUAL, Settings, smallest_window_block

SUFFIX: Final = ".residual_window"
"""Of the names of layers of exact rows."""


@dataclass
class ResidualMetadata:
    """A step's batch, as the exact read takes it; ``key_stops`` [num_seqs] int32: where the packed read ends.

    ``nothing_packed``: no sequence has keys before its exact rows.
    """

    block_table: torch.Tensor
    seqused_k: torch.Tensor
    key_stops: torch.Tensor
    max_seqlen_k: int
    nothing_packed: bool


class ResidualLayer(AttentionLayerBase):
    """The exact rows of ``layer``'s newest tokens. vLLM binds ``kv_cache``."""

    def __init__(self, name: str, layer: Any) -> None:
        self.layer_name, self.kv_cache = name, torch.empty(0)
        self._layer = layer
        self._none = get_backend("none")
        self._views: tuple[tuple[object, ...], LayerCaches] | None = None

    @property
    def packed(self) -> Any:
        """The part in attention of the layer with the packed rows."""
        return self._layer.impl

    def get_attn_backend(self) -> type[AttentionBackend]:
        return ResidualBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> SlidingWindowSpec:
        """Blocks as large as fit a page of the packed layer."""
        check_residual(vllm_config)
        spec = self._layer.get_kv_cache_spec(vllm_config)
        if hasattr(AttentionBackend, "customize_spec"):  # 0.27 and later
            spec = KVQBackend.customize_spec(spec)
        impl, dtype = self.packed, vllm_config.model_config.dtype
        token_bytes = impl.num_kv_heads * content_bytes(self._none, impl.head_size, impl.head_size, dtype)
        fitting = spec.page_size_bytes // token_bytes
        if fitting < 16:
            need = f"at least {smallest_window_block(Settings.of(vllm_config), impl.head_size)}: a page holds 16 exact tokens of {RESIDUAL}"
            raise ArgumentError("--block-size", spec.block_size, need)
        block_size = min(1 << (fitting.bit_length() - 1), spec.block_size)
        return SlidingWindowSpec(
            block_size=block_size,
            num_kv_heads=impl.num_kv_heads,
            head_size=impl.head_size,
            dtype=dtype,
            page_size_padded=spec.page_size_bytes,
            # vLLM keeps the blocks of this many tokens, the next one among them.
            sliding_window=Settings.of(vllm_config).residual_length + 1,
        )

    def write(self, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store a step's rows."""
        caches = self._caches(key.dtype)
        self._none.reshape_and_cache(key, value, caches.key_cache, caches.value_cache, slot_mapping)

    def read(self, batch: ResidualMetadata, dtype: torch.dtype, sinks: torch.Tensor | None) -> PagedRead:
        """Of a step's exact keys, and of the layer's ``sinks``."""
        keys = {"seqused_k": batch.seqused_k, "max_seqlen_k": batch.max_seqlen_k, "block_table": batch.block_table}
        return PagedRead(self._none, self._caches(dtype), keys | {"sinks": sinks})

    def _caches(self, dtype: torch.dtype) -> LayerCaches:
        """Views of the pages."""
        cache, size = self.kv_cache, self.packed.head_size
        key = (cache.data_ptr(), cache.shape, cache.stride(), dtype)
        if self._views is None or self._views[0] != key:
            self._views = key, layer_views(self._none, cache, size, size, dtype)
        return self._views[1]


class ResidualBuilder(AttentionMetadataBuilder[ResidualMetadata]):
    """Of the layers of exact rows."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._block_size, self._length = kv_cache_spec.block_size, kv_cache_spec.sliding_window - 1
        scheduler = vllm_config.scheduler_config
        self._few_rows = longest_decode(vllm_config)
        longest = longest_prefill(vllm_config)
        self._few, self._many = (blocks_read(self._length, self._block_size, rows) for rows in (self._few_rows, longest))
        # At one address, which captured graphs read.
        self._table = torch.zeros(scheduler.max_num_seqs, self._few, dtype=torch.int32, device=device)
        self._used, self._stops = (torch.zeros(scheduler.max_num_seqs, dtype=torch.int32, device=device) for _ in range(2))
        layers = [vllm_config.compilation_config.static_forward_context[name] for name in layer_names]
        warm_up_group(kv_cache_spec, [layer.packed for layer in layers], window_demand_of, vllm_config, device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        return AttentionCGSupport.UNIFORM_BATCH

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> ResidualMetadata:
        batch, size = common_attn_metadata, self._block_size
        starts, lengths = batch.query_start_loc, batch.seq_lens
        count = len(starts) - 1
        before = lengths[:count] - (starts[1:] - starts[:-1])
        first = (before - self._length).clamp(min=0) // size
        few = batch.max_query_len <= self._few_rows and count <= len(self._table)
        width = self._few if few else self._many
        index = first[:, None] + torch.arange(width, dtype=first.dtype, device=first.device)
        table = batch.block_table_tensor[:count].gather(1, index.clamp(max=batch.block_table_tensor.shape[1] - 1).long())
        used, stops = lengths[:count] - first * size, first * size
        if few:
            table, used, stops = (_into(kept, found) for kept, found in zip(self._kept, (table, used, stops), strict=True))
        # One sequence without a past: its length is known here, too.
        alone = count == 1 and batch.max_seq_len == batch.max_query_len and not few
        return ResidualMetadata(table, used, stops, width * size, alone)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> ResidualMetadata:
        """Of sequences of one token, as the packed layers' are then."""
        metadata = self.build(0, common_attn_metadata)
        metadata.seqused_k.fill_(1)
        metadata.key_stops.fill_(0)
        return metadata

    @property
    def _kept(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._table, self._used, self._stops


class ResidualBackend(KVQBackend):
    """What vLLM asks about layers of exact rows."""

    @staticmethod
    def get_builder_cls() -> type[ResidualBuilder]:
        return ResidualBuilder


def add_windows(config: Any) -> None:
    """Give every quantized layer of ``config`` that has none yet its layer of exact rows, if the configuration asks for one."""
    settings = Settings.of(config)
    layers = config.compilation_config.static_forward_context
    if not settings.residual_length:
        return
    packed = {name: layer for name, layer in layers.items() if _is_packed(layer)}
    for name, layer in packed.items():
        if layer.impl.residual is None and layer.impl.kv_sharing_target_layer_name is None:
            layer.impl.residual = layers[name + SUFFIX] = ResidualLayer(name + SUFFIX, layer)
    for layer in packed.values():
        if layer.impl.kv_sharing_target_layer_name is not None:
            layer.impl.residual = layers[layer.impl.kv_sharing_target_layer_name].impl.residual


def _is_packed(layer: Any) -> bool:
    kvq: Any = getattr(getattr(layer, "impl", None), "kvq", None)
    return kvq is not None and kvq.mode != "none"


def _into(kept: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    part = kept[: len(found)]
    part.copy_(found)
    return part
