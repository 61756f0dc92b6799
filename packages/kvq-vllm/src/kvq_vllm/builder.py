"""What a step's batch looks like to kvq's read door."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

from kvq_core.errors import ArgumentError
from kvq_core.launch.warmup import rounded_query_len
from kvq_vllm.demands import demands_of, has_kernels, query_rows, warm_up_group
from kvq_vllm.refusals import WITHOUT_KVQ, check_group, check_windows
from kvq_vllm.settings import Settings
from kvq_vllm.sharing import share
from kvq_vllm.smoothing import check_smoothed, has_rotary_mean


@dataclass
class KVQMetadata:
    """A step's batch; the names are vLLM's. ``positions``: of its tokens, where a layer takes off a rotary mean."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: torch.Tensor
    max_seq_len: int
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor | None = None


class KVQMetadataBuilder(AttentionMetadataBuilder[KVQMetadata]):
    """A group of layers with the same kind of pages."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        check_group(kv_cache_spec, vllm_config)
        share(vllm_config)
        check_smoothed(vllm_config, layer_names)
        check_windows(vllm_config, layer_names)
        self._query_rows, self._longest = query_rows(vllm_config), vllm_config.model_config.max_model_len
        layers = [vllm_config.compilation_config.static_forward_context[name] for name in layer_names]
        warm_up_group(kv_cache_spec, [layer.impl for layer in layers], demands_of, vllm_config, device)
        self._positions: torch.Tensor | None = None
        if any(has_rotary_mean(layer) for layer in layers):
            most = max(vllm_config.scheduler_config.max_num_batched_tokens, vllm_config.compilation_config.max_cudagraph_capture_size or 0)
            # At one address, which captured graphs read.
            self._positions = torch.zeros(most, dtype=torch.int32, device=device)
            for layer in layers:
                layer.impl.positions = self._positions

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """A captured plan holds for all batches whose sequences have as many rows. Modes without kernels have nothing to capture."""
        mode = Settings.of(vllm_config).backend(str(vllm_config.cache_config.cache_dtype))
        return AttentionCGSupport.UNIFORM_BATCH if has_kernels(mode) else AttentionCGSupport.NEVER

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> KVQMetadata:
        batch = common_attn_metadata
        if batch.causal is not True:
            raise ArgumentError("causal", batch.causal, f"True: kvq attends causally; {WITHOUT_KVQ}")
        return KVQMetadata(
            num_actual_tokens=batch.num_actual_tokens,
            max_query_len=rounded_query_len(batch.max_query_len, batch.num_actual_tokens, batch.num_reqs, self._query_rows),
            query_start_loc=batch.query_start_loc,
            # As in a captured graph, so that no length brings another launch plan.
            max_seq_len=max(batch.max_seq_len, self._longest),
            seq_lens=batch.seq_lens,
            block_table=batch.block_table_tensor,
            slot_mapping=batch.slot_mapping,
            positions=self._positions_of(batch),
        )

    def _positions_of(self, batch: Any) -> torch.Tensor | None:
        """Each row's place among its sequence's keys. Graphs in pieces write rows of padding after the batch's: these have any."""
        if self._positions is None:
            return None
        ends = batch.query_start_loc[1:]
        row = torch.arange(batch.num_actual_tokens, dtype=ends.dtype, device=ends.device)
        sequence = torch.searchsorted(ends, row, right=True).clamp(max=len(ends) - 1)
        found = (row + (batch.seq_lens[: len(ends)] - ends)[sequence]).to(torch.int32)
        if len(found) > len(self._positions):
            return found
        self._positions[: len(found)] = found
        return self._positions

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> KVQMetadata:
        """Short sequences: what is captured depends on ``max_seq_len`` alone, and its rehearsals are over sooner."""
        metadata = self.build(0, common_attn_metadata)
        metadata.seq_lens.fill_(1)
        return metadata
