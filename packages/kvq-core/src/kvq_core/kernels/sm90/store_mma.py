"""New rows rotated in the tensor cores' own fragments: from memory into registers, and from there into packed lanes, without shared memory.

``mma.sync`` has four registers of a left operand in each thread: two neighbours in k, at two places in k and in two rows. If those are
eight channels of one row of ours, as a 16-byte load brings them, nothing has to move: bit 1 of a channel's number says which of a product's
rows it is in, bits 0 and 2, and 4 and 5, which thread's they are, which k. The Hadamard matrix over the four bits in k has 16 columns, of
which a thread holds eight numbers. Over bits 3 and 6 the transform is in products that add up, by the matrix or by its negative, and over
bit 1 in a step of additions, which is left to whoever wants the ways (:func:`kvq_core.kernels.hadamard.way`).

The Triton kernels go by shared memory twice, for the rows and for a matrix of 32 columns, and a thread has eight rows' places to find
instead of two. What is done with rotated rows is each mode's (quantize.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kvq_core.kernels.packing import deinterleave, interleave
from kvq_core.kernels.store import WriteRows, load_rows_at, rows_at, store_lanes_at, store_scales

APART = gl.constexpr(2)
"""Ways whose sum and difference a pair is: those of channel bit 1."""


@gluon.constexpr_function
def product(warps):
    """Results of ``mma.sync``, each warp's 16 rows one below the other."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1], instr_shape=[16, 8])


@gluon.constexpr_function
def left_operand(warps):
    return gl.DotOperandLayout(0, product(warps), 2)


@gluon.constexpr_function
def right_operand(warps):
    return gl.DotOperandLayout(1, product(warps), 2)


@gluon.constexpr_function
def loading(rows, warps, size):
    """Rows [rows, size] as they come from memory: a thread has 16 channels of every 64, of one or two of its warp's 8 or 16 rows."""
    high = [[0, 64]] if size == 128 else []
    return _of_rows(rows, warps, [[0, 1], [0, 2], [0, 4], [0, 8], *high], [[0, 16], [0, 32]], size)


@gluon.constexpr_function
def storing(rows, warps, size, ways):
    """Lanes [rows, size / ways] of the same channels."""
    low = [[0, bit // ways] for bit in (4, 8) if bit >= ways]
    high = [[0, 64 // ways]] if size == 128 else []
    return _of_rows(rows, warps, [*low, *high], [[0, 16 // ways], [0, 32 // ways]], size // ways)


@gluon.constexpr_function
def _of_rows(rows, warps, registers, threads, columns):
    upper = [[8, 0]] if rows == 16 * warps else []
    each = rows // warps
    below = [[each << bit, 0] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout([*registers, *upper], [*threads, [1, 0], [2, 0], [4, 0]], below, [], [rows, columns])


@gluon.jit
def write_rows(key, value, keys, values, slot_mapping, num_tokens, num_slots, quantized, WAYS: gl.constexpr, C: gl.constexpr):
    """A write kernel. ``quantized``: the mode's, which gets rotated rows in WAYS: those of the format, or finer ones, of which a thread
    has fewer values each to put together."""
    LOADED: gl.constexpr = gl.SliceLayout(1, loading(C.rows, C.warps, C.head_size))
    rows = rows_at(gl.arange(0, C.rows, LOADED), slot_mapping, num_tokens, num_slots, C)
    if gl.program_id(1) == 0:
        write_plane(key, keys, rows, quantized, False, WAYS, C)
    else:
        write_plane(value, values, rows, quantized, True, WAYS, C)


@gluon.jit
def write_plane(source, plane, rows, quantized, IS_VALUE: gl.constexpr, WAYS: gl.constexpr, C: gl.constexpr):
    HEADS: gl.constexpr = C.unpadded_heads
    SIGNS: gl.constexpr = C.format.key.signs
    LOADED: gl.constexpr = gl.SliceLayout(0, loading(C.rows, C.warps, HEADS.size))
    STORED: gl.constexpr = storing(C.rows, C.warps, HEADS.size, HEADS.ways)
    x = load_rows_at(gl.arange(0, HEADS.size, LOADED), source, rows, HEADS, C)
    lanes, words = quantized(rotated_pairs(x, HEADS, SIGNS, WAYS, C), IS_VALUE, APART, HEADS, C)
    lanes = interleave(lanes, C.rows, HEADS.size // WAYS, WAYS // HEADS.ways)
    rows = moved(rows, gl.SliceLayout(1, STORED))
    lane = gl.arange(0, HEADS.lanes, gl.SliceLayout(0, STORED))
    store_lanes_at(lane, plane, rows, gl.convert_layout(lanes, STORED), HEADS)
    store_scales(plane, rows, gl.convert_layout(words, gl.SliceLayout(1, STORED)))


@gluon.jit
def moved(rows, LAYOUT: gl.constexpr):
    """The same in another layout's name: each thread keeps what it has."""
    return WriteRows(
        gl.convert_layout(rows.token, LAYOUT),
        gl.convert_layout(rows.head, LAYOUT),
        gl.convert_layout(rows.block, LAYOUT),
        gl.convert_layout(rows.slot, LAYOUT),
        gl.convert_layout(rows.exists, LAYOUT),
        gl.convert_layout(rows.valid, LAYOUT),
    )


@gluon.jit
def rotated_pairs(x, HEADS: gl.constexpr, SIGNS: gl.constexpr, WAYS: gl.constexpr, C: gl.constexpr):
    """ROOM times H D x (H x without signs) of rows [ROWS, size] in ``loading``, a step early: pairs (a, b), one after the other, each
    [ROWS, size / WAYS], of which a + b and a - b are ways that are APART."""
    WARPS: gl.constexpr = C.warps
    UPPER: gl.constexpr = C.rows // (8 * WARPS)  # of a warp's rows, eight or twice eight
    HIGH: gl.constexpr = HEADS.size // 64  # values of channel bit 6
    if SIGNS is not None:
        x = with_signs(x, HEADS.size, SIGNS, C)
    # Warps, and their rows; channel bits 6, 5 and 4, 3, 2, 1, 0. A product's rows, its k, and operands of separate products.
    x = x.reshape([WARPS, UPPER, 8, HIGH, 4, 2, 2, 2, 2]).permute((0, 7, 2, 6, 4, 8, 1, 3, 5))
    COUNT: gl.constexpr = 2 * UPPER * HIGH
    parts = deinterleave(x.reshape([16 * WARPS, 16 * COUNT]), 16 * WARPS, 16, COUNT)
    operands = ()
    for i in gl.static_range(COUNT):
        operands = operands + (gl.convert_layout(parts[i], left_operand(WARPS)),)
    positive = signed_matrix(0, WARPS, x.dtype)
    negative = signed_matrix(1, WARPS, x.dtype)
    products = ()
    for upper in gl.static_range(UPPER):
        for index in gl.static_range(2 * HIGH):
            products = products + (summed(operands, upper * 2 * HIGH, index, 2 * HIGH, WARPS, positive, negative),)
    y = interleave(products, 16 * WARPS, 16, COUNT).reshape([WARPS, 2, 8, 2, 4, 2, UPPER, HIGH, 2])
    y = y.permute((0, 6, 2, 7, 4, 8, 3, 5, 1)).reshape([C.rows, HEADS.size])
    return deinterleave(y, C.rows, HEADS.size // WAYS, WAYS)


@gluon.jit
def with_signs(x, SIZE: gl.constexpr, SIGNS: gl.constexpr, C: gl.constexpr):
    """D x: an exclusive or of two channels at once with two bits of a word that has the signs of all that a thread holds."""
    WORDS: gl.constexpr = sign_words(SIGNS, SIZE)
    channel = gl.arange(0, SIZE, gl.SliceLayout(0, loading(C.rows, C.warps, SIZE)))
    thread = (channel >> 4) & 3
    word = gl.where(thread < 2, gl.where(thread == 0, WORDS[0], WORDS[1]), gl.where(thread == 2, WORDS[2], WORDS[3]))
    pair = (channel >> 1) & 7 | (channel >> 3) & 8
    return gl.inline_asm_elementwise(
        "{ .reg .b32 t; shl.b32 t, $2, $4; lop3.b32 $0, $1, t, 0x80008000, 0x78; }",
        "=r,r,r,r,r,r",
        [x, word[None, :], (15 - pair)[None, :]],
        dtype=x.dtype,
        is_pure=True,
        pack=2,
    )


@gluon.constexpr_function
def sign_words(signs, size):
    """Where signs are negative, of the threads that have channels 16 t .. 16 t + 15 of every 64: bit p of word t is that of the first
    channel of such a thread's p-th pair, bit p + 16 that of the second."""
    words = []
    for t in range(4):
        word = 0
        for pair in range(size // 8):
            for second in range(2):
                channel = 64 * (pair // 8) + 16 * t + 2 * (pair % 8) + second
                word |= (1 - (signs >> channel & 1)) << (pair + 16 * second)
        words.append(word - (word >> 31 << 32))
    return words


@gluon.jit
def signed_matrix(NEGATIVE: gl.constexpr, WARPS: gl.constexpr, DTYPE: gl.constexpr):
    """ROOM times H, or -H, [16, 16]: ROOM, and an exclusive or of two neighbours in k at once with their signs."""
    # Each thread has what it has of a right operand, but for the order: [n, k].
    n = gl.arange(0, 16, gl.SliceLayout(1, left_operand(WARPS)))[:, None]
    k = gl.arange(0, 16, gl.SliceLayout(0, left_operand(WARPS)))[None, :]
    ONES: gl.constexpr = "0x3a803a80" if DTYPE == gl.bfloat16 else "0x14001400"
    # Bits 1 and 2 are the same in all of a thread's registers, and bit 0 is that of neighbours. That the first input's other bits do not
    # count is for the assembly to know alone: equal words the compiler would keep once, and move for every product.
    word = gl.inline_asm_elementwise(
        "{ .reg .b32 t; and.b32 t, $1, 1; mad.lo.u32 t, t, 0x80008000, " + ONES + "; shl.b32 $0, $2, 31; xor.b32 $0, $0, t; }",
        "=&r,r,r",
        [(k >> 1) & (n >> 1) ^ (k >> 2) & (n >> 2), n],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )
    # Bit 3, which registers differ in.
    flipped = ((k >> 3) & (n >> 3) ^ NEGATIVE) & 1
    pair = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;",
        "=r,r,r",
        [gl.where(flipped == 1, word ^ -0x7FFF8000, word)],
        dtype=gl.int16,
        is_pure=True,
        pack=2,
    )
    return gl.convert_layout(pair.to(DTYPE, bitcast=True).permute((1, 0)), right_operand(WARPS))


@gluon.jit
def summed(operands, FIRST: gl.constexpr, PLACE: gl.constexpr, COUNT: gl.constexpr, WARPS: gl.constexpr, positive, negative):
    """H over k, and over COUNT operands from the FIRST on, at PLACE among them."""
    acc = gl.zeros([16 * WARPS, 16], gl.float32, product(WARPS))
    for i in gl.static_range(COUNT):
        if (PLACE & i) == 1 or (PLACE & i) == 2:
            acc = mma_v2(operands[FIRST + i], negative, acc)
        else:
            acc = mma_v2(operands[FIRST + i], positive, acc)
    return acc
