"""int4 attention. The codes are never turned into numbers by a conversion: a masked nibble *is* a number.

A 16-bit lane holds four nibbles. ``lane & 0x000f``, read as float16, is the subnormal ``n * 2^-24``, and ``lane & 0x00f0`` is
``16 n * 2^-24``; the powers of two fold into the query's columns and the output's unit. Scales and zero points never touch an element
either:

    sum_c q_c (n_c - z) s = s (sum_c q_c n_c - z sum_c q_c)        for K: one multiplication per score, as the product's start
    sum_j p_j s_j (n_j - z_j) = sum_j w_j n_j - sum_j w_j z_j      for V: w = p s, and one sum a row and tile

Queries are rotated like the keys, outputs un-rotated once (codec.py). Each query row is scaled to fit float16 (row_factors).
"""

import triton
import triton.language as tl

from kvq_core.kernels.dots import dot
from kvq_core.kernels.masks import by_key, by_row
from kvq_core.kernels.pieces import attend_pieces
from kvq_core.kernels.prefetch import prefetch_first
from kvq_core.kernels.products import accumulate, accumulated_rows, accumulator, operand, operands, query_operand, scores, unweigh, weigh
from kvq_core.kernels.queries import largest_in_row, load_queries, query_streams, row_factors
from kvq_core.kernels.scores import finish_scores, score_base, score_unit, softmax_unit
from kvq_core.kernels.shares import query_rows
from kvq_core.kernels.softmax import softmax_end, softmax_start, softmax_step
from kvq_core.kernels.splits import finish
from kvq_core.kernels.tiles import first_blocks, key_tile, load_pieces, load_scales, places, seen_tiles, tiles_of, unmasked_tiles
from kvq_core.launch import launch_attention
from kvq_core.launched import Launched
from kvq_core.spec import Attention
from kvq_int4.write import FORMAT

SUBNORMAL = tl.constexpr(2.0**24)  # float16's smallest step is 2^-24


def launch_read(attention: Attention) -> Launched:
    """Run the kernel on a validated problem."""
    return launch_attention(attend, attention, FORMAT, "kvq_int4.prefill", "kvq_int4.drafts")


@triton.jit(do_not_specialize=["num_seqs", "table_stride", "table_width", "num_blocks"])
def attend(
    queries,
    keys,
    values,
    output,
    output_scale,
    batch,
    scoring,
    splits,
    partials,
    num_seqs,
    table_stride,
    table_width,
    num_blocks,
    C: tl.constexpr,
):
    attend_pieces(
        attend_piece, queries, keys, values, output, output_scale, batch, scoring, splits, partials, num_seqs, table_stride, table_width,
        num_blocks, C,
    )  # fmt: skip


@triton.jit
def attend_piece(
    work, kv_head, queries, keys, values, output, output_scale, batch, scoring, splits, partials, table_stride, num_blocks, C: tl.constexpr
):
    K_HEADS: tl.constexpr = C.key_heads
    V_HEADS: tl.constexpr = C.value_heads
    rows = query_rows(work, queries, kv_head, scoring, C)
    x = load_queries(queries, rows, C)
    seen = seen_tiles(work, scoring, C)
    ids = first_blocks(seen, work, batch, table_stride, C)
    prefetch_first(keys, values, work, kv_head, batch, table_stride, num_blocks, scoring, True, C)
    q, unit, q_sum = half_queries(query_streams(x, work, C), score_unit(scoring), C)
    q = query_operand(q, C)
    left = softmax_unit(unit, scoring)
    state = softmax_start(C)
    acc = accumulator(C)
    largest = 1e-30
    unmasked = unmasked_tiles(seen, ids, work, batch, table_stride, num_blocks, C)
    for part in tl.static_range(tl.constexpr(C.parts)):
        tiles = tiles_of(work, unmasked, part, C)
        for t in tl.range(tiles.first, tiles.last, num_stages=C.stages if part == 0 else C.edge_stages):
            tile = key_tile(t, tiles, work, batch, table_stride, num_blocks, scoring, part, C)
            k_place, v_place = places(keys, values, tile, C)
            k = load_pieces(keys, tile, k_place, kv_head, K_HEADS, C, TURNED=C.keys_turned)
            k_word, v_word = load_scales(keys, values, tile, kv_head, C)
            k_scale, k_zero = split_word(k_word)
            v_scale, _ = split_word(v_word)
            v = load_pieces(values, tile, v_place, kv_head, V_HEADS, C, TURNED=C.keys_first)
            k, v = operands(k, unpack_keys, C), operands(v, unpack_values, C)
            s = scores(q, k, by_key(k_zero, C) * by_row(q_sum, C), C)
            s = finish_scores(s, unit, k_scale, rows, tile, work, scoring, part, C)
            p, alpha, state = softmax_step(s, left, state, C)
            weights, shrink, largest = weigh(p, v_scale, largest, C)
            zeros = weighted_zeros(weights, v_word, C)
            acc = accumulate(weights, v, acc, alpha * shrink, zeros * (16.0 / SUBNORMAL), C)
    acc = accumulated_rows(acc, SUBNORMAL / 16.0 * unweigh(largest), C)
    finish(acc, softmax_end(state, left, score_base(scoring), C), output, output_scale, rows, work, kv_head, partials, splits, scoring, C)


