"""Settings made real: random rows as a mode stores them, in shuffled blocks on a device, and the arguments of both doors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvq_core import QuantKVBackend
from kvq_core.cache.layout import Geometry, buffers_of, cell_size, layer_views
from shapes import DTYPE, Read, Write

# Rows that are really encoded; the pages hold random draws of them. Far more than any kernel could profit from.
POOL = 1 << 16
# Standard normal rows have next to nothing beyond this: the scale that fp8_per_tensor is given.
PER_TENSOR_RANGE = 6.0
_STEP = 1 << 20


@dataclass
class Caches:
    """Pages [num_blocks, block_size, kv_heads, packed], as the doors take them."""

    key: torch.Tensor
    value: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None

    @property
    def scales(self) -> dict[str, torch.Tensor | None]:
        return {"k_scale_cache": self.k_scale, "v_scale_cache": self.v_scale}


def allocate(
    backend: QuantKVBackend,
    num_blocks: int,
    block_size: int,
    kv_heads: int,
    head_size: int,
    device: torch.device,
    layout: str = "head_major",
) -> Caches:
    """Pages full of 0xFF bytes, which makes NaN of scales (a scale of the whole tensor: usable)."""
    geometry = Geometry(num_blocks, block_size, kv_heads, head_size, head_size, 1, DTYPE, layout)
    stored = buffers_of(backend, geometry)
    shapes = {name: geometry.buffer_shape(cell_size(fields)) for name, fields in stored.items()}
    buffers = {name: torch.full(shape, 255, dtype=torch.uint8, device=device) for name, shape in shapes.items()}
    views = layer_views(geometry, buffers, stored, 0)
    k_scale, v_scale = views.k_scale_cache, views.v_scale_cache
    if backend.takes_scales:
        k_scale, v_scale = (torch.full((1,), PER_TENSOR_RANGE / 448, device=device) for _ in range(2))
    return Caches(views.key_cache, views.value_cache, k_scale, v_scale)


def fill(backend: QuantKVBackend, caches: Caches, head_size: int) -> None:
    """Draw every slot of ``caches`` from a pool of encoded standard normal rows."""
    key, value = (backend.key_half, caches.key, caches.k_scale), (backend.value_half, caches.value, caches.v_scale)
    for half, codes, scale in (key, value):
        pages = codes.view(torch.uint8)
        slots = codes.shape[:3].numel()
        rows = torch.randn(min(POOL, slots), head_size, device=codes.device, dtype=torch.float32).to(DTYPE)
        pool, pool_scales = half.encode(rows, scale=None if backend.needs_scale_caches else scale)
        pool = pool.view(torch.uint8).contiguous()
        blocks = max(_STEP * codes.shape[0] // slots, 1)
        for first in range(0, codes.shape[0], blocks):
            part = pages[first : first + blocks]
            draw = torch.randint(0, rows.shape[0], part.shape[:3], device=codes.device)
            part.copy_(pool[draw])
            if backend.needs_scale_caches and scale is not None and pool_scales is not None:
                scale[first : first + blocks].copy_(pool_scales[draw])


def block_table(setting: Read, device: torch.device) -> torch.Tensor:
    """[num_seqs, most blocks] int32: all blocks, shuffled, each owned by one sequence. Entries past a sequence's end are 0."""
    shuffled = torch.randperm(sum(setting.blocks), device=device, dtype=torch.int32)
    if len(set(setting.blocks)) == 1:
        return shuffled.view(setting.num_seqs, -1)
    table = torch.zeros(setting.num_seqs, max(setting.blocks), dtype=torch.int32, device=device)
    for row, owned in zip(table, shuffled.split(setting.blocks), strict=True):
        row[: owned.shape[0]] = owned
    return table


def pages(backend: QuantKVBackend, setting: Read, device: torch.device) -> Caches:
    """Poisoned pages for ``setting``."""
    return allocate(backend, sum(setting.blocks), setting.block_size, setting.kv_heads, setting.head_size, device, setting.layout)


