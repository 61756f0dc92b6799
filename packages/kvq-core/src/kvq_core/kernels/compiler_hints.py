"""Hints to the compiler, apart from the mathematics.

*Rematerialization.* What is the same for all work tiles of a program, the rotation's matrix and the rows' offsets, loop-invariant code
motion computes before the loop over work tiles and keeps in registers, also through the loop over keys, which has no use for it. A matrix
over 32 lanes takes 16 registers of a thread. Adding a zero that the compiler cannot prove constant blocks the hoisting.
"""

import triton
import triton.language as tl


@triton.jit
def opaque_zero(x, C: tl.constexpr):
    """0, computed from a number of the work tile's that is never negative; a plain 0 unless C.rematerialized."""
    if C.rematerialized:
        zero = x >> 31
    else:
        zero = 0
    return zero
