"""int2 attention over 16-bit lanes of eight channels, a sign plane and a magnitude plane (codec.py draws them).

``(lane << i) & 0x8080 | 0x0037`` is the float16 subnormal of channel i: -183, -55, 55 or 183 times 2^-24, without an offset to take
off again. Their ratio, 3.327, stands in for Lloyd-Max's 1.5104 / 0.4528 = 3.336; LEVEL keeps the mean square. What this moves
is 0.09 % of a value (rms), against 34 % of the mode itself. Scales never touch an element: the keys' join the scores, the values' the
probabilities. Queries are rotated like the keys, outputs un-rotated once.
"""

import triton
import triton.language as tl

from kvq_core.kernels.fewrows import narrow, narrow_rows
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
from kvq_int2.codec import READ_LEVEL
from kvq_int2.write import FORMAT

# What turns a subnormal +-55 or +-183 into a centroid.
LEVEL = tl.constexpr(READ_LEVEL * 2.0**24)
EIGHT_STREAMS = tl.constexpr("""
    {
    .reg .b32 x;
    lop3.b32 $0, $8, 0x80808080, 0x00370037, 0xea;
    shl.b32 x, $8, 1;
    lop3.b32 $1, x, 0x80808080, 0x00370037, 0xea;
    shl.b32 x, $8, 2;
    lop3.b32 $2, x, 0x80808080, 0x00370037, 0xea;
    shl.b32 x, $8, 3;
    lop3.b32 $3, x, 0x80808080, 0x00370037, 0xea;
    shl.b32 x, $8, 4;
    lop3.b32 $4, x, 0x80808080, 0x00370037, 0xea;
    shl.b32 x, $8, 5;
    lop3.b32 $5, x, 0x80808080, 0x00370037, 0xea;
    shl.b32 x, $8, 6;
    lop3.b32 $6, x, 0x80808080, 0x00370037, 0xea;
    shl.b32 x, $8, 7;
    lop3.b32 $7, x, 0x80808080, 0x00370037, 0xea;
    }
""")
"""A pair of lanes -> its eight streams, each two float16. A shift carries bits from the lower lane into the upper one, but only below those
that the mask keeps."""


def launch_read(attention: Attention) -> Launched:
    """Run the kernel on a validated problem."""
    return launch_attention(attend, attention, FORMAT, "kvq_int2.prefill", "kvq_int2.drafts")


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
    q, unit = half_queries(query_streams(x, work, C), score_unit(scoring), C)
    q, unit = query_operand(q, C), narrow(unit, C)
    scored = narrow_rows(rows, C)
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
            k_scale, v_scale = load_scales(keys, values, tile, kv_head, C)
            v = load_pieces(values, tile, v_place, kv_head, V_HEADS, C, TURNED=C.keys_first)
            k, v = operands(k, unpack, C), operands(v, unpack, C)
            s = finish_scores(scores(q, k, None, C), unit, k_scale, scored, tile, work, scoring, part, C)
            p, alpha, state = softmax_step(s, left, state, C)
            weights, shrink, largest = weigh(p, v_scale, largest, C)
            acc = accumulate(weights, v, acc, alpha * shrink, None, C)
    acc = accumulated_rows(acc, LEVEL * unweigh(largest), C)
    finish(acc, softmax_end(state, left, score_base(scoring), C), output, output_scale, rows, work, kv_head, partials, splits, scoring, C)


@triton.jit
def half_queries(q, unit, C: tl.constexpr):
    """(float16 streams, factor of their products [ROWS])."""
    factor, left = row_factors(largest_in_row(q), unit * (LEVEL * 2.0**-24))
    half = ()
    for s in tl.static_range(8):
        # A padding lane of the keys decodes to a level, not to 0: the query's zeros there are what keeps it out.
        half = half + ((q[s] * factor[:, None]).to(tl.float16),)
    return half, left * (2.0**24)


@triton.jit
def unpack(lanes, C: tl.constexpr):
    """16-bit lanes -> float16 operands of +-55 or +-183, in units of 2^-24."""
    if C.use_asm:
        streams = unpack_asm(lanes)
    else:
        streams = ()
        for i in tl.static_range(8):
            streams = streams + ((((lanes << i) & 0x8080) | 0x0037).to(tl.uint16).to(tl.float16, bitcast=True),)
    return operand(streams, tl.constexpr(C.keys), C)


@triton.jit
def unpack_asm(lanes):
    return tl.inline_asm_elementwise(
        EIGHT_STREAMS,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r",
        [lanes],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )
