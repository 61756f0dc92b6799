"""The end of a piece: the result itself if a row block has no other, else a share of it (shares.py), for a merge.

Either the last program to leave a share merges (tree.py), or a launch of its own does (merge.py), for which the program that takes a row
block's first piece notes how many there are and where they start.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from kvq_core.kernels.args import LOG2E, SoftmaxState
from kvq_core.kernels.results import write_rows
from kvq_core.kernels.shares import share_row, store_shares
from kvq_core.kernels.tree import climb


@triton.jit
def finish(acc, state, output, output_scale, rows, work, kv_head, partials, splits, scoring, C: tl.constexpr):
    """End of a piece: the result itself if the whole row is here, else this piece's share of it."""
    if C.overlap:
        # The merge may be put in place; it waits for this launch's end before it reads.
        gdc_launch_dependents()
    if C.shifted and scoring.softcap is None:
        # Scores were all short of it, which the softmax does not see, but a sink does. A softcap has had it.
        state = SoftmaxState(state.max + rows.shift * LOG2E, state.sum)
    if C.split == "":
        write_rows(acc, state, output, output_scale, rows.token, rows.head, rows.valid, scoring, C)
    else:
        if C.fanin == 0:
            note_plan(work, kv_head, partials, C)
        if work.num_pieces == 1:
            write_rows(acc, state, output, output_scale, rows.token, rows.head, rows.valid, scoring, C)
        else:
            store_shares(state, acc, share_row(work, kv_head, rows.token, rows.head, splits, C), rows.valid, partials, C)
            if C.fanin > 0:
                climb(work, kv_head, output, output_scale, partials, splits, scoring, C)


@triton.jit
def note_plan(work, kv_head, partials, C: tl.constexpr):
    """Tell the merge how many pieces the row block has, and the item of the first."""
    first = (work.unit == 0) & (kv_head == 0)
    note = partials.plan + (work.seq * C.max_row_blocks + work.row_start // C.tokens) * 2
    tl.store(note, work.num_pieces, mask=first)
    tl.store(note + 1, work.item, mask=first)
