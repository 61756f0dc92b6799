"""Operations on operands of drawn types in Triton's interpreter, as it comes or sped up.

    TRITON_INTERPRET=1 python tests/kernels/interpreted_operands.py [--sped-up]

Prints a line for each drawn pair and operation, each done twice: what comes out, bit by bit, or the error.
"""

import itertools
import random
import sys
from typing import Any

import torch
import triton
import triton.language as tl

from kvq_core.testing.interpret.speedup import speed_up

SHAPES = ("number", "column", "row", "tile")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8)
CONSTANTS = (0, 0.0, 3, 3.0, True)
OPERATIONS = ("+", "-", "*", "/", "//", "%", "&", "<<", "<", "==", "maximum", "where", "address")
ROWS, COLUMNS = 4, 8
COUNT = 250


@triton.jit
def operate(left, right, source, out, OPERATION: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    # A constant in a variable would be a tensor.
    if LEFT == "constant":
        y = result_of(left, operand(right, RIGHT), source, OPERATION)
    elif RIGHT == "constant":
        y = result_of(operand(left, LEFT), right, source, OPERATION)
    else:
        y = result_of(operand(left, LEFT), operand(right, RIGHT), source, OPERATION)
    row = tl.arange(0, 4)[:, None]
    column = tl.arange(0, 8)[None, :]
    tl.store(out + (row * 8 + column), tl.broadcast_to(y.to(tl.float64), [4, 8]))
    tl.store(out + (32 + row * 8 + column), (y + tl.zeros([4, 8], tl.int32)).to(tl.float64))


@triton.jit
def result_of(a, b, source, OPERATION: tl.constexpr):
    if OPERATION == "+":
        y = a + b
    elif OPERATION == "-":
        y = a - b
    elif OPERATION == "*":
        y = a * b
    elif OPERATION == "/":
        y = a / b
    elif OPERATION == "//":
        y = a // b
    elif OPERATION == "%":
        y = a % b
    elif OPERATION == "&":
        y = a & b
    elif OPERATION == "<<":
        y = a << b
    elif OPERATION == "<":
        y = a < b
    elif OPERATION == "==":
        y = a == b
    elif OPERATION == "maximum":
        y = tl.maximum(a, b)
    elif OPERATION == "where":
        y = tl.where(a < b, a, b)
    else:
        y = tl.load(source + a + b)
    return y


@triton.jit
def operand(given, KIND: tl.constexpr):
    row = tl.arange(0, 4)[:, None]
    column = tl.arange(0, 8)[None, :]
    if KIND == "number":
        return tl.load(given)
    elif KIND == "column":
        return tl.load(given + row)
    elif KIND == "row":
        return tl.load(given + column)
    return tl.load(given + (row * 8 + column))


def main() -> None:
    if "--sped-up" in sys.argv:
        speed_up()
    draw = random.Random(0)
    kinds, constants = list(itertools.product(SHAPES, DTYPES)), [("constant", value) for value in CONSTANTS]
    source = torch.arange(64.0)
    for number in range(COUNT):
        operation = draw.choice(OPERATIONS)
        pair = draw.sample([draw.choice(kinds), draw.choice(draw.choice((kinds, constants)))], k=2)
        for _ in range(2):
            rows = {dtype: torch.tensor([draw.randrange(6) for _ in range(ROWS * COLUMNS)]).to(dtype) for dtype in DTYPES}
            print(number, operation, pair, result(operation, pair, rows, source))


def result(operation: str, pair: list[tuple[str, Any]], rows: dict[torch.dtype, torch.Tensor], source: torch.Tensor) -> object:
    """The bits of what comes out, in float64, and of what comes of that; or the error's name."""
    out = torch.zeros(2 * ROWS * COLUMNS, dtype=torch.float64)
    given = [tl.constexpr(value) if shape == "constant" else rows[value] for shape, value in pair]
    try:
        operate[(1,)](*given, source, out, operation, *(shape for shape, _ in pair))
    except Exception as problem:
        return type(problem.__cause__ or problem).__name__
    return out.view(torch.int64).tolist()


if __name__ == "__main__":
    main()
