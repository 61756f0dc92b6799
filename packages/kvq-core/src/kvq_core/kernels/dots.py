"""Matrix products that mean the same everywhere."""

import triton
import triton.language as tl


@triton.jit
def dot(a, b, acc, UPCAST: tl.constexpr):
    """acc + a b with float32 accumulation; acc may be None.

    float32 operands are multiplied in full precision. UPCAST is set under the interpreter, whose bfloat16 products are wrong.
    """
    if UPCAST or a.dtype == tl.float32:
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        result = tl.dot(a, b, acc)
    return result


@triton.jit
def dot_signs(x, signs, UPCAST: tl.constexpr):
    """x times a symmetric matrix of +-1 and 0, exact up to float32 summation: float32 operands go in three bfloat16 parts."""
    if UPCAST:
        result = tl.dot(x.to(tl.float32), signs.to(tl.float32), input_precision="ieee")
    elif x.dtype == tl.float32:
        high = x.to(tl.bfloat16)
        rest = x - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        s = signs.to(tl.bfloat16)
        result = tl.dot(low, s)
        result = tl.dot(middle, s, result)
        result = tl.dot(high, s, result)
    else:
        result = tl.dot(x, signs.to(x.dtype))
    return result
