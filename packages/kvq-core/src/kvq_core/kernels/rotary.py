"""A mean key behind a rotary embedding (:mod:`kvq_core.smoothing.rotary`): taken off new keys, given back to scores.

A pair's phase grows by ``step`` turns / 2^32 from one position to the next, so that phases are products of whole numbers. What a query
row q takes of the pair's bias b at position j is a sum of two products, of a row's numbers and a position's::

    q . R_j b = A cos(j step) + B sin(j step)             A = q_x b_x + q_y b_y,  B = q_y b_x - q_x b_y

Over pairs these are two small matrix products, which add to a tile's scores. Of many rows, cosines and sines are those of the tile's
positions. Of a few rows it is cheaper to take the phase of the tile's first key off A and B: what is left is the same for every tile.
"""

import triton
import triton.language as tl

from kvq_core.kernels.args import RotaryRows
from kvq_core.kernels.dots import dot
from kvq_core.kernels.narrow_n import first_columns, scattered
from kvq_core.kernels.queries import head_offset

SHARE = tl.constexpr(16.0)
"""Cosines and sines are multiplied by it, A and B divided: all are float16, which then holds scores up to 65504 times it, 2^20."""


@triton.jit
def cosine_sine(phase, ASM: tl.constexpr):
    """Of an int32 phase in turns / 2^32. Within 2^-20 or so of exact."""
    angle = phase.to(tl.float32) * (6.283185307179586 / 4294967296.0)
    if ASM:
        cosine = tl.inline_asm_elementwise("cos.approx.f32 $0, $1;", "=f,f", [angle], dtype=tl.float32, is_pure=True, pack=1)
        sine = tl.inline_asm_elementwise("sin.approx.f32 $0, $1;", "=f,f", [angle], dtype=tl.float32, is_pure=True, pack=1)
    else:
        cosine, sine = tl.cos(angle), tl.sin(angle)
    return cosine, sine


@triton.jit
def rotary_mean(table, head, position, channel, mask, HEADS: tl.constexpr, ASM: tl.constexpr):
    """R_j b [ROWS, n] float32 of new keys of heads ``head`` at ``position`` [ROWS], in ``channel`` [1 or ROWS, n]; ``table``: a
    RotaryMean's channel_table."""
    at = table + head[:, None] * (3 * HEADS.size) + channel
    step = tl.load(at + 2 * HEADS.size, mask=mask, other=0.0).to(tl.int32, bitcast=True)
    cosine, sine = cosine_sine(step * position[:, None], ASM)
    return tl.load(at, mask=mask, other=0.0) * cosine + tl.load(at + HEADS.size, mask=mask, other=0.0) * sine


@triton.jit
def pair_products(queries, table, offset, valid, PAIRS: tl.constexpr, p):
    """(A, B, step) of every row at ``offset`` [ROWS] and pair ``p`` [PAIRS]; ``table``: a RotaryMean's pair_table, of one head."""
    at, mask = queries + offset[:, None], valid[:, None]
    x = tl.load(at + tl.load(table + p).to(tl.int32, bitcast=True)[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(at + tl.load(table + PAIRS + p).to(tl.int32, bitcast=True)[None, :], mask=mask, other=0.0).to(tl.float32)
    b_x, b_y = tl.load(table + 2 * PAIRS + p)[None, :], tl.load(table + 3 * PAIRS + p)[None, :]
    return x * b_x + y * b_y, y * b_x - x * b_y, tl.load(table + 4 * PAIRS + p).to(tl.int32, bitcast=True)


@triton.jit
def rotary_rows(queries, rows, work, kv_head, unit, batch, C: tl.constexpr):
    """What the tile's query rows have of a rotary mean. ``unit``: of scores, as :func:`.scores.score_unit`."""
    PAIRS: tl.constexpr = C.features.rotary_pairs
    FOLD: tl.constexpr = C.tile.fold
    DTYPE: tl.constexpr = tl.float16 if C.format.key.packed or queries.ptr.dtype.element_ty != tl.float32 else tl.float32
    table = queries.rotary + kv_head * (5 * PAIRS)
    offset = rows.token.to(tl.int64) * queries.token_stride + head_offset(rows.head, queries.head_stride, C)
    along, across, step = pair_products(queries.ptr, table, offset, rows.valid, PAIRS, tl.arange(0, PAIRS))
    along, across = along * (unit / SHARE), across * (unit / SHARE)
    if FOLD > 1:
        # Rows of the second key of a lane row are one position on.
        own = (tl.arange(0, C.tile.rows) // (C.tile.rows // FOLD))[:, None]
        along, across = inverse_rotary(along, across, step[None, :] * own, C)
    first = 0
    if batch.first_positions is not None:
        first = tl.load(batch.first_positions + work.seq)
    if C.tile.decode:
        cosines, sines = cosine_sine(step[None, :] * (tl.arange(0, C.tile.lane_rows) * FOLD)[:, None], C.features.use_asm)
        cosines, sines = (cosines * SHARE).to(DTYPE), (sines * SHARE).to(DTYPE)
        if C.tile.keys_first:
            rotary = RotaryRows(tl.trans(scattered(along, C)), tl.trans(scattered(across, C)), step[:, None], cosines, sines, first)
        else:
            rotary = RotaryRows(along, across, step[None, :], tl.trans(cosines), tl.trans(sines), first)
    else:
        rotary = RotaryRows(along.to(DTYPE), across.to(DTYPE), step[:, None], first, first, first)
    return rotary


@triton.jit
def inverse_rotary(along, across, phase, C: tl.constexpr):
    """(A, B) less ``phase``: the inverse of a rotary embedding."""
    cosine, sine = cosine_sine(phase, C.features.use_asm)
    return along * cosine + across * sine, across * cosine - along * sine


@triton.jit
def add_rotary_scores(s, rotary, tile, C: tl.constexpr):
    """Scores and ``q . R_j b``, in log2 units."""
    UPCAST: tl.constexpr = C.features.upcast_dots
    if C.tile.decode:
        along, across = inverse_rotary(rotary.along, rotary.across, rotary.steps * (rotary.first + tile.first), C)
        along, across = along.to(rotary.cosines.dtype), across.to(rotary.cosines.dtype)
        if not C.tile.keys_first:
            s = dot(across, rotary.sines, dot(along, rotary.cosines, s, UPCAST), UPCAST)
        elif C.tile.narrow_n:
            s = s + first_columns(dot(rotary.sines, across, dot(rotary.cosines, along, None, UPCAST), UPCAST), C)
        else:
            s = dot(rotary.sines, across, dot(rotary.cosines, along, s, UPCAST), UPCAST)
    else:
        cosines, sines = cosine_sine(rotary.steps * (rotary.first + tile.position)[None, :], C.features.use_asm)
        cosines, sines = (cosines * SHARE).to(rotary.along.dtype), (sines * SHARE).to(rotary.along.dtype)
        s = dot(rotary.across, sines, dot(rotary.along, cosines, s, UPCAST), UPCAST)
    return s
