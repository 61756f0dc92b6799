"""What a vLLM configuration can ask of kvq's kernels: compiled, and its workspace reserved, before the first request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from kvq_core.backend import QuantKVBackend
from kvq_core.cache.layout import LayerCaches
from kvq_core.environment import kernels_of, lacks_kernels
from kvq_core.launch.warmup import Demand, places_of, reserve_workspace, warm_up
from kvq_core.plan.planner import DECODE_QUERY_LEN
from kvq_core.registry import get_backend
from kvq_vllm.pages import content_bytes, layer_views
from kvq_vllm.settings import Settings
from kvq_vllm.window import blocks_read

_LOG = logging.getLogger("vllm.kvq")


def query_rows(config: Any) -> tuple[int, ...]:
    """Rows that all sequences of a step have in which every one decodes: 1, and 1 + the number of drafts."""
    speculative = getattr(config, "speculative_config", None)
    drafts = 0 if speculative is None else speculative.num_speculative_tokens or 0
    return (1, 1 + drafts) if drafts else (1,)


def longest_decode(config: Any) -> int:
    """The most rows a sequence in steps that kvq's planner takes for decode, or that vLLM captures."""
    return max(DECODE_QUERY_LEN, *query_rows(config))


def longest_prefill(config: Any) -> int:
    """The most rows a sequence in any step."""
    return max(longest_decode(config), min(config.scheduler_config.max_num_batched_tokens, config.model_config.max_model_len))


def has_kernels(backend: QuantKVBackend) -> bool:
    """Whether both doors are kernels on a GPU. What a mode without them does there depends on values, and cannot be planned or captured."""
    try:
        return kernels_of(backend) == {"write", "read"} and not lacks_kernels(backend)
    except ImportError:  # no Triton
        return False


def demands_of(impl: Any, config: Any, num_blocks: int, block_size: int, dtype: torch.dtype, page_bytes: int = 0) -> tuple[Demand]:
    """Of a layer, over that many blocks of pages in vLLM's head-major order. ``page_bytes``: a page's, its padding included."""
    caches = _caches(impl, impl.kvq, num_blocks, block_size, dtype, page_bytes)
    if impl.kvq.takes_scales:
        scale = torch.empty((), dtype=torch.float32, device="meta")
        caches = LayerCaches(caches.key_cache, caches.value_cache, scale, scale)
    demand = Demand(
        mode=impl.kvq.mode,
        places=places_of(caches),
        max_seqlen_k=config.model_config.max_model_len,
        sinks=None if impl.sinks is None or impl.residual is not None else impl.sinks.dtype,
        smoothed=impl.smoothing is not None,
        balanced=impl.smoothing is not None and impl.smoothing.balance is not None,
        ordered=impl.smoothing is not None and impl.smoothing.order is not None,
        rotary_pairs=0 if impl.smoothing is None or impl.smoothing.rotary is None else impl.smoothing.rotary.steps.shape[1],
        joins=impl.residual is not None,
        key_stops=impl.residual is not None,
        first_block=0 if impl.residual is None else impl.residual.sink_blocks(block_size),
        **_options(impl, config, dtype),
    )
    return (demand,)


def window_demands_of(
    impl: Any, config: Any, num_blocks: int, block_size: int, dtype: torch.dtype, page_bytes: int = 0
) -> tuple[Demand, Demand]:
    """Of the exact rows of a layer with a residual window: read before packed ones; and alone, as a whole prompt of one sequence is."""
    none = get_backend("none")
    length, sinks = Settings.of(config).residual_length, impl.residual.sink_blocks(block_size)
    few, many = (block_size * (sinks + blocks_read(length, block_size, rows)) for rows in (longest_decode(config), longest_prefill(config)))
    first = Demand(
        mode=none.mode,
        places=places_of(_caches(impl, none, num_blocks, block_size, dtype, page_bytes)),
        max_seqlen_k=many,
        decodes=(longest_decode(config), few),
        sinks=None if impl.sinks is None else impl.sinks.dtype,
        partial=True,
        **_options(impl, config, dtype),
    )
    return first, replace(first, max_num_seqs=1, query_rows=(), decodes=None, partial=False)


def _caches(impl: Any, backend: QuantKVBackend, num_blocks: int, block_size: int, dtype: torch.dtype, page_bytes: int) -> LayerCaches:
    """Views of a layer's pages, without memory."""
    content = content_bytes(backend, impl.head_size, impl.head_size, dtype)
    inner = impl.num_kv_heads * block_size * content
    strides = (max(page_bytes, inner), block_size * content, content, 1)
    shape = (num_blocks, impl.num_kv_heads, block_size, content)
    size = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    pages = torch.empty(size, dtype=torch.uint8, device="meta").as_strided(shape, strides)
    return layer_views(backend, pages, impl.head_size, impl.head_size, dtype)


def _options(impl: Any, config: Any, dtype: torch.dtype) -> dict[str, Any]:
    """What reads of a layer's packed and exact rows share."""
    scheduler = config.scheduler_config
    return {
        "num_query_heads": impl.num_heads,
        "head_size": impl.head_size,
        "head_size_v": impl.head_size,
        "dtype": dtype,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_tokens": scheduler.max_num_batched_tokens,
        "query_rows": query_rows(config),
        "window": impl.window[0],
        "softcap": impl.softcap,
        "slopes": impl.alibi_slopes is not None,
        "sqrt": impl.use_alibi_sqrt,
    }


def reserve_for(impl: Any, config: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Reserve a layer's workspace, so that vLLM's memory profiling sees it."""
    # Micro-batches overlap on two streams, which must not share a workspace.
    if device.type != "cuda" or getattr(config.parallel_config, "enable_dbo", False) or not has_kernels(impl.kvq):
        return
    demands = demands_of(impl, config, 1, 16, dtype)
    windows = () if impl.residual is None else window_demands_of(impl, config, 1, 16, dtype)
    if new := {*demands, *windows} - _RESERVED:
        _RESERVED.update(new)
        reserve_workspace(list(new), device)


Demands = Callable[..., tuple[Demand, ...]]
_RESERVED: set[Demand] = set()
_WARM: set[Demand] = set()


def warm_up_group(kv_cache_spec: Any, impls: Sequence[Any], demands_of: Demands, config: Any, device: torch.device) -> None:
    """Compile what the layers of a group can need, as ``demands_of`` tells of each, once vLLM knows how many blocks they have."""
    if device.type != "cuda" or not config.cache_config.num_gpu_blocks:
        return
    block_size, dtype = kv_cache_spec.block_size, config.model_config.dtype
    sizes = config.cache_config.num_gpu_blocks, block_size, dtype, kv_cache_spec.page_size_bytes
    demands = {demand for impl in impls if has_kernels(impl.kvq) for demand in demands_of(impl, config, *sizes)} - _WARM
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
