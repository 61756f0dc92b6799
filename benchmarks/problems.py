"""Settings made real: random rows as a mode stores them, in shuffled blocks on a device, and the arguments of both doors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvq_core import QuantKVBackend
from shapes import DTYPE, Read, Write

# Rows that are really encoded; the pages hold random draws of them. Far more than any kernel could profit from.
POOL = 1 << 16
# Standard normal rows have next to nothing beyond this: the scale that fp8_per_tensor is given.
PER_TENSOR_RANGE = 6.0
_STEP = 1 << 20


@dataclass
class Caches:
    """Head-major pages [num_blocks, block_size, kv_heads, packed], as the doors take them."""

    key: torch.Tensor
    value: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None

    @property
    def scales(self) -> dict[str, torch.Tensor | None]:
        return {"k_scale_cache": self.k_scale, "v_scale_cache": self.v_scale}


def allocate(backend: QuantKVBackend, num_blocks: int, block_size: int, kv_heads: int, head_size: int, device: torch.device) -> Caches:
    """Pages full of 0xFF bytes, scales full of NaN (a scale of the whole tensor: usable)."""
    dtype = backend.cache_dtype(DTYPE)
    width = backend.packed_head_size(head_size) * dtype.itemsize

    def plane() -> torch.Tensor:
        return torch.full((num_blocks, kv_heads, block_size, width), 255, dtype=torch.uint8, device=device).view(dtype).transpose(1, 2)

    k_scale, v_scale = backend.allocate_scale_caches(num_blocks, block_size, kv_heads, device)
    for scale in (k_scale, v_scale):
        if scale is not None:
            scale.fill_(torch.nan)
    if backend.takes_scales:
        k_scale, v_scale = (torch.full((1,), PER_TENSOR_RANGE / 448, device=device) for _ in range(2))
    return Caches(plane(), plane(), k_scale, v_scale)


def fill(backend: QuantKVBackend, caches: Caches, head_size: int) -> None:
    """Draw every slot of ``caches`` from a pool of encoded standard normal rows."""
    for codes, scale in ((caches.key, caches.k_scale), (caches.value, caches.v_scale)):
        # The physical order: [block, head, slot].
        pages = codes.transpose(1, 2).view(torch.uint8).flatten(0, 2)
        rows = torch.randn(min(POOL, pages.shape[0]), head_size, device=codes.device, dtype=torch.float32).to(DTYPE)
        pool, pool_scales = backend.encode(rows, scale=None if backend.needs_scale_caches else scale)
        pool = pool.view(torch.uint8).contiguous()
        heads_slots = codes.shape[2] * codes.shape[1]
        blocks = max(_STEP // heads_slots, 1)
        for first in range(0, codes.shape[0], blocks):
            last = min(first + blocks, codes.shape[0])
            draw = torch.randint(0, rows.shape[0], ((last - first) * heads_slots,), device=codes.device)
            pages[first * heads_slots : last * heads_slots] = pool[draw]
            if backend.needs_scale_caches and scale is not None and pool_scales is not None:
                part = scale[first:last].transpose(1, 2)
                part.copy_(pool_scales[draw].view(part.shape))


def block_table(setting: Read, device: torch.device) -> torch.Tensor:
    """[num_seqs, most blocks] int32: all blocks, shuffled, each owned by one sequence. Entries past a sequence's end are 0."""
    shuffled = torch.randperm(sum(setting.blocks), device=device, dtype=torch.int32)
    if len(set(setting.blocks)) == 1:
        return shuffled.view(setting.num_seqs, -1)
    table = torch.zeros(setting.num_seqs, max(setting.blocks), dtype=torch.int32, device=device)
    for row, owned in zip(table, shuffled.split(setting.blocks), strict=True):
        row[: owned.shape[0]] = owned
    return table


def attention_arguments(setting: Read, caches: Caches, table: torch.Tensor) -> dict[str, Any]:
    """The read door's arguments, with random queries and an ``out`` of NaN."""
    device, length = table.device, setting.query_len
    q = torch.randn(setting.num_seqs * length, setting.query_heads, setting.head_size, device=device).to(DTYPE)
    return {
        "q": q,
        "k_cache": caches.key,
        "v_cache": caches.value,
        "out": torch.full_like(q, torch.nan),
        "cu_seqlens_q": torch.arange(setting.num_seqs + 1, device=device, dtype=torch.int32) * length,
        "max_seqlen_q": length,
        "seqused_k": torch.tensor(setting.seq_lens, device=device, dtype=torch.int32),
        "max_seqlen_k": max(setting.seq_lens),
        "softmax_scale": setting.head_size**-0.5,
        "window_size": (-1, -1),
        "block_table": table,
        "softcap": 0.0,
        "sinks": None,
        "alibi_slopes": None,
        "use_alibi_sqrt": False,
        "qq_bias": None,
        "output_scale": None,
        "mm_prefix_range": None,
        **caches.scales,
    }


def read(backend: QuantKVBackend, setting: Read, device: torch.device) -> dict[str, Any]:
    """Arguments of ``unified_attention`` for ``setting``, over pages full of random rows."""
    caches = allocate(backend, sum(setting.blocks), setting.block_size, setting.kv_heads, setting.head_size, device)
    fill(backend, caches, setting.head_size)
    return attention_arguments(setting, caches, block_table(setting, device))


def slots(setting: Write, device: torch.device) -> torch.Tensor:
    """[tokens] int64: whole blocks in shuffled order, or one random slot in each of as many blocks."""
    blocks = torch.randperm(setting.num_blocks, device=device)
    if setting.scattered:
        return blocks * setting.block_size + torch.randint(0, setting.block_size, blocks.shape, device=device)
    every = blocks[:, None] * setting.block_size + torch.arange(setting.block_size, device=device)
    return every.flatten()[: setting.tokens].contiguous()


def write(backend: QuantKVBackend, setting: Write, device: torch.device) -> dict[str, Any]:
    """Arguments of ``reshape_and_cache`` for ``setting``: random rows into poisoned pages."""
    caches = allocate(backend, setting.num_blocks, setting.block_size, setting.kv_heads, setting.head_size, device)
    key, value = (torch.randn(setting.tokens, setting.kv_heads, setting.head_size, device=device).to(DTYPE) for _ in range(2))
    return {
        "key": key,
        "value": value,
        "key_cache": caches.key,
        "value_cache": caches.value,
        "slot_mapping": slots(setting, device),
        **caches.scales,
    }
