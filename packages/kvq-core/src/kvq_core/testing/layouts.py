"""How a case's pages and rows lie in memory, as strided fields of one poisoned buffer with guard blocks around the cache."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kvq_core.testing.cases import Case
from kvq_core.testing.poison import GAP, Field, Poisoned, lay_out

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend

GUARD_BLOCKS = 1
_WORD = 4


def pages(case: Case, backend: QuantKVBackend, num_blocks: int, device: torch.device) -> Poisoned:
    """``key_cache`` and ``value_cache`` (and ``k_scale_cache``, ``v_scale_cache`` if the mode stores scales), all 0xFF."""
    fields: dict[str, Field] = {}
    start = GAP
    for block, region in regions(case, backend, num_blocks):
        fields |= {name: replace(field, offset=start + GUARD_BLOCKS * block + field.offset) for name, field in region.items()}
        start += (num_blocks + 2 * GUARD_BLOCKS) * block
        start = -(-start // GAP) * GAP + GAP
    return Poisoned(start, fields, device)


def regions(case: Case, backend: QuantKVBackend, num_blocks: int) -> list[tuple[int, dict[str, Field]]]:
    """The stretches of memory that a cache of ``case`` takes: (bytes of a block, fields that lie in them block by block) each."""
    halves = {"key_cache": (backend.key_half, case.head_size), "value_cache": (backend.value_half, case.value_size)}
    parts = {name: (half.cache_dtype(case.dtype), half.packed_head_size(size)) for name, (half, size) in halves.items()}
    if backend.needs_scale_caches:
        parts |= {"k_scale_cache": (torch.float32, 0), "v_scale_cache": (torch.float32, 0)}
    if case.layout == "interleaved":
        order = ("key_cache", "k_scale_cache", "value_cache", "v_scale_cache")
        together = [tuple(name for name in order if name in parts)]
    elif case.layout == "paired":
        together = [("key_cache", "value_cache"), ("k_scale_cache", "v_scale_cache")] if len(parts) == 4 else [("key_cache", "value_cache")]
    else:
        together = [(name,) for name in parts]

    made = []
    for region in together:
        places = _places(case, [_rounded(max(width, 1) * part.itemsize) for part, width in (parts[name] for name in region)])
        fields = {}
        for name, (block, slot, head, offset) in zip(region, places, strict=True):
            part, width = parts[name]
            shape = (num_blocks, case.block_size, case.num_kv_heads) + ((width,) if width else ())
            steps = tuple(step // part.itemsize for step in (block, slot, head)) + ((1,) if width else ())
            fields[name] = Field(part, shape, steps, offset)
        made.append((places[0][0], fields))
    return made


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // _WORD) * _WORD


def _places(case: Case, sizes: list[int]) -> list[tuple[int, int, int, int]]:
    """Block, slot and head strides and offset, in bytes, of parts of ``sizes`` bytes per (slot, head) that share their blocks.

    ``case.padding`` bytes, which are nobody's, follow each block.
    """
    slots, heads, cell = case.block_size, case.num_kv_heads, sum(sizes)
    block = slots * heads * cell + case.padding
    if case.layout == "interleaved":
        return [(block, heads * cell, cell, sum(sizes[:i])) for i in range(len(sizes))]
    if case.layout == "head_major":
        return [(block, size, slots * size, slots * heads * sum(sizes[:i])) for i, size in enumerate(sizes)]
    return [(block, heads * size, size, slots * heads * sum(sizes[:i])) for i, size in enumerate(sizes)]


def rows(kind: str, num_tokens: int, num_heads: int, head_size: int, dtype: torch.dtype, device: torch.device) -> Poisoned:
    """One field ``rows`` [num_tokens, num_heads, head_size] with the strides that ``kind`` says (see :class:`Case`), all 0xFF."""
    strides = {
        "contiguous": (num_heads * head_size, head_size, 1),
        "fused": ((num_heads + 3) * head_size, head_size, 1),
        "transposed": (head_size, num_tokens * head_size, 1),
    }[kind]
    return lay_out({"rows": (dtype, (num_tokens, num_heads, head_size), strides)}, device)
