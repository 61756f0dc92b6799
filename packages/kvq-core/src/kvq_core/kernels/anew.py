"""What is made anew for each piece of a program's share, though it is the same for all of them.

The compiler takes it out of the loop over pieces and keeps it in registers until the program ends, through the loop over keys as well, which
has no use for it and fewer registers then to order its instructions by. A matrix of 32 lanes is 16 registers a thread, the rows' offsets are
others. So what they are made of gets a zero that only the data knows.
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
