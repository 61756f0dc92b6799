"""One attention layer: from vLLM's two calls to kvq's two doors."""

from __future__ import annotations

from typing import Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionImpl

from kvq_core.cache.layout import LayerCaches
from kvq_core.errors import ArgumentError
from kvq_core.plan.invariance import set_batch_invariant
from kvq_core.residual.reads import PagedRead, attend
from kvq_core.smoothing.calibration import KeySmoothing
from kvq_vllm.builder import KVQMetadata
from kvq_vllm.demands import reserve_for
from kvq_vllm.pages import PageViews, content_bytes
from kvq_vllm.refusals import WITHOUT_KVQ, check_layer, check_named, head_size_reason
from kvq_vllm.residual import add_windows
from kvq_vllm.settings import current
from kvq_vllm.sharing import share
from kvq_vllm.smoothing import follow_weights, smooth_layers
from kvq_vllm.weights import listen


class KVQImpl(AttentionImpl[KVQMetadata]):
    """A layer's part in attention. Its pages come with each call: vLLM moves them when it sleeps, profiles and reloads."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        use_alibi_sqrt: bool = False,
        **options: Any,
    ) -> None:
        check_layer(attn_type, options)
        settings, config = current(), get_current_vllm_config_or_none()
        self.named = settings.kv_cache_dtype  # the option, beside which a skipped layer has "auto"
        if config is not None:
            check_named(self.named, config)
        self.kvq = settings.backend(kv_cache_dtype)
        unfit = head_size_reason(self.kvq.mode, head_size)
        if unfit is not None:
            raise ArgumentError("attention layer", f"heads of {head_size}", unfit)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        self.softcap, self.sinks = float(logits_soft_cap or 0), sinks
        self.alibi_slopes: torch.Tensor | None = None
        if alibi_slopes is not None:
            # Not where vLLM loads weights: of that memory its deepest sleep keeps parameters and buffers alone.
            self.alibi_slopes = torch.tensor(alibi_slopes, dtype=torch.float32, device="cpu")
        self.use_alibi_sqrt = use_alibi_sqrt
        self.smoothing: KeySmoothing | None = None
        # A file's name, or the layer whose weights say the smoothing, if any; ``None`` until one of them was asked.
        self.smoothed_by: Any = None
        self.positions: torch.Tensor | None = None
        self.residual: Any = None
        self._loaded = False
        self._views = PageViews(self.kvq, head_size)
        listen()
        if envs.VLLM_BATCH_INVARIANT:
            set_batch_invariant(True)

    def content_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one token of one head, K and V, for rows of ``dtype``."""
        return content_bytes(self.kvq, self.head_size, self.head_size, dtype)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """vLLM calls this before it measures how much memory is left for pages, and again after new weights."""
        config = get_current_vllm_config_or_none()
        if self._loaded:
            follow_weights(self)
        self._loaded = True
        if config is not None:
            smooth_layers(config, get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank())
            add_windows(config)
            share(config)
            reserve_for(self, config, act_dtype, config.device_config.device)

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Store the step's rows. ``slot_mapping`` may be shorter: the other rows are padding."""
        caches = self._caches(layer, kv_cache, key.dtype, value.shape[2])
        rotary = self.smoothing is not None and self.smoothing.rotary is not None
        self.kvq.reshape_and_cache(
            key,
            value,
            caches.key_cache,
            caches.value_cache,
            slot_mapping,
            k_scale_cache=caches.k_scale_cache,
            v_scale_cache=caches.v_scale_cache,
            smoothing=self.smoothing,
            positions=self._positions_of(layer) if rotary else None,
        )
        if self.residual is not None:
            slots: Any = get_forward_context().slot_mapping
            self.residual.write(key, value, slots[self.residual.layer_name])

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: KVQMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend over the pages, which hold the step's own rows already. Without metadata (memory profiling) there are no pages."""
        if self.alibi_slopes is not None and self.alibi_slopes.device != query.device:
            self.alibi_slopes = self.alibi_slopes.to(query.device)
        if attn_metadata is None:
            if self.residual is not None:
                # So that vLLM's memory profiling sees what the first of two reads takes.
                torch.empty(output.shape, dtype=torch.float32, device=output.device)
            return output.fill_(0)
        if output_scale is not None or output_block_scale is not None:
            raise ArgumentError("output_scale", "a fused quantization of the output", f"none: kvq offers no such fusion; {WITHOUT_KVQ}")
        batch, rows = attn_metadata, attn_metadata.num_actual_tokens
        caches = self._caches(layer, kv_cache, query.dtype, output.shape[2])
        packed: dict[str, Any] = {"seqused_k": batch.seq_lens, "max_seqlen_k": batch.max_seq_len, "block_table": batch.block_table}
        packed["smoothing"] = self.smoothing
        options: dict[str, Any] = {
            "cu_seqlens_q": batch.query_start_loc,
            "max_seqlen_q": batch.max_query_len,
            "softmax_scale": self.scale,
            "window_size": self.window,
            "softcap": self.softcap,
            "alibi_slopes": self.alibi_slopes,
            "use_alibi_sqrt": self.use_alibi_sqrt,
        }
        if self.residual is None:
            PagedRead(self.kvq, caches, packed | {"sinks": self.sinks})(query[:rows], output[:rows], **options)
            return output
        exact, older = self._metadata_of(self.residual), None
        if not exact.nothing_packed:
            older = self.residual.packed_read(exact, caches, packed)
        attend(query[:rows], output[:rows], self.residual.read(exact, query.dtype, self.sinks), older, **options)
        return output

    def _caches(self, layer: Any, kv_cache: torch.Tensor, dtype: torch.dtype, head_size_v: int) -> LayerCaches:
        """The layer's views of its pages, with its scales where these come with the checkpoint."""
        caches = self._views.over(kv_cache, dtype, head_size_v)
        if self.kvq.takes_scales:
            return LayerCaches(caches.key_cache, caches.value_cache, layer._k_scale, layer._v_scale)
        return caches

    def _positions_of(self, layer: Any) -> torch.Tensor | None:
        """Those of the step's rows and of any padding. Where vLLM captures graphs without a batch, they will be where the batches' are."""
        batch = self._metadata_of(layer)
        found: torch.Tensor | None = self.positions if batch is None else batch.positions
        return found

    @staticmethod
    def _metadata_of(layer: Any) -> Any:
        """The step's, as the builder of the layer's group made it; ``None`` outside of a step."""
        metadata: Any = get_forward_context().attn_metadata
        if isinstance(metadata, list):  # with drafts, the first is the served model's
            metadata = metadata[0]
        return metadata[layer.layer_name] if isinstance(metadata, dict) else metadata
