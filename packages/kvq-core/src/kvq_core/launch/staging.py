"""The workspace of staged tiles (:mod:`kvq_core.kernels.staging`), and the launch that fills it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import torch

from kvq_core.call.spec import Attention
from kvq_core.kernels import args
from kvq_core.kernels.config import ReadConfig
from kvq_core.kernels.formats import Format, PlaneFormat
from kvq_core.kernels.heads import tile_channels
from kvq_core.kernels.staging import QUERY_SHARE, Staged, stage_kernel
from kvq_core.launch.bundles import BlockTable, PagesArgs, bundle_scoring
from kvq_core.launch.device import device_facts
from kvq_core.launch.replay import LaunchRecord
from kvq_core.plan.planner import GROUPS_TILE

MOST_BYTES: Final = 256 << 20
"""Of a workspace for staged tiles: 65,536 keys of eight kv heads."""
_WARPS: Final = 8
_WARPS_OF_ROTATED: Final = 4
"""Where rows are un-rotated, a thread of eight warps has more than 128 registers, so that a multiprocessor holds one program.
Where they stay rotated, eight warps gain nothing."""
PROGRAMS_PER_SM: Final[float] = 4
"""They take tile after tile: a block table has room for many more than most sequences have."""
_UNBOUNDED: Final = 2**23
"""Blocks, of which no table has so many."""


def most_tiles(attention: Attention) -> int:
    """Tiles of every kv head that the largest workspace holds."""
    smoothing = attention.smoothing
    channels = 2 * tile_channels(attention.q.shape[2]) + (0 if smoothing is None else 2 * smoothing.num_pairs)
    return MOST_BYTES // (attention.keys.num_kv_heads * GROUPS_TILE * (2 * channels + 8))


def stage(record: LaunchRecord, attention: Attention, packed: PagesArgs, capacity: int, config: ReadConfig) -> PagesArgs:
    """Launch the kernel that stages the keys of long prompts, up to ``capacity`` tiles of every kv head; the tiles as pages, with blocks of
    a tile's tokens."""
    num_seqs, heads = attention.batch.num_seqs, attention.keys.num_kv_heads
    key_size, value_size = config.staged_key_size, config.channels
    rows = capacity * heads * GROUPS_TILE
    matrix = config.shape.head_size**2 if config.stays_rotated else 0
    sizes = ((rows * key_size + matrix) // 2, rows * value_size // 2, rows, rows, heads * capacity, num_seqs, num_seqs)
    keys, values, k_scales, v_scales, *indices = record.buffers(sizes)
    keys, values = keys.view(torch.float16), values.view(torch.float16)
    table, firsts, stops = (part.view(torch.int32) for part in indices)
    smoothing = attention.smoothing if config.features.rotary_pairs else None
    record.start(
        stage_kernel,
        (min(capacity, math.ceil(PROGRAMS_PER_SM * device_facts(attention.q.device).num_sms / heads)), heads),
        packed.keys,
        packed.values,
        Staged(keys, values, k_scales, v_scales, table, firsts, stops),
        None if smoothing is None or smoothing.ordered else smoothing.factor,
        None if smoothing is None else smoothing.rotary,
        packed.batch,
        bundle_scoring(attention),
        num_seqs,
        *packed.table,
        capacity,
        C=config,
        num_warps=_WARPS_OF_ROTATED if config.format.rotated else _WARPS,
    )
    k_strides, v_strides = ((heads * GROUPS_TILE * size, size, GROUPS_TILE * size) for size in (key_size, value_size))
    return PagesArgs(
        args.PlaneArgs(keys, k_scales, *k_strides, heads * GROUPS_TILE, 1, GROUPS_TILE),
        args.PlaneArgs(values, v_scales, *v_strides, heads * GROUPS_TILE, 1, GROUPS_TILE),
        args.BatchArgs(packed.batch.cu_seqlens_q, packed.batch.seqused_k, table, stops, None, firsts),
        # Its width bounds nothing: staged sequences have stops.
        BlockTable(capacity, _UNBOUNDED, capacity),
    )


def staged_config(config: ReadConfig) -> ReadConfig:
    """Of a kernel that reads the rows that one of ``config`` has staged."""
    shape = replace(
        config.shape, block_size=GROUPS_TILE, same_strides=True, key_alignment=16, value_alignment=16, wide_planes=False, wide_pages=False
    )
    key = PlaneFormat("staged", 1, staged=True, one_scale=config.stays_rotated or config.format.key.scales == "plane")
    value = PlaneFormat("staged", 1, staged=True)
    if config.stays_rotated:
        key = replace(key, rotated=True, level=QUERY_SHARE.value)
        value = replace(value, rotated=True, level=config.value_number_scale)
    key = replace(key, parts=config.format.key.parts)
    return replace(config, format=Format(key, value), shape=shape)
