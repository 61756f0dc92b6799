"""Two reads of the same query rows over disjoint keys, combined by their log-sum-exps (:mod:`kvq_core.call.cascade` has the formula)."""

import triton
import triton.language as tl

from kvq_core.kernels.rounding import in_float16


@triton.jit(do_not_specialize=["num_rows"])
def combine_reads_kernel(
    result, result_lse, out, lse, other, other_lse, num_rows, SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Rows are (token, query head) pairs: ``out``, ``other`` and ``result`` [num_rows, SIZE], LSEs [num_rows], all contiguous."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, WIDTH)
    valid = row < num_rows
    mask = valid[:, None] & (channel < SIZE)[None, :]
    offset = row.to(tl.int64)[:, None] * SIZE + channel[None, :]
    one_lse = tl.load(lse + row, mask=valid, other=float("-inf"))
    two_lse = tl.load(other_lse + row, mask=valid, other=float("-inf"))
    one = tl.load(out + offset, mask=mask, other=0.0).to(tl.float32)
    two = tl.load(other + offset, mask=mask, other=0.0).to(tl.float32)
    top = tl.maximum(one_lse, two_lse)
    # Rows that saw nothing: -inf - -inf would be NaN.
    base = tl.where(top == float("-inf"), 0.0, top)
    one_weight, two_weight = tl.exp(one_lse - base), tl.exp(two_lse - base)
    total = one_weight + two_weight
    inverse = tl.where(total == 0.0, 0.0, 1.0 / tl.where(total == 0.0, 1.0, total))
    combined = one * (one_weight * inverse)[:, None] + two * (two_weight * inverse)[:, None]
    y = combined.to(result.dtype.element_ty)
    if result.dtype.element_ty == tl.float16:
        y = in_float16(y)
    tl.store(result + offset, y, mask=mask)
    tl.store(result_lse + row, tl.where(total == 0.0, float("-inf"), base + tl.log(tl.where(total == 0.0, 1.0, total))), mask=valid)
