"""Piece by piece: what every attention kernel has around what it does with one piece of work."""

import triton
import triton.language as tl

from kvq_core.kernels.shares import next_work, take_share


@triton.jit
def attend_pieces(
    PIECE: tl.constexpr, queries, keys, values, output, output_scale, batch, scoring, splits, partials, num_seqs, table_stride,
    table_width, num_blocks, C: tl.constexpr,
):  # fmt: skip
    """Call PIECE for each piece of this program's share.

    A row block on its own leaves a program one piece at most. Then there is no loop, out of which the compiler would take all that is the
    same for each piece, and do it before the first load.
    """
    kv_head = tl.program_id(1)
    share = take_share(num_seqs, batch, scoring, splits, C)
    if C.alone:
        if share.next < share.stop:
            work, _ = next_work(share, num_seqs, table_width, batch, scoring, splits, C)
            PIECE(
                work, kv_head, queries, keys, values, output, output_scale, batch, scoring, splits, partials, table_stride, num_blocks, C
            )  # fmt: skip
    else:
        while share.next < share.stop:
            work, share = next_work(share, num_seqs, table_width, batch, scoring, splits, C)
            PIECE(
                work, kv_head, queries, keys, values, output, output_scale, batch, scoring, splits, partials, table_stride, num_blocks, C
            )  # fmt: skip
