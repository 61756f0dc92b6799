"""What a vLLM configuration can ask of kvq's kernels: compiled, and its workspace reserved, before the first request."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from kvq_core.backend import QuantKVBackend
from kvq_core.cache.layout import LayerCaches
from kvq_core.environment import kernels_of
from kvq_core.launch.warmup import Demand, places_of, reserve_workspace, warm_up
from kvq_vllm.pages import layer_views

_LOG = logging.getLogger("vllm.kvq")


def query_rows(config: Any) -> tuple[int, ...]:
    """Rows that all sequences of a step have in which every one decodes: 1, and 1 + the number of drafts."""
    speculative = getattr(config, "speculative_config", None)
    drafts = 0 if speculative is None else speculative.num_speculative_tokens or 0
    return (1, 1 + drafts) if drafts else (1,)


def has_kernels(backend: QuantKVBackend) -> bool:
    """Whether both doors are kernels on a GPU. What a mode without them does there depends on values, and cannot be planned or captured."""
    return kernels_of(backend) == {"write", "read"}


def demand_of(impl: Any, config: Any, num_blocks: int, block_size: int, dtype: torch.dtype, page_bytes: int = 0) -> Demand:
    """Of a layer, over that many blocks of pages in vLLM's head-major order. ``page_bytes``: a page's, its padding included."""
    content = impl.content_bytes(dtype)
    inner = impl.num_kv_heads * block_size * content
    strides = (max(page_bytes, inner), block_size * content, content, 1)
    shape = (num_blocks, impl.num_kv_heads, block_size, content)
    size = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    pages = torch.empty(size, dtype=torch.uint8, device="meta").as_strided(shape, strides)
    caches = layer_views(impl.kvq, pages, impl.head_size, impl.head_size, dtype)
    if impl.kvq.takes_scales:
        scale = torch.empty((), device="meta")
        caches = LayerCaches(caches.key_cache, caches.value_cache, scale, scale)
    scheduler = config.scheduler_config
    return Demand(
        mode=impl.kvq.mode,
        num_query_heads=impl.num_heads,
        head_size=impl.head_size,
        head_size_v=impl.head_size,
        dtype=dtype,
        places=places_of(caches),
        max_num_seqs=scheduler.max_num_seqs,
        max_num_tokens=scheduler.max_num_batched_tokens,
        max_seqlen_k=config.model_config.max_model_len,
        query_rows=query_rows(config),
        window=impl.window[0],
        softcap=impl.softcap,
        sinks=None if impl.sinks is None else impl.sinks.dtype,
        slopes=impl.alibi_slopes is not None,
        sqrt=impl.use_alibi_sqrt,
        smoothed=impl.smoothing is not None,
        balanced=impl.smoothing is not None and impl.smoothing.balance is not None,
        rotary_pairs=0 if impl.smoothing is None or impl.smoothing.rotary is None else impl.smoothing.rotary.steps.shape[1],
    )


def reserve_for(impl: Any, config: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Reserve a layer's workspace, so that vLLM's memory profiling sees it."""
    # Micro-batches overlap on two streams, which must not share a workspace.
    if device.type != "cuda" or getattr(config.parallel_config, "enable_dbo", False) or not has_kernels(impl.kvq):
        return
    demand = demand_of(impl, config, 1, 16, dtype)
    if demand not in _RESERVED:
        _RESERVED.add(demand)
        reserve_workspace([demand], device)


_RESERVED: set[Demand] = set()
_WARM: set[Demand] = set()


def warm_up_group(kv_cache_spec: Any, layer_names: list[str], config: Any, device: torch.device) -> None:
    """Compile what a group's layers can need, once vLLM knows how many blocks they have."""
    if device.type != "cuda" or not config.cache_config.num_gpu_blocks:
        return
    layers = [config.compilation_config.static_forward_context[name] for name in layer_names]
    block_size, dtype = kv_cache_spec.block_size, config.model_config.dtype
    sizes = config.cache_config.num_gpu_blocks, block_size, dtype, kv_cache_spec.page_size_bytes
    demands = {demand_of(layer.impl, config, *sizes) for layer in layers if has_kernels(layer.impl.kvq)} - _WARM
    if not demands:
        return
    _WARM.update(demands)
    started = time.perf_counter()
    try:
        launches = warm_up(list(demands), device)
    except Exception as problem:  # the first request compiles what it needs, and tells what is wrong with it
        _LOG.warning("kvq: no kernels were made ready: %s: %s", type(problem).__name__, problem)
        return
    modes = ", ".join(sorted({demand.mode for demand in demands}))
    tokens = sizes[0] * block_size
    _LOG.info("kvq: %d kernels of %s for %d tokens ready in %.1f s", launches, modes, tokens, time.perf_counter() - started)
