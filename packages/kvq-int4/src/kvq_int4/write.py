"""int4 write: rotate, quantize, pack and scatter K and V rows in one launch. The mathematics is codec.py's, word for word."""

import triton
import triton.language as tl

from kvq_core.hadamard import sign_bits
from kvq_core.kernels.facts import Format
from kvq_core.kernels.packing import from_streams
from kvq_core.kernels.rotation import rotated_pairs, stream
from kvq_core.kernels.rounding import reciprocal
from kvq_core.kernels.slots import load_rows, new_rows, store_lanes, store_scales
from kvq_core.launch import launch_rows
from kvq_core.launched import Launched
from kvq_core.spec import NewRows
from kvq_int4.codec import CLIP as _CLIP
from kvq_int4.codec import LEVELS
from kvq_int4.codec import MIN_SCALE as _MIN_SCALE
from kvq_int4.codec import SMALLEST_LENGTH as _SMALLEST_LENGTH

FORMAT = Format(streams=4, rotated=True, signs=sign_bits(0, 256))
MIN_SCALE = tl.constexpr(_MIN_SCALE)
CLIP = tl.constexpr(_CLIP)
SMALLEST_LENGTH = tl.constexpr(_SMALLEST_LENGTH)
STEP = tl.constexpr((1 - 2 * _CLIP) / (LEVELS - 1))


def launch_write(rows: NewRows) -> Launched:
    """Run the kernel on validated rows."""
    return launch_rows(write, rows, FORMAT, "kvq_int4.fragments")


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def write(key, value, keys, values, slot_mapping, num_tokens, num_slots, C: tl.constexpr):
    K_HEADS: tl.constexpr = C.key_heads
    V_HEADS: tl.constexpr = C.value_heads
    rows = new_rows(slot_mapping, num_tokens, num_slots, C)
    if tl.program_id(1) == 0:
        write_plane(key, keys, rows, K_HEADS, C)
    else:
        write_plane(value, values, rows, V_HEADS, C)


@triton.jit
def write_plane(source, plane, rows, HEADS: tl.constexpr, C: tl.constexpr):
    SIGNS: tl.constexpr = C.format.signs
    # Of few rows the rotation's matrix would be most of the work.
    FINE: tl.constexpr = HEADS.finer if C.rows < 16 else HEADS
    STREAMS: tl.constexpr = FINE.streams
    lanes, words = quantized(rotated_pairs(load_rows(source, rows, HEADS, C), FINE, SIGNS, C), False, 1, HEADS, C)
    store_lanes(plane, rows, from_streams(lanes, C.rows, FINE.width, STREAMS // 4), HEADS, C)
    store_scales(plane, rows, words)


@triton.jit
def quantized(pairs, IS_VALUE: tl.constexpr, APART: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr):
    """Rotated rows -> packed lanes [ROWS, WIDTH], a tensor for every four streams, and scale words [ROWS]. Values as keys.

    ``pairs``, APART: as in :func:`kvq_core.kernels.rotation.stream`."""
    STREAMS: tl.constexpr = len(pairs)
    # The larger of a + b and a - b is a + |b|: additions have twice the rate of comparisons.
    low = pairs[0] - tl.abs(pairs[1])
    high = pairs[0] + tl.abs(pairs[1])
    for i in tl.static_range(1, STREAMS // 2):
        low = tl.minimum(low, pairs[2 * i] - tl.abs(pairs[2 * i + 1]))
        high = tl.maximum(high, pairs[2 * i] + tl.abs(pairs[2 * i + 1]))
    # Padding lanes are 0, and 0 is in the range.
    low = tl.minimum(tl.min(low, 1), 0.0)
    high = tl.maximum(tl.max(high, 1), 0.0)
    step = tl.maximum((high - low) * STEP, MIN_SCALE)
    inverse = reciprocal(step, C.use_asm)
    zero = tl.minimum(tl.maximum(tl.floor((low + CLIP * (high - low)) * -inverse + 0.5), 0.0), 15.0)
    lanes = ()
    for first in tl.static_range(0, STREAMS, 4):
        for s in tl.static_range(4):
            y = stream(pairs, first + s, APART)
            if C.use_asm:
                offset = sixteenths(y, inverse, zero)
                # Of sums of floats, at twice the rate of shifts, the last mantissa bits are the lane: offsets and zero points make codes.
                part = offset * (1 << (4 * s))
                if s == 0:
                    part += (zero * (4369.0 / 16) + 524288.0)[:, None]
            else:
                # Clamped below 16 first: flooring gives the same code.
                code = tl.floor(tl.minimum(tl.maximum(y * inverse[:, None] + (zero + 0.5)[:, None], 0.0), 15.5)).to(tl.int32)
                offset = code.to(tl.float32) - zero[:, None]
                part = code << (4 * s)
            if s == 0:
                lane = part
            else:
                lane += part
            if first + s == 0:
                length = y * y
                shadow = y * offset
            else:
                length += y * y
                shadow += y * offset
        lanes = lanes + (lane.to(tl.int32, bitcast=True).to(tl.uint16),)
    UNIT: tl.constexpr = 16.0 if C.use_asm else 1.0
    length = tl.sum(length, 1)
    # What is NaN passes both tests.
    scale = tl.where((length < SMALLEST_LENGTH) | (length == float("inf")), step, length / (tl.sum(shadow, 1) * UNIT))
    words = (scale.to(tl.int32, bitcast=True) & -16) | zero.to(tl.int32)
    return lanes, words.to(tl.float32, bitcast=True)


@triton.jit
def sixteenths(y, inverse, zero):
    """Codes less the zero point, over 16. A saturating multiply-add clamps to [0, 1] for nothing, NaN to 0; that times a little less than
    1, plus 2^19 and rounded down, has whole sixteenths, 15 at most."""
    LESS: tl.constexpr = 1 - 2.0**-10
    code = tl.inline_asm_elementwise(
        "fma.rn.sat.f32 $0, $1, $2, $3; fma.rz.f32 $0, $0, 0f3F7FC000, 0f49000000;",
        "=&f,f,f,f",
        [y, (inverse * (0.0625 / LESS))[:, None], ((zero + 0.5) * (0.0625 / LESS))[:, None]],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )
    return code - (zero * 0.0625 + 524288.0)[:, None]