@triton.jit
def half_queries(q, unit, C: tl.constexpr):
    """(float16 streams with the keys' powers of two folded in, factor of their products [ROWS], a zero point's effect [ROWS])."""
    factor, left = row_factors(largest_in_row(q), unit)
    total = tl.zeros_like(left)
    half = ()
    for s in tl.static_range(4):
        fold = 1.0 if C.decode and s % 2 == 0 else 0.0625
        x = (q[s] * (factor * fold)[:, None]).to(tl.float16)
        total += tl.sum(x.to(tl.float32), 1) * (1.0 / fold)
        half = half + (x,)
    return half, left * (SUBNORMAL / C.key_heads.block), total * (-1.0 / SUBNORMAL)


@triton.jit
def split_word(word):
    """Scale words -> (scale, zero point), float32."""
    bits = word.to(tl.int32, bitcast=True)
    return (bits & -16).to(tl.float32, bitcast=True), (bits & 0xF).to(tl.float32)


@triton.jit
def weighted_zeros(weights, v_word, C: tl.constexpr):
    """sum_j w_j z_j, [ROWS] float32. Where 16 rows come first it is a product: 16 z_j is float16 as codes are (:func:`unpack_values`)."""
    if C.keys_turned:
        bits = (v_word.to(tl.int32, bitcast=True) & 0xF) << 4
        z = bits.to(tl.uint16).to(tl.float16, bitcast=True)
        total = tl.reshape(dot(weights, z[:, None], None, C.upcast_dots), [C.rows]) * (SUBNORMAL / 16.0)
    else:
        _, z = split_word(v_word)
        total = tl.sum(weights.to(tl.float32) * by_key(z, C), 0 if C.keys_first else 1)
    return total


@triton.jit
def unpack_keys(lanes, C: tl.constexpr):
    """16-bit lanes -> float16 streams ``n, 16 n, n, 16 n`` in units of 2^-24 in decode, else channels of ``16 n``."""
    if not C.decode:
        streams = unpack_values(lanes, C)
    elif C.use_asm:
        streams = unpack_keys_asm(lanes)
    else:
        high = lanes >> 8
        streams = (
            (lanes & 0x000F).to(tl.float16, bitcast=True),
            (lanes & 0x00F0).to(tl.float16, bitcast=True),
            (high & 0x000F).to(tl.float16, bitcast=True),
            (high & 0x00F0).to(tl.float16, bitcast=True),
        )
    return streams


@triton.jit
def unpack_keys_asm(lanes):
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 high;
        shr.u32 high, $4, 8;
        and.b32 $0, $4, 0x000f000f;
        and.b32 $1, $4, 0x00f000f0;
        and.b32 $2, high, 0x000f000f;
        and.b32 $3, high, 0x00f000f0;
        }
        """,
        "=&r,=&r,=&r,=&r,r",
        [lanes],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def unpack_values(lanes, C: tl.constexpr):
    """16-bit lanes -> float16 operands ``16 n`` in units of 2^-24.

    The tensor cores truncate a subnormal's product as if it had the exponent of the smallest normal number: four bits less are lost of
    16 n than of n. What n loses is a bias that all channels of a stream share, which un-rotation gathers in one or two channels (measured
    on sm_90). For scores it does not matter: there it is the same for every key.
    """
    if C.use_asm:
        streams = unpack_values_asm(lanes)
    else:
        streams = (
            ((lanes << 4) & 0x00F0).to(tl.uint16).to(tl.float16, bitcast=True),
            (lanes & 0x00F0).to(tl.float16, bitcast=True),
            ((lanes >> 4) & 0x00F0).to(tl.float16, bitcast=True),
            ((lanes >> 8) & 0x00F0).to(tl.float16, bitcast=True),
        )
    return operand(streams, tl.constexpr(C.keys), C)


@triton.jit
def unpack_values_asm(lanes):
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 x;
        shl.b32 x, $4, 4;
        and.b32 $0, x, 0x00f000f0;
        and.b32 $1, $4, 0x00f000f0;
        shr.u32 x, $4, 4;
        and.b32 $2, x, 0x00f000f0;
        shr.u32 x, $4, 8;
        and.b32 $3, x, 0x00f000f0;
        }
        """,
        "=&r,=&r,=&r,=&r,r",
        [lanes],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )
