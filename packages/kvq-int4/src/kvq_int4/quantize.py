"""int4's writes in Triton: from rotated rows to codes and scale words. The mathematics is codec.py's, word for word."""

import triton
import triton.language as tl

from kvq_core.hadamard import LARGEST_SCALE as _LARGEST_SCALE
from kvq_core.hadamard import sign_bits
from kvq_core.kernels.api import (
    ROOM,
    interleave,
    largest,
    load_rows,
    reciprocal,
    rotated_pairs,
    rounded_scale,
    store_lanes,
    store_scales,
    ways_of,
)
from kvq_int4.codec import CLIP as _CLIP
from kvq_int4.codec import LARGEST_LENGTH as _LARGEST_LENGTH
from kvq_int4.codec import LEVELS
from kvq_int4.codec import MIN_SCALE as _MIN_SCALE
from kvq_int4.codec import SMALLEST_LENGTH as _SMALLEST_LENGTH

SIGNS = tl.constexpr(sign_bits(0, 256))
# Of rows times ROOM.
MIN_SCALE = tl.constexpr(_MIN_SCALE * ROOM.value)
SMALLEST_LENGTH = tl.constexpr(_SMALLEST_LENGTH * ROOM.value**2)
LARGEST_LENGTH = tl.constexpr(_LARGEST_LENGTH * ROOM.value**2)
LARGEST_SCALE = tl.constexpr(_LARGEST_SCALE)
CLIP = tl.constexpr(_CLIP)
STEP = tl.constexpr((1 - 2 * _CLIP) / (LEVELS - 1))


@triton.jit
def write_plane(source, plane, rows, IS_VALUE: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr):
    """New rows into their slots, K and V alike."""
    # Of few rows the rotation's matrix would be most of the work.
    FINE: tl.constexpr = HEADS.finer if C.rows < 16 else HEADS
    WAYS: tl.constexpr = FINE.ways
    lanes, words = quantized(rotated_pairs(load_rows(source, rows, HEADS, C), FINE, SIGNS, C, ROOM), IS_VALUE, 1, HEADS, C)
    store_lanes(plane, rows, interleave(lanes, C.rows, FINE.width, WAYS // 4), HEADS, C)
    store_scales(plane, rows, words)


@triton.jit
def quantized(pairs, IS_VALUE: tl.constexpr, APART: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr):
    """Rotated rows, times ROOM -> packed lanes [ROWS, WIDTH], a tensor for every four ways, and scale words [ROWS]. Values as keys.

    ``pairs``, APART: as in :func:`kvq_core.kernels.hadamard.way`."""
    WAYS: tl.constexpr = len(pairs)
    y = ways_of(pairs, APART)
    low, high = extremes(y, C.use_asm)
    step = tl.maximum((high - low) * STEP, MIN_SCALE)
    inverse = reciprocal(step, C.use_asm)
    zero = tl.minimum(tl.maximum(tl.floor((low + CLIP * (high - low)) * -inverse + 0.5), 0.0), 15.0)
    lanes = ()
    for first in tl.static_range(0, WAYS, 4):
        for s in tl.static_range(4):
            x = y[first + s]
            if C.use_asm:
                code = with_sixteenths(x, inverse, zero)
                offset = code - (zero * 0.0625 + 524288.0)[:, None]
                # Its last four bits; those above end up above the lane.
                part = code.to(tl.int32, bitcast=True) << (4 * s)
            else:
                # Clamped below 16 first: flooring gives the same code.
                code = tl.floor(tl.minimum(tl.maximum(x * inverse[:, None] + (zero + 0.5)[:, None], 0.0), 15.5)).to(tl.int32)
                offset = code.to(tl.float32) - zero[:, None]
                part = code << (4 * s)
            if s == 0:
                lane = part
            else:
                lane += part
            if first + s == 0:
                length = x * x
                shadow = x * offset
            else:
                length += x * x
                shadow += x * offset
        lanes = lanes + (lane.to(tl.uint16),)
    UNIT: tl.constexpr = ROOM * (16.0 if C.use_asm else 1.0)
    length = tl.sum(length, 1)
    fitted = length * reciprocal(tl.sum(shadow, 1) * UNIT, C.use_asm)
    # A range without an end leaves NaN, and a length that is NaN passes both tests.
    step = tl.fma(step, 0.0, tl.minimum(step * (1.0 / ROOM), LARGEST_SCALE))
    scale = tl.where((length < SMALLEST_LENGTH) | (length > LARGEST_LENGTH), step, fitted)
    words = rounded_scale(scale).to(tl.int32, bitcast=True) | zero.to(tl.int32)
    return lanes, words.to(tl.float32, bitcast=True)


@triton.jit
def extremes(y, ASM: tl.constexpr):
    """The least and the largest of each row of ways and 0 (as padding lanes are), [ROWS]. NaN counts as 0, or not at all.

    Floats from 0 up compare as their bits do; below 0 they are the larger as unsigned integers, the further they are from it. Of integers
    a maximum of three can be one instruction.
    """
    high = y[0].to(tl.int32, bitcast=True) & 0
    low = high.to(tl.uint32, bitcast=True)
    for s in tl.static_range(0, len(y), 2):
        high = largest(high, y[s].to(tl.int32, bitcast=True), y[s + 1].to(tl.int32, bitcast=True), ASM)
        low = largest(low, y[s].to(tl.uint32, bitcast=True), y[s + 1].to(tl.uint32, bitcast=True), ASM)
    # The least first: the other way round ptxas (12.8) makes a kernel of int4's fragments that takes 4 % longer.
    low = tl.minimum(tl.max(low, 1).to(tl.float32, bitcast=True), 0.0)
    high = tl.maximum(tl.max(high, 1).to(tl.float32, bitcast=True), 0.0)
    return low, high


@triton.jit
def with_sixteenths(y, inverse, zero):
    """2^19 and codes over 16: floats whose last four mantissa bits are the codes. A saturating multiply-add clamps to [0, 1] for nothing,
    NaN to 0; that times a little less than 1, plus 2^19 and rounded down, has whole sixteenths, 15 at most."""
    LESS: tl.constexpr = 1 - 2.0**-10
    return tl.inline_asm_elementwise(
        "fma.rn.sat.f32 $0, $1, $2, $3; fma.rz.f32 $0, $0, 0f3F7FC000, 0f49000000;",
        "=&f,f,f,f",
        [y, (inverse * (0.0625 / LESS))[:, None], ((zero + 0.5) * (0.0625 / LESS))[:, None]],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )
