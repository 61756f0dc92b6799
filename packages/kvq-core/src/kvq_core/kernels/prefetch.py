"""Prefetch of key tiles into the L2, while queries are prepared.

Of short splits the first tile: all programs of such a launch begin at once, each with one work tile, and none has anything else to do
while it waits for its first keys. In long sequences and in batches the requests cost more than they bring. And the keys past the last
whole tile, where these come first (:attr:`~kvq_core.kernels.config.ReadConfig.masked_first`; docs/dev/experiments/2026-11.md).
"""

import triton
import triton.language as tl

from kvq_core.kernels.args import KeyTiles
from kvq_core.kernels.paged_kv import key_tile, page_offset, tile_offsets

FETCH_BYTES = tl.constexpr(64)  # two sectors, which memory sends together


@triton.jit
def prefetch_tiles(keys, values, work, seen, kv_head, batch, table_stride, num_blocks, scoring, C: tl.constexpr):
    """Prefetch the codes and the scales of a work tile's first key tile, if C.tile.prefetch, and of the keys past ``seen``'s whole ones."""
    if C.tile.prefetch:
        prefetch_tile(work.start // C.tile.keys, keys, values, work, kv_head, batch, table_stride, num_blocks, scoring, C)
    if C.masked_first and C.features.use_asm:
        _, end = seen
        if end * C.tile.keys < work.stop:
            prefetch_tile(end, keys, values, work, kv_head, batch, table_stride, num_blocks, scoring, C)


@triton.jit
def prefetch_tile(t, keys, values, work, kv_head, batch, table_stride, num_blocks, scoring, C: tl.constexpr):
    K_HEADS: tl.constexpr = C.key_heads
    V_HEADS: tl.constexpr = C.value_heads
    LAST: tl.constexpr = C.tile.loops - 1  # the loop that checks whether blocks exist
    tile = key_tile(t, KeyTiles(t, t + 1, t + 1, 0), work, batch, table_stride, num_blocks, scoring, LAST, C)
    k_offset, v_offset = tile_offsets(keys, values, tile, C)
    request_rows(keys, k_offset, kv_head, K_HEADS, C)
    request_rows(values, v_offset, kv_head, V_HEADS, C)
    if C.format.key.scales == "row":
        request_scales(keys, tile, kv_head, C)
    if C.format.value.scales == "row":
        request_scales(values, tile, kv_head, C)


@triton.jit
def request_rows(plane, offset, kv_head, HEADS: tl.constexpr, C: tl.constexpr):
    SIZE: tl.constexpr = plane.codes.dtype.element_ty.primitive_bitwidth // 8
    COUNT: tl.constexpr = (HEADS.lanes * SIZE + FETCH_BYTES - 1) // FETCH_BYTES
    base = plane.codes + kv_head.to(tl.int64) * plane.head_stride
    for i in tl.static_range(COUNT):
        request(base + (offset + i * (FETCH_BYTES // SIZE)))


@triton.jit
def request_scales(plane, tile, kv_head, C: tl.constexpr):
    offset = page_offset(tile.block, tile.slot, plane.scale_block_stride, plane.scale_slot_stride, C)
    request(plane.scales + (kv_head.to(tl.int64) * plane.scale_head_stride + offset))


@triton.jit
def request(at):
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)
