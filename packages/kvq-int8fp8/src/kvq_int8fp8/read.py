"""int8 and fp8 attention over 16-bit lanes of two codes. No integer is converted to a float.

int8: with its sign bit flipped a code is ``n = code + 128`` in 0..255, and ``n`` read as float16 is the subnormal ``n * 2^-24``, exact
in a tensor-core product. The 128 comes off a whole sum at a time: ``sum_c q_c (n_c - 128) = sum_c q_c n_c - 128 sum_c q_c``.

fp8: an e4m3 number's exponent and mantissa, moved to where float16 keeps them, are the number times 2^-8; subnormals included. Where the
hardware converts two at once (sm_89 and later), it does, and they are the number itself, or NaN.

The values' scales join the probabilities, the keys' the scores. Each query row is scaled to fit float16 (row_factors).
"""

import triton
import triton.language as tl

from kvq_core.kernels.masks import by_row
from kvq_core.kernels.pieces import attend_pieces
from kvq_core.kernels.prefetch import prefetch_first
from kvq_core.kernels.products import (
    accumulate,
    accumulated_rows,
    accumulator,
    operand,
    operands,
    query_operand,
    scores,
    seed_of_rows,
    unweigh,
    weigh,
)
from kvq_core.kernels.queries import largest_in_row, load_queries, query_streams, row_factors
from kvq_core.kernels.scores import finish_scores, score_base, score_unit, softmax_unit
from kvq_core.kernels.shares import query_rows
from kvq_core.kernels.softmax import softmax_end, softmax_start, softmax_step
from kvq_core.kernels.splits import finish
from kvq_core.kernels.tiles import first_blocks, key_tile, load_pieces, load_scales, places, seen_tiles, tiles_of, unmasked_tiles
from kvq_core.launch import launch_attention
from kvq_core.launched import Launched
from kvq_core.spec import Attention
from kvq_int8fp8.unpacking import convert_fp8_asm, unpack_fp8_asm, unpack_int8_asm
from kvq_int8fp8.write import format_of

INT8_UNIT = tl.constexpr(2.0**24)
FP8_UNIT = tl.constexpr(2.0**8)


def launch_read(attention: Attention, *, is_int8: bool, per_tensor: bool) -> Launched:
    """Run the kernel on a validated problem."""
    return launch_attention(attend, attention, format_of(is_int8, per_tensor), "kvq_int8fp8.prefill", "kvq_int8fp8.drafts")


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
    INT8: tl.constexpr = C.format.variant == "int8"
    PER_TENSOR: tl.constexpr = C.format.variant == "fp8_per_tensor"
    # Where the hardware converts, a code of NaN is one: those of invalid keys must not come in.
    CLEAR: tl.constexpr = not INT8 and C.fp8_hardware
    UNIT: tl.constexpr = INT8_UNIT if INT8 else (1.0 if C.fp8_hardware else FP8_UNIT)
    # Sums of fp8 codes times the scale of a huge key overflow, unless the query's small factor comes first.
    SMALL_FIRST: tl.constexpr = not INT8 and not PER_TENSOR
    K_HEADS: tl.constexpr = C.key_heads
    V_HEADS: tl.constexpr = C.value_heads
    rows = query_rows(work, queries, kv_head, scoring, C)
    factor = score_unit(scoring)
    if PER_TENSOR:
        factor = factor * tl.load(keys.scales)
    x = load_queries(queries, rows, C)
    seen = seen_tiles(work, scoring, C)
    ids = first_blocks(seen, work, batch, table_stride, C)
    prefetch_first(keys, values, work, kv_head, batch, table_stride, num_blocks, scoring, not PER_TENSOR, C)
    q, unit, q_sum = half_queries(query_streams(x, work, C), factor, UNIT, C)
    seed = None
    if INT8:
        seed = seed_of_rows(q_sum * (-128.0 / UNIT), C)
    q = query_operand(q, C)
    one = unit
    if SMALL_FIRST:
        one = tl.full(unit.shape, 1.0, tl.float32)
    left = softmax_unit(one, scoring)
    state = softmax_start(C)
    acc = accumulator(C)
    largest = 1e-30
    unmasked = unmasked_tiles(seen, ids, work, batch, table_stride, num_blocks, C)
    for part in tl.static_range(tl.constexpr(C.parts)):
        tiles = tiles_of(work, unmasked, part, C)
        for t in tl.range(tiles.first, tiles.last, num_stages=C.stages if part == 0 else C.edge_stages):
            tile = key_tile(t, tiles, work, batch, table_stride, num_blocks, scoring, part, C)
            k_place, v_place = places(keys, values, tile, C)
            k = load_pieces(keys, tile, k_place, kv_head, K_HEADS, C, TURNED=C.keys_turned, CLEAR=CLEAR)
            v = load_pieces(values, tile, v_place, kv_head, V_HEADS, C, TURNED=C.keys_first, CLEAR=CLEAR)
            if PER_TENSOR:
                k_scale = None
            else:
                k_scale, v_scale = load_scales(keys, values, tile, kv_head, C)
            k, v = operands(k, unpack, C), operands(v, unpack, C)
            s = scores(q, k, seed, C)
            if SMALL_FIRST:
                s = s * by_row(unit, C)
            s = finish_scores(s, one, k_scale, rows, tile, work, scoring, part, C)
            p, alpha, state = softmax_step(s, left, state, C)
            if PER_TENSOR:
                weights = (p * 256.0).to(tl.float16)
            else:
                weights, shrink, largest = weigh(p, v_scale, largest, C)
                alpha = alpha * shrink
            offset = None
            if INT8:
                offset = tl.sum(weights.to(tl.float32), 0 if C.keys_first else 1) * (128.0 / UNIT)
            acc = accumulate(weights, v, acc, alpha, offset, C)
    if PER_TENSOR:
        largest = tl.load(values.scales)
    acc = accumulated_rows(acc, UNIT * unweigh(largest), C)
    finish(acc, softmax_end(state, left, score_base(scoring), C), output, output_scale, rows, work, kv_head, partials, splits, scoring, C)


@triton.jit
def half_queries(q, factor, UNIT: tl.constexpr, C: tl.constexpr):
    """(float16 streams, what is left to multiply their products by [ROWS], sum of each row [ROWS])."""
    factors, left = row_factors(largest_in_row(q), factor)
    total = tl.zeros_like(left)
    half = ()
    for s in tl.static_range(2):
        x = (q[s].to(tl.float32) * factors[:, None]).to(tl.float16)
        total += tl.sum(x.to(tl.float32), 1)
        half = half + (x,)
    return half, left * UNIT, total


@triton.jit
def unpack(lanes, C: tl.constexpr):
    """16-bit lanes -> float16 operands: ``code + 128`` in units of 2^-24; the e4m3 number in units of 2^-8, or of 1 from the hardware."""
    INT8: tl.constexpr = C.format.variant == "int8"
    if INT8:
        if C.use_asm:
            streams = unpack_int8_asm(lanes)
        else:
            offset = lanes ^ 0x8080
            streams = ((offset & 0x00FF).to(tl.float16, bitcast=True), (offset >> 8).to(tl.float16, bitcast=True))
    else:
        if C.fp8_hardware:
            streams = convert_fp8_asm(lanes)
        elif C.use_asm:
            streams = unpack_fp8_asm(lanes)
        else:
            low = ((lanes & 0x0080) << 8) | ((lanes & 0x007F) << 7)
            high = (lanes & 0x8000) | ((lanes & 0x7F00) >> 1)
            streams = (low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True))
    return operand(streams, tl.constexpr(C.keys), C)
