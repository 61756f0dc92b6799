"""Residual windows: beside a packed layer a layer of exact rows, whose pages vLLM allocates, frees and caches as a sliding window's.

A step of a sequence with c tokens before it reads, for all of its query rows,

==============  =======================================================================================================
exact rows      the first ``sink_tokens`` keys, and those from block ``max(c - residual_length, 0) // block_size`` on, in blocks of
                the window's pages
packed rows     the keys between
==============  =======================================================================================================

so the step's own tokens are always exact. ``sink_tokens`` is what the configuration says, rounded up to whole blocks of both kinds of
pages. Both reads return log-sum-exps, by which they are combined.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadataBuilder, MultipleOf
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from kvq_core.cache.layout import LayerCaches
from kvq_core.errors import ArgumentError
from kvq_core.registry import get_backend
from kvq_core.residual.reads import PagedRead
from kvq_vllm.demands import longest_decode, longest_prefill, warm_up_group, window_demands_of
from kvq_vllm.page_backend import PageBackend, asks_for_sizes
from kvq_vllm.pages import PageViews, content_bytes
from kvq_vllm.refusals import check_block_of_window, check_residual, check_sinks
from kvq_vllm.settings import RESIDUAL, SINKS, Settings, smallest_block, smallest_window_block
from kvq_vllm.sharing import target_of
from kvq_vllm.sink_window import SinkWindowSpec
from kvq_vllm.window import WindowShape, WindowStep, blocks_read, window_step

_LOG = logging.getLogger("vllm.kvq")
SUFFIX: Final = ".residual_window"
"""Of the names of layers of exact rows."""


@dataclass
class ResidualMetadata:
    """A step's batch, as the exact read takes it.

    ``packed``: options of the packed read, each [num_seqs] int32, beside or in place of those of a read of all keys.
    ``nothing_packed``: no sequence has keys for it.
    """

    block_table: torch.Tensor
    seqused_k: torch.Tensor
    packed: dict[str, torch.Tensor]
    max_seqlen_k: int
    nothing_packed: bool


class ResidualLayer(AttentionLayerBase):
    """The exact rows of ``layer``'s newest tokens, and of its first ``sink_tokens``, whole blocks, which :meth:`get_kv_cache_spec` sets.

    vLLM binds ``kv_cache``.
    """

    def __init__(self, name: str, layer: Any) -> None:
        self.layer_name, self.kv_cache = name, torch.empty(0)
        self._layer, self.sink_tokens = layer, 0
        self._none = get_backend("none")
        self._views = PageViews(self._none, layer.impl.head_size)

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
        if asks_for_sizes():
            spec = PageBackend.customize_spec(spec)
        impl, dtype, settings = self.packed, vllm_config.model_config.dtype, Settings.of(vllm_config)
        token_bytes = impl.num_kv_heads * content_bytes(self._none, impl.head_size, impl.head_size, dtype)
        fitting = spec.page_size_bytes // token_bytes
        if fitting < 16:
            check_block_of_window(settings, spec.block_size, vllm_config.cache_config.block_size)
            need = f"at least {smallest_window_block(settings, impl.head_size)}: a page holds 16 exact tokens of {RESIDUAL} or {SINKS}"
            raise ArgumentError("--block-size", spec.block_size, need)
        block_size = min(1 << (fitting.bit_length() - 1), spec.block_size)
        options: dict[str, Any] = {
            "block_size": block_size,
            "num_kv_heads": impl.num_kv_heads,
            "head_size": impl.head_size,
            "dtype": dtype,
            "page_size_padded": spec.page_size_bytes,
            # vLLM keeps the blocks of this many tokens, the next one among them, and caches none for 1.
            "sliding_window": max(settings.residual_length, 1) + 1,
        }
        if not settings.sink_tokens:
            return SlidingWindowSpec(**options)
        whole = math.lcm(block_size, spec.block_size)
        self.sink_tokens = -(-settings.sink_tokens // whole) * whole
        check_sinks(impl, self.sink_tokens, vllm_config)
        return SinkWindowSpec(**options, sink_tokens=self.sink_tokens)

    def sink_blocks(self, block_size: int) -> int:
        """How many blocks of ``block_size`` the sinks fill."""
        if self.sink_tokens % block_size:
            need = f"one that {self.sink_tokens} is a multiple of, which {SINKS} is in the blocks that vLLM asked for before"
            raise ArgumentError("block_size", block_size, need)
        return self.sink_tokens // block_size

    def write(self, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store a step's rows."""
        caches = self._caches(key.dtype)
        self._none.reshape_and_cache(key, value, caches.key_cache, caches.value_cache, slot_mapping)

    def read(self, batch: ResidualMetadata, dtype: torch.dtype, sinks: torch.Tensor | None) -> PagedRead:
        """Of a step's exact keys, and of the layer's ``sinks``."""
        keys = {"seqused_k": batch.seqused_k, "max_seqlen_k": batch.max_seqlen_k, "block_table": batch.block_table}
        return PagedRead(self._none, self._caches(dtype), keys | {"sinks": sinks})

    def packed_read(self, batch: ResidualMetadata, caches: LayerCaches, options: dict[str, Any]) -> PagedRead:
        """Of the keys between sinks and window in the packed layer's ``caches``; ``options``: of a read of all keys."""
        first = self.sink_blocks(caches.key_cache.shape[1])
        return PagedRead(self.packed.kvq, caches, options | batch.packed | {"block_table": options["block_table"][:, first:]})

    def _caches(self, dtype: torch.dtype) -> LayerCaches:
        """Views of the pages."""
        return self._views.over(self.kv_cache, dtype, self.packed.head_size)


class ResidualBuilder(AttentionMetadataBuilder[ResidualMetadata]):
    """Of the layers of exact rows."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = [vllm_config.compilation_config.static_forward_context[name] for name in layer_names]
        size, length = kv_cache_spec.block_size, Settings.of(vllm_config).residual_length
        sinks = layers[0].sink_blocks(size)
        self._shape = WindowShape(size, length, layers[0].sink_tokens)
        self._few_rows = longest_decode(vllm_config)
        rows = (self._few_rows, longest_prefill(vllm_config))
        self._few, self._many = (sinks + blocks_read(length, size, most) for most in rows)
        # At one address, which captured graphs read.
        count = vllm_config.scheduler_config.max_num_seqs
        self._table = torch.zeros(count, self._few, dtype=torch.int32, device=device)
        self._seqused_k = torch.zeros(count, dtype=torch.int32, device=device)
        self._packed = {name: torch.zeros_like(self._seqused_k) for name in ("key_stops", "seqused_k", "first_positions")}
        if sinks:
            _LOG.info("kvq: a sequence's first %d tokens, in whole blocks, and its newest %d are exact", self._shape.sink_tokens, length)
        warm_up_group(kv_cache_spec, [layer.packed for layer in layers], window_demands_of, vllm_config, device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        return AttentionCGSupport.UNIFORM_BATCH

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> ResidualMetadata:
        batch = common_attn_metadata
        starts = batch.query_start_loc
        count = len(starts) - 1
        few = batch.max_query_len <= self._few_rows and count <= len(self._table)
        width = self._few if few else self._many
        step = window_step(self._shape, starts, batch.seq_lens, batch.block_table_tensor, width)
        if few:
            packed = {name: _into(self._packed[name], found) for name, found in step.packed.items()}
            step = WindowStep(_into(self._table, step.table), _into(self._seqused_k, step.seqused_k), packed)
        # One sequence without a past: its length is known here, too.
        alone = count == 1 and batch.max_seq_len == batch.max_query_len and not few
        return ResidualMetadata(step.table, step.seqused_k, step.packed, width * self._shape.block_size, alone)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> ResidualMetadata:
        """Of sequences of one token, as the packed layers' are then."""
        metadata = self.build(0, common_attn_metadata)
        metadata.seqused_k.fill_(1)
        metadata.packed["key_stops"].fill_(0)
        return metadata


class ResidualBackend(PageBackend):
    """What vLLM asks about layers of exact rows."""

    @staticmethod
    def get_builder_cls() -> type[ResidualBuilder]:
        return ResidualBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Any multiple of 16; the other one is there to be found.

        Where the user asks for none, vLLM takes the least common multiple of one size of each backend that all of them support (0.32 and
        later; until then it asks the first layer's backend).
        """
        return [MultipleOf(16), MultipleOf(smallest_block())]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Of packed layers: whether their pages hold 16 exact rows."""
        supported: bool = super().supports_block_size(block_size)
        return supported and (block_size is None or block_size >= smallest_block())


def add_windows(config: Any) -> None:
    """Give every quantized layer of ``config`` with pages of its own its layer of exact rows, if the configuration asks for one."""
    settings = Settings.of(config)
    layers = config.compilation_config.static_forward_context
    if not settings.keeps_exact_rows:
        return
    packed = {name: layer for name, layer in layers.items() if _is_packed(layer) and target_of(layer) is None}
    for name, layer in packed.items():
        if layer.impl.residual is None:
            layer.impl.residual = layers[name + SUFFIX] = ResidualLayer(name + SUFFIX, layer)


def _is_packed(layer: Any) -> bool:
    kvq: Any = getattr(getattr(layer, "impl", None), "kvq", None)
    return kvq is not None and kvq.mode != "none"


def _into(kept: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    part = kept[: len(found)]
    part.copy_(found)
    return part
