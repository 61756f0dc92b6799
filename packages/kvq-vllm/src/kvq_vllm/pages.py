"""kvq's views of the memory that vLLM hands to a layer: logical [blocks, heads, slots, content], any physical order."""

from __future__ import annotations

import torch

from kvq_core.backend import QuantKVBackend
from kvq_core.cache.layout import LayerCaches, cell_size, fields, page_views
from kvq_core.errors import ArgumentError


def content_bytes(backend: QuantKVBackend, head_size: int, head_size_v: int, dtype: torch.dtype) -> int:
    """Bytes of one token of one head, K and V."""
    return cell_size(fields(backend, head_size, head_size_v, dtype))


def layer_views(backend: QuantKVBackend, kv_cache: torch.Tensor, head_size: int, head_size_v: int, dtype: torch.dtype) -> LayerCaches:
    """A layer's caches, planes of whole pages: of a page vLLM fixes no more than its bytes, and kernels read planes faster than cells."""
    _, heads, slots, _ = kv_cache.shape
    return page_views(backend, _pages(kv_cache), slots, heads, head_size, head_size_v, dtype)


class PageViews:
    """A layer's caches over the pages that vLLM has bound to it. vLLM rebinds them when it sleeps, profiles and reloads."""

    def __init__(self, backend: QuantKVBackend, head_size: int) -> None:
        self._backend, self._head_size = backend, head_size
        self._made: tuple[tuple[object, ...], LayerCaches] | None = None

    def over(self, kv_cache: torch.Tensor, dtype: torch.dtype, head_size_v: int) -> LayerCaches:
        """The caches over ``kv_cache`` for rows of ``dtype``: those of the call before while the pages stay where they are."""
        key = (kv_cache.data_ptr(), kv_cache.shape, kv_cache.stride(), dtype)
        if self._made is None or self._made[0] != key:
            self._made = key, layer_views(self._backend, kv_cache, self._head_size, head_size_v, dtype)
        return self._made[1]


def _pages(kv_cache: torch.Tensor) -> torch.Tensor:
    """[blocks, bytes] uint8: each block's page, without its padding."""
    cells = kv_cache.view(torch.uint8)
    blocks, heads, slots, content = cells.shape
    # Content innermost, heads and slots in either order, without gaps.
    inner = sorted((stride, size) for stride, size in zip(cells.stride()[1:3], (heads, slots), strict=True) if size > 1)
    dense, expected = cells.stride(3) == 1, content
    for stride, size in inner:
        dense, expected = dense and stride == expected, expected * size
    if not dense:
        raise ArgumentError("kv_cache", f"strides {kv_cache.stride()}", "pages whose bytes lie together (VLLM_KV_CACHE_LAYOUT=LBHNC)")
    return cells.as_strided((blocks, heads * slots * content), (cells.stride(0), 1))