def alibi_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """[heads] float32: 2^(-8 i / heads) for head i from 1 on, as in the paper (Press et al., 2021)."""
    return torch.exp2(-8.0 * torch.arange(1, heads + 1, device=device, dtype=torch.float32) / heads)


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
        "window_size": (-1, -1) if setting.window is None else (setting.window - 1, 0),
        "block_table": table,
        "softcap": setting.softcap,
        "sinks": torch.randn(setting.query_heads, device=device) if setting.sinks else None,
        "alibi_slopes": alibi_slopes(setting.query_heads, device) if setting.alibi else None,
        **caches.scales,
    }


def read(backend: QuantKVBackend, setting: Read, device: torch.device) -> dict[str, Any]:
    """Arguments of ``unified_attention`` for ``setting``, over pages full of random rows."""
    caches = pages(backend, setting, device)
    fill(backend, caches, setting.head_size)
    return attention_arguments(setting, caches, block_table(setting, device))


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of a sequence's last rows in float32: ``q`` [rows, query heads, size] over ``k`` and ``v`` [keys, heads, size]."""
    group, rows, keys = q.shape[1] // k.shape[1], len(q), len(k)
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("rhd,khd->hrk", q.float(), k) * q.shape[2] ** -0.5
    unseen = torch.ones(rows, keys, dtype=torch.bool, device=q.device).triu(keys - rows + 1)
    return torch.einsum("hrk,khd->rhd", scores.masked_fill(unseen, -torch.inf).softmax(-1), v)


BF16_ERROR = 0.01
"""Relative, of a row's result: bf16 rounds query, probabilities and result."""


def hold(whose: str, found: torch.Tensor, expected: torch.Tensor, most_error: float = BF16_ERROR) -> None:
    """:class:`ArithmeticError` unless each row of ``found`` is within ``most_error`` of ``expected``'s, relative to its length."""
    differences, rows = (found.float() - expected).flatten(1), expected.flatten(1)
    error = (torch.linalg.vector_norm(differences, dim=1) / torch.linalg.vector_norm(rows, dim=1)).max()
    if not error < most_error:
        raise ArithmeticError(f"a row of {whose} is {float(error):.1e} from the result, need less than {most_error}")


def slots(setting: Write, device: torch.device) -> torch.Tensor:
    """[tokens] int64: whole blocks in shuffled order, or one random slot in each of as many blocks."""
    blocks = torch.randperm(setting.num_blocks, device=device)
    if setting.scattered:
        return blocks * setting.block_size + torch.randint(0, setting.block_size, blocks.shape, device=device)
    every = blocks[:, None] * setting.block_size + torch.arange(setting.block_size, device=device)
    return every.flatten()[: setting.tokens].contiguous()


def new_rows(setting: Write, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Random keys and values of a layer, [tokens, kv_heads, head_size] each."""
    shape = (setting.tokens, setting.kv_heads, setting.head_size)
    return torch.randn(shape, device=device).to(DTYPE), torch.randn(shape, device=device).to(DTYPE)


def write(backend: QuantKVBackend, setting: Write, device: torch.device) -> dict[str, Any]:
    """Arguments of ``reshape_and_cache`` for a layer of ``setting``: random rows into poisoned pages."""
    caches = allocate(backend, setting.num_blocks, setting.block_size, setting.kv_heads, setting.head_size, device)
    key, value = new_rows(setting, device)
    return {
        "key": key,
        "value": value,
        "key_cache": caches.key,
        "value_cache": caches.value,
        "slot_mapping": slots(setting, device),
        **caches.scales,
    }


def write_call(backend: QuantKVBackend, setting: Write, device: torch.device) -> Callable[[], None]:
    """The write door, once for each layer."""
    layers = [write(backend, setting, device) for _ in range(setting.layers)]

    def call() -> None:
        for rows in layers:
            backend.reshape_and_cache(**rows)

    return call
