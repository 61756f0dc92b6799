"""int2 write: rotate, compare with the three boundaries, pack two bit planes and scatter. The mathematics is codec.py's."""

import triton
import triton.language as tl

from kvq_core.kernels.facts import Format
from kvq_core.kernels.rotation import rotated_pairs, stream
from kvq_core.kernels.slots import in_head, load_rows, new_rows, store_lanes, store_scales
from kvq_core.launch import launch_rows
from kvq_core.launched import Launched
from kvq_core.spec import NewRows
from kvq_int2.codec import BOUNDARY as _BOUNDARY
from kvq_int2.codec import INNER as _INNER
from kvq_int2.codec import OUTER as _OUTER

FORMAT = Format(streams=8, rotated=True, few_rows=True)
BOUNDARY = tl.constexpr(_BOUNDARY)
INNER = tl.constexpr(_INNER)
OUTER = tl.constexpr(_OUTER)
SMALLEST_NORMAL = tl.constexpr(2.0**-126)
SHORTEST = tl.constexpr(2.0**-90)


def launch_write(rows: NewRows) -> Launched:
    """Run the kernel on validated rows."""
    return launch_rows(write, rows, FORMAT)


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def write(key, value, keys, values, slot_mapping, num_tokens, num_slots, C: tl.constexpr):
    K_HEADS: tl.constexpr = C.key_heads
    V_HEADS: tl.constexpr = C.value_heads
    rows = new_rows(slot_mapping, num_tokens, num_slots, C)
    if tl.program_id(1) == 0:
        write_plane(key, keys, rows, K_HEADS, False, C)
    else:
        write_plane(value, values, rows, V_HEADS, True, C)


@triton.jit
def write_plane(source, plane, rows, HEADS: tl.constexpr, UNBIASED: tl.constexpr, C: tl.constexpr):
    y = streams_of(rotated_pairs(load_rows(source, rows, HEADS, C), HEADS, None, C))
    squares = squared_lengths(y)
    unit = tl.full(squares.shape, 1.0, tl.float32)
    # Squares of huge values overflow and those of tiny ones vanish, but not of a row over its largest magnitude. The rows beside it stay as
    # they are: bytes do not depend on what else is written.
    extreme = (squares < SHORTEST) | (squares == float("inf"))
    if tl.sum(extreme.to(tl.int32), 0) > 0:
        unit = tl.where(extreme, tl.maximum(peaks(y), SMALLEST_NORMAL), 1.0)
        y = scaled(y, 1.0 / unit)
        squares = squared_lengths(y)
    ROOT: tl.constexpr = HEADS.size**0.5
    # Above 0, so that a row of zeros has inner levels.
    boundary = tl.maximum(tl.sqrt(squares) * (BOUNDARY / ROOT), SMALLEST_NORMAL)
    negative = tl.zeros_like(y[0]).to(tl.uint32)
    inner = tl.zeros_like(negative)
    total = tl.zeros_like(y[0])
    apart = tl.zeros_like(y[0])
    for s in tl.static_range(8):
        beyond = tl.abs(y[s]) - boundary[:, None]
        # Sign bits, shifted in from the right: of y, and of |y| - boundary, which is clear in the outer cells.
        negative = negative << 1 | y[s].to(tl.uint32, bitcast=True) >> 31
        inner = inner << 1 | beyond.to(tl.uint32, bitcast=True) >> 31
        if UNBIASED:
            total += tl.abs(y[s])
            apart += tl.abs(beyond)
    outer = inner ^ 0xFF
    store_lanes(plane, rows, (negative << 8 | outer).to(tl.uint16), HEADS, C)
    num_outer = tl.sum(in_head(bits_set(outer, C.use_asm).to(tl.float32), 0.0, HEADS), 1)
    if UNBIASED:
        # Of |y| - b the positive part is half of itself and its magnitude; b more each, and that is what lies in the outer cells.
        total = tl.sum(total, 1)
        apart = tl.sum(in_head(apart, 0.0, HEADS), 1)
        outside = (total - boundary * HEADS.size + apart) * 0.5 + num_outer * boundary
        factor = squares / tl.maximum(total * INNER + outside * (OUTER - INNER), SMALLEST_NORMAL)
    else:
        factor = tl.sqrt(squares / (num_outer * (OUTER * OUTER - INNER * INNER) + INNER * INNER * HEADS.size))
    # A NaN of the row is in the sum of its squares.
    store_scales(plane, rows, unit * factor * (1.0 / HEADS.block))


@triton.jit
def streams_of(pairs):
    """The eight streams that :func:`rotated_pairs` leaves a step early."""
    result = ()
    for s in tl.static_range(8):
        result = result + (stream(pairs, s),)
    return result


@triton.jit
def squared_lengths(y):
    """<y, y> of each row, [ROWS]."""
    squares = y[0] * y[0]
    for s in tl.static_range(1, 8):
        squares += y[s] * y[s]
    return tl.sum(squares, 1)


@triton.jit
def peaks(y):
    """The largest magnitude of each row, [ROWS]."""
    peak = tl.abs(y[0])
    for s in tl.static_range(1, 8):
        peak = tl.maximum(peak, tl.abs(y[s]))
    return tl.max(peak, 1)


@triton.jit
def scaled(y, factor):
    """Rows times a factor each, [ROWS]."""
    result = ()
    for s in tl.static_range(8):
        result = result + (y[s] * factor[:, None],)
    return result


@triton.jit
def bits_set(x, ASM: tl.constexpr):
    """How many of the low eight bits are set."""
    if ASM:
        count = tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)
    else:
        x = (x & 0x55) + (x >> 1 & 0x55)
        x = (x & 0x33) + (x >> 2 & 0x33)
        count = ((x & 0xF) + (x >> 4)).to(tl.int32)
    return count
