"""The merge without a launch: of a group of programs that share a row block, the one that leaves its share last merges the group's.

Nobody waits: when the last program of all ends, one merge is left to do, and the others were done beside the attention. Groups have
``C.fanin`` shares, and a group's sum is a share of the next level, up to the row's result. Who merges depends on who comes last; what is
added to what does not, so that the result has the same bits every time.

A group counts its arrivals in the cell of its first piece, further on by its level: no other group has that one. The last puts it back to
zero, so that counters are zeros between launches.
"""

import triton
import triton.language as tl

from kvq_core.kernels.args import RowBlock
from kvq_core.kernels.results import write_rows
from kvq_core.kernels.shares import first_share, join_shares, store_shares


@triton.jit
def climb(work, kv_head, output, output_scale, partials, splits, scoring, C: tl.constexpr):
    """Go up the tree from a piece whose share lies in the workspace, as far as this program is the last of its group."""
    block = RowBlock(work.first_token, work.row_start, work.row_start + work.num_rows, work.num_pieces, work.item - work.piece)
    cells = partials.arrived + block.item.to(tl.int64) * tl.num_programs(1) + kv_head
    number = work.piece
    count = work.num_pieces
    apart = 1
    level = 0
    while count > 1:
        first = number // C.fanin * C.fanin
        size = tl.minimum(count - first, C.fanin)
        number = first // C.fanin
        count = (count + C.fanin - 1) // C.fanin
        if size > 1:
            cell = cells + (first * apart + level) * tl.num_programs(1)
            # All threads' stores before the arrival that tells of them, all loads after it.
            tl.debug_barrier()
            before = tl.atomic_add(cell, 1, sem="acq_rel", scope="gpu")
            tl.debug_barrier()
            if before == size - 1:
                tl.store(cell, 0)
                merge_group(first * apart, apart, size, count, block, output, output_scale, partials, splits, scoring, C)
            else:
                count = 0
        apart *= C.fanin
        level += 1


@triton.jit
def merge_group(piece, apart, size, groups, block, output, output_scale, partials, splits, scoring, C: tl.constexpr):
    """Merge ``size`` shares, of ``piece`` and each ``apart``-th piece after it: into the first, or, if there is one group, the result."""
    BESIDE: tl.constexpr = C.pieces_beside
    place = tl.arange(0, 8)
    for tile in tl.static_range(C.rows // 8):
        token, head, valid, row, step = first_share(tile * 8 + place % (8 // BESIDE), block, splits, C)
        row += piece * step
        state, acc = join_shares(row, apart * step, size, valid, partials, BESIDE, C)
        valid = valid & (place < 8 // BESIDE)
        if groups == 1:
            write_rows(acc, state, output, output_scale, token, head, valid, scoring, C)
        else:
            # Its loads are done in every thread before one of them stores.
            tl.debug_barrier()
            store_shares(state, acc, row, valid, partials, C)
