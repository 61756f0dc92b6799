"""Tensors of a validated call as the bundles that kernels take: pointers and strides."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvq_core.call.replay_cache import ALIGNMENT
from kvq_core.call.smoothed import Smoothing
from kvq_core.call.spec import Attention, Plane
from kvq_core.errors import ArgumentError
from kvq_core.kernels import args
from kvq_core.kernels.formats import Format, PlaneFormat

FP8_NAMES = {torch.float8_e4m3fn: "e4m3fn", torch.float8_e5m2: "e5m2"}
"""What kernels call the outputs whose bits they make."""


class BlockTable(NamedTuple):
    """Of a block table: how far apart its rows are, how many columns they have, and how many blocks there are."""

    stride: int
    width: int
    num_blocks: int


@dataclass(frozen=True)
class PagesArgs:
    """A paged cache, and who attends to what of it."""

    keys: args.PlaneArgs
    values: args.PlaneArgs
    batch: args.BatchArgs
    table: BlockTable


def lanes_of(plane: Plane, name: str, form: PlaneFormat) -> torch.Tensor:
    """The codes as 16-bit lanes (unpacked modes: as they are), without a copy."""
    if not form.packed:
        return plane.codes
    try:
        return plane.codes.view(torch.uint8).view(torch.uint16)
    except RuntimeError as error:
        strides = f"strides {plane.codes.stride()}, offset {plane.codes.storage_offset()}"
        raise ArgumentError(name, strides, "even strides, offset and packed head size: rows are read as 16-bit lanes") from error


def bundle_plane(plane: Plane, name: str, form: PlaneFormat) -> args.PlaneArgs:
    codes = lanes_of(plane, name, form)
    block, slot, head, _ = codes.stride()
    scales = plane.scales
    if scales is None or scales.dim() != 3:
        return args.PlaneArgs(codes, scales, block, slot, head, 0, 0, 0)
    return args.PlaneArgs(codes, scales, block, slot, head, *scales.stride())


def bundle_pages(attention: Attention, form: Format) -> PagesArgs:
    batch = attention.batch
    return PagesArgs(
        bundle_plane(attention.keys, "k_cache", form.key),
        bundle_plane(attention.values, "v_cache", form.value),
        args.BatchArgs(batch.cu_seqlens_q, batch.seqused_k, batch.block_table, batch.key_stops, batch.first_positions),
        BlockTable(batch.block_table.stride(0), batch.block_table.shape[1], attention.keys.num_blocks),
    )


def bundle_rows(tensor: torch.Tensor, smoothing: Smoothing | None = None, positions: torch.Tensor | None = None) -> args.RowsArgs:
    token, head, _ = tensor.stride()
    if smoothing is None:
        return args.RowsArgs(tensor, token, head)
    return args.RowsArgs(tensor, token, head, smoothing.mean, smoothing.factor, smoothing.rotary, positions)


def bundle_output(attention: Attention) -> args.OutputArgs:
    out = attention.out.view(torch.uint8) if attention.out.dtype in FP8_NAMES else attention.out
    token, head, _ = out.stride()
    return args.OutputArgs(out, token, head, attention.lse, attention.other, attention.other_lse)


def bundle_scoring(attention: Attention) -> args.ScoringArgs:
    scoring = attention.scoring
    bias, ranges = scoring.qq_bias, scoring.mm_prefix_range
    return args.ScoringArgs(
        float(scoring.softmax_scale),
        scoring.window_left if scoring.window_left >= 0 else None,
        float(scoring.softcap) if scoring.softcap > 0 else None,
        scoring.sinks,
        scoring.alibi_slopes,
        bias,
        0 if bias is None else bias.stride(0),
        0 if bias is None else bias.shape[0],
        ranges,
        0 if ranges is None else ranges.shape[1],
    )


def strides_of(plane: Plane) -> tuple[int, ...]:
    """Block, slot and head strides of codes and, where there are any, of scales."""
    scales = plane.scales.stride() if plane.scales is not None and plane.scales.dim() == 3 else ()
    return (*plane.codes.stride()[:3], *scales)


def row_alignment(plane: Plane, fold: int = 1) -> int:
    """What each row of codes, of ``fold`` keys, starts at a multiple of: a power of two, no more than matters."""
    codes = plane.codes
    block, slot, head = (stride * codes.element_size() for stride in codes.stride()[:3])
    return math.gcd(ALIGNMENT, codes.data_ptr(), block, fold * slot, head)
