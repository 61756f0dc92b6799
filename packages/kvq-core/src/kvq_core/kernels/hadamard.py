"""The Hadamard transform of rows held as ways.

With channel ``c = S * lane + s`` the sign ``(-1)^popcount(c & c')`` factors into a lane part and a way part, so that ``H`` is one
small matrix product over the lanes and a butterfly over the S ways, which moves nothing between threads.
"""

import triton
import triton.language as tl

from kvq_core.kernels.dots import dot_signs
from kvq_core.kernels.packing import deinterleave

ROOM = tl.constexpr(2.0**-10)
"""What new rows are multiplied by as they are rotated, so that no sum over a finite row, nor the distance of two, overflows."""


@triton.jit
def lane_matrix(WIDTH: tl.constexpr, BLOCK_LANES: tl.constexpr, zero=0, UNIT: tl.constexpr = 1.0):
    """UNIT times the block-diagonal Sylvester matrix over lanes, [WIDTH, WIDTH] float16. ``zero``: see :mod:`.compiler_hints`."""
    i = zero + tl.arange(0, WIDTH)[:, None]
    j = tl.arange(0, WIDTH)[None, :]
    odd = (i % BLOCK_LANES) & (j % BLOCK_LANES)
    odd = odd ^ (odd >> 8)
    odd = odd ^ (odd >> 4)
    odd = odd ^ (odd >> 2)
    odd = (odd ^ (odd >> 1)) & 1
    sign = tl.where(odd == 1, -UNIT, UNIT)
    return tl.where(i // BLOCK_LANES == j // BLOCK_LANES, sign, 0.0).to(tl.float16)


@triton.jit
def sign_word(SIGNS: tl.constexpr, WORD: tl.constexpr, like):
    """Bits 32 WORD .. 32 WORD + 31 of the sign vector, as a signed word in every place of ``like``."""
    BITS: tl.constexpr = ((SIGNS >> (32 * WORD)) & 0xFFFFFFFF) - ((SIGNS >> (32 * WORD + 31)) & 1) * 0x100000000
    return tl.full(like.shape, BITS, tl.int32)


@triton.jit
def apply_signs(x, channel, SIGNS: tl.constexpr, BLOCK: tl.constexpr, ASM: tl.constexpr = False):
    """D x, where x holds these channels (its shape, or one that broadcasts): a flipped sign bit, exact in every dtype. ASM: 16-bit ones
    two at a time."""
    channel = channel % BLOCK
    words = sign_word(SIGNS, 0, channel)
    for word in tl.static_range(1, (BLOCK + 31) // 32):
        words = tl.where(channel // 32 == word, sign_word(SIGNS, word, channel), words)
    minus = (~words >> (channel % 32)) & 1
    if x.dtype == tl.float32:
        flip = minus << 31
        y = (x.to(tl.int32, bitcast=True) ^ flip).to(tl.float32, bitcast=True)
    elif ASM:
        flip = tl.broadcast_to((minus << 15).to(tl.uint16), x.shape)
        y = tl.inline_asm_elementwise("xor.b32 $0, $1, $2;", "=r,r,r", [x, flip], dtype=x.dtype, is_pure=True, pack=2)
    else:
        flip = (minus << 15).to(tl.uint16)
        y = (x.to(tl.uint16, bitcast=True) ^ flip).to(x.dtype, bitcast=True)
    return y


@triton.jit
def apply_way_signs(x, WAY: tl.constexpr, HEADS: tl.constexpr, FORMAT: tl.constexpr, zero=0):
    """D x of a way [R, WIDTH]; x itself if the format has no signs. A way's own bits fill fewer words than all channels' do."""
    if FORMAT.signs is not None:
        SIGNS: tl.constexpr = FORMAT.way_signs[WAY]
        x = apply_signs(x, zero + tl.arange(0, HEADS.width)[None, :], SIGNS, HEADS.block_lanes)
    return x


@triton.jit
def butterfly(ways, WAYS: tl.constexpr):
    """H over the way index, by adding and subtracting whole ways."""
    result = ways
    if WAYS > 1:
        pairs = butterfly_pairs(ways, WAYS)
        result = ()
        for i in tl.static_range(WAYS // 2):
            result = result + (pairs[2 * i] + pairs[2 * i + 1], pairs[2 * i] - pairs[2 * i + 1])
    return result


@triton.jit
def butterfly_pairs(ways, WAYS: tl.constexpr):
    """All of the butterfly but its last step: pairs (a, b), one after the other, whose sums and differences are the result."""
    if WAYS == 2:
        result = ways
    else:
        low = ()
        high = ()
        for i in tl.static_range(WAYS // 2):
            low = low + (ways[i] + ways[i + WAYS // 2],)
            high = high + (ways[i] - ways[i + WAYS // 2],)
        result = butterfly_pairs(low, WAYS // 2) + butterfly_pairs(high, WAYS // 2)
    return result


@triton.jit
def rotate(ways, HEADS: tl.constexpr, FORMAT: tl.constexpr, UPCAST: tl.constexpr, zero=0):
    """H D x (H x without signs) of rows [R, WIDTH] x WAYS, any float dtype -> float32. Padding lanes must be and stay 0. ``zero``: see
    :mod:`.compiler_hints`."""
    WAYS: tl.constexpr = HEADS.ways
    WIDTH: tl.constexpr = HEADS.width
    matrix = lane_matrix(WIDTH, HEADS.block_lanes, zero)
    mixed = ()
    for s in tl.static_range(WAYS):
        x = apply_way_signs(ways[s], s, HEADS, FORMAT, zero)
        mixed = mixed + (dot_signs(x, matrix, UPCAST),)
    return butterfly(mixed, WAYS)


@triton.jit
def rotated_pairs(x, HEADS: tl.constexpr, SIGNS: tl.constexpr, C: tl.constexpr, UNIT: tl.constexpr = 1.0):
    """:func:`rotate_to_pairs` of new rows, in a write kernel."""
    return rotate_to_pairs(x, HEADS, SIGNS, C.use_asm, C.upcast_dots, UNIT)


@triton.jit
def rotate_to_pairs(x, HEADS: tl.constexpr, SIGNS: tl.constexpr, ASM: tl.constexpr, UPCAST: tl.constexpr, UNIT: tl.constexpr = 1.0):
    """UNIT (a power of two) times what :func:`rotate` gives for rows [ROWS, WAYS * WIDTH] in channel order, a step early: pairs (a, b),
    one after the other, where ways 2 i and 2 i + 1 are a + b and a - b."""
    WAYS: tl.constexpr = HEADS.ways
    WIDTH: tl.constexpr = HEADS.width
    ROWS: tl.constexpr = x.shape[0]
    WIDE: tl.constexpr = x.dtype == tl.float32 and UNIT != 1.0
    # float32 rows before they are taken apart, where the largest would be rounded up; others as they are multiplied.
    if WIDE:
        x = x * UNIT
    matrix = lane_matrix(WIDTH, HEADS.block_lanes, 0, 1.0 if WIDE else UNIT)
    if SIGNS is not None:
        x = apply_signs(x, tl.arange(0, WAYS * WIDTH)[None, :], SIGNS, HEADS.block, ASM)
    if 1 < ROWS and ROWS < 16:
        # Ways one above the other fill the tensor cores' operand, of 16 rows at least.
        stacked = tl.reshape(tl.permute(tl.reshape(x, [ROWS, WIDTH, WAYS]), (2, 0, 1)), [WAYS * ROWS, WIDTH])
        pairs = unstacked_pairs(dot_signs(stacked, matrix, UPCAST), WAYS, ROWS, WIDTH)
    else:
        ways = deinterleave(x, ROWS, WIDTH, WAYS)
        mixed = ()
        for s in tl.static_range(WAYS):
            mixed = mixed + (dot_signs(ways[s], matrix, UPCAST),)
        pairs = butterfly_pairs(mixed, WAYS)
    return pairs


@triton.jit
def way(pairs, s: tl.constexpr, APART: tl.constexpr = 1):
    """Way s of :func:`rotate_to_pairs`, or of pairs whose sums and differences are ways that are so far APART."""
    FIRST: tl.constexpr = 2 * (s // (2 * APART) * APART + s % APART)
    if s // APART % 2 == 0:
        y = pairs[FIRST] + pairs[FIRST + 1]
    else:
        y = pairs[FIRST] - pairs[FIRST + 1]
    return y


@triton.jit
def ways_of(pairs, APART: tl.constexpr):
    """Every :func:`way` of ``pairs``, in order."""
    ways = ()
    for s in tl.static_range(len(pairs)):
        ways = ways + (way(pairs, s, APART),)
    return ways


@triton.jit
def unstacked_pairs(stacked, WAYS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """:func:`butterfly_pairs` of ways one above the other, [WAYS * ROWS, WIDTH]."""
    halves = tl.reshape(stacked, [2, WAYS // 2 * ROWS, WIDTH])
    low, high = tl.split(tl.permute(halves, (1, 2, 0)))
    if WAYS == 2:
        pairs = (low, high)
    else:
        HALF: tl.constexpr = WAYS // 2
        pairs = unstacked_pairs(low + high, HALF, ROWS, WIDTH) + unstacked_pairs(low - high, HALF, ROWS, WIDTH)
    return pairs


@triton.jit
def unrotate(ways, HEADS: tl.constexpr, FORMAT: tl.constexpr, UPCAST: tl.constexpr, MIXED: tl.constexpr = False, zero=0):
    """D H y (H y without signs) of float32 rows; the caller divides by the block if the format asks for it.

    MIXED: of rows that went through :func:`butterfly`. ``zero``: see :mod:`.compiler_hints`."""
    WAYS: tl.constexpr = HEADS.ways
    WIDTH: tl.constexpr = HEADS.width
    matrix = lane_matrix(WIDTH, HEADS.block_lanes, zero)
    if not MIXED:
        ways = butterfly(ways, WAYS)
    result = ()
    for s in tl.static_range(WAYS):
        result = result + (apply_way_signs(dot_signs(ways[s], matrix, UPCAST), s, HEADS, FORMAT, zero),)
    return result


@triton.jit
def unrotate_row(x, channel, HEADS: tl.constexpr, SIGNS: tl.constexpr, MIXED: tl.constexpr):
    """:func:`unrotate` of one row, [WAYS, WIDTH] float32, of these channels; if MIXED, of any number of its ways.

    Sums, since a single row is no work for a tensor core."""
    lanes = lane_matrix(HEADS.width, HEADS.block_lanes).to(tl.float32)
    y = tl.sum(x[:, :, None] * lanes[None, :, :], 1)
    if HEADS.ways > 1 and not MIXED:
        ways = lane_matrix(HEADS.ways, HEADS.ways).to(tl.float32)
        y = tl.sum(ways[:, :, None] * y[:, None, :], 0)
    if SIGNS is not None:
        y = apply_signs(y, channel, SIGNS, HEADS.block)
    return y
