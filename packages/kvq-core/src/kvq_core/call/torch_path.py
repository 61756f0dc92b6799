"""Write and read in plain torch, from a mode's ``encode`` and ``decode`` alone: the CPU path, and the reference for the kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvq_core.call import reference
from kvq_core.call.spec import Attention, NewRows, Plane
from kvq_core.errors import KVQError

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend


def write(backend: QuantKVBackend, rows: NewRows) -> None:
    """Encode the rows whose slot lies in the cache, K and V, and then scatter both."""
    num_slots = rows.keys.num_blocks * rows.keys.block_size
    kept = (rows.slot_mapping >= 0) & (rows.slot_mapping < num_slots)
    slots = rows.slot_mapping[kept]
    key = rows.key if rows.smoothing is None else rows.smoothing.smooth(rows.key, rows.positions)
    key_half, value_half = backend.key_half, backend.value_half
    encoded = []
    for x, plane, half, encode in (
        (key, rows.keys, key_half, key_half.encode),
        (rows.value, rows.values, value_half, value_half.encode_value),
    ):
        given = None if backend.needs_scale_caches else plane.scales
        made = half.encode_ordered(x[kept]) if rows.is_ordered and plane is rows.keys else encode(x[kept], scale=given)
        encoded.append((plane, *checked_encoding(half, x[kept], made, plane.codes.shape[-1])))
    for plane, codes, scales in encoded:
        block, offset = slots // plane.block_size, slots % plane.block_size
        plane.codes[block, offset] = codes.view(plane.codes.dtype)
        if backend.needs_scale_caches and plane.scales is not None and scales is not None:
            plane.scales[block, offset] = scales


def checked_encoding(backend: QuantKVBackend, x: torch.Tensor, made: object, width: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(codes, scales): ``made``, which ``encode`` returned for rows ``x`` [..., head_size] of pages with ``width`` elements a row.

    Raises:
        KVQError: it is not what the contract says, which is the mode's fault.
    """
    whose = f"mode {backend.mode}: encode returned"
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], torch.Tensor):
        raise KVQError(f"{whose} {type(made).__name__}, need a pair (codes, scales)")
    codes, scales = made
    if codes.shape != (*x.shape[:-1], width) or codes.dtype not in backend.accepted_cache_dtypes(x.dtype):
        need = f"{[*x.shape[:-1], width]} {backend.cache_dtype(x.dtype)}"
        raise KVQError(f"{whose} codes {list(codes.shape)} {codes.dtype}, need {need}")
    if not backend.needs_scale_caches:
        if scales is not None and not backend.takes_scales:
            raise KVQError(f"{whose} scales, and the mode says that it needs no scale caches (needs_scale_caches = False)")
        return codes, scales
    if scales is None:
        raise KVQError(f"{whose} no scales, and the mode says needs_scale_caches")
    if scales.shape != x.shape[:-1] or scales.dtype != torch.float32:
        raise KVQError(f"{whose} scales {list(scales.shape)} {scales.dtype}, need {list(x.shape[:-1])} {torch.float32}")
    return codes, scales


def read(backend: QuantKVBackend, attention: Attention) -> None:
    """Dense float32 attention over the decoded pages, one sequence at a time."""
    result, lse = reference.attention_and_lse(attention, gathering(backend, attention))
    if attention.other is not None and attention.other_lse is not None:
        result, lse = reference.joined(result, lse, attention.other, attention.other_lse)
    # Rows before the first sequence's and past the last one's, an engine's padding, stay as they are.
    starts = attention.batch.cu_seqlens_q
    owned = slice(int(starts[0]), int(starts[-1]))
    attention.out[owned] = reference.to_output_dtype(result[owned], attention.out.dtype, attention.output_scale)
    if attention.lse is not None:
        attention.lse[owned] = lse[owned]


def gathering(backend: QuantKVBackend, attention: Attention) -> reference.Gather:
    """:func:`gather` from K's pages of ``attention`` as K is stored, and from V's as V is."""

    def gathered(plane: Plane, blocks: torch.Tensor) -> torch.Tensor:
        if plane is attention.values:
            return gather(backend.value_half, plane, blocks)
        return gather(backend.key_half, plane, blocks, ordered=attention.is_ordered)

    return gathered


def gather(backend: QuantKVBackend, plane: Plane, blocks: torch.Tensor, *, ordered: bool = False) -> torch.Tensor:
    """Decoded rows [len(blocks) * block_size, num_kv_heads, head_size] of the given physical blocks, float32; ``ordered``: as stored."""
    codes = plane.codes[blocks].flatten(0, 1)
    if not backend.needs_scale_caches:
        return backend.decode(codes, plane.scales)
    scales = None if plane.scales is None else plane.scales[blocks].flatten(0, 1)
    return backend.decode_ordered(codes, scales) if ordered else backend.decode(codes, scales)
