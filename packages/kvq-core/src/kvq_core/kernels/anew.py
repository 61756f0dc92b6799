"""What is made anew for each piece of a program's share, though it is the same for all of them.

The compiler would take it out of the loop over pieces, and keep it in registers as long as the program runs: also through the loop over
keys, which has no use for it, and which it orders by the registers that are left. A matrix over 32 lanes takes 16 of a thread's, the rows'
offsets some more. A zero that only the data knows, added to what these are made of, keeps them where they stand.
"""

import triton
import triton.language as tl


@triton.jit
def zero_of(x, C: tl.constexpr):
    """0, of some number of the piece's that is never negative, which the compiler cannot know; a plain 0 where nothing is made anew."""
    if C.made_anew:
        zero = x >> 31
    else:
        zero = 0
    return zero
