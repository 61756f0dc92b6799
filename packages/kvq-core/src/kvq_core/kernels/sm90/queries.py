"""The query rows' way into shared memory and the output's way out, where channels change their order or are rotated."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from kvq_core.kernels.rounding import in_float16
from kvq_core.kernels.sm90.layouts import HALF, OPERAND, PRODUCT, QUERY, ROWS, WEIGHTS, product_layout
from kvq_core.kernels.sm90.renamed import async_load, reinterpreted

LEAST_QUERY = gl.constexpr(2.0**-8)
LARGEST_QUERY = gl.constexpr(2.0**6)
"""Rows for staged keys between them, in log2 units, stay in these. Their scores are then below 2^24, keys being at most
staging.LARGEST_KEY, and float16's numbers are at most 2^-17 of a row's largest channel off."""


@gluon.jit
def channel_at(index, ADJACENT: gl.constexpr, C: gl.constexpr):
    """The channel at an index of an unpacked row: all words' first pairs of channels come first, then all their second ones, and so on.

    A pair of a word is (ADJACENT) of neighbours, or else of one way in the word's two lanes.
    """
    S: gl.constexpr = C.format.key.ways
    channel = index
    if S > 1:
        WORDS: gl.constexpr = C.shape.head_size // (2 * S)
        word = index // 2 % WORDS
        pair = index // (2 * WORDS)
        half = index % 2
        if ADJACENT:
            channel = word * (2 * S) + pair * 2 + half
        else:
            channel = word * (2 * S) + half * S + pair
    return channel


@gluon.jit
def existing(rows, channel, C: gl.constexpr):
    """Which elements there are, of ``rows`` that there are or not: the last channels of a tile may be beyond a head's."""
    mask = rows[:, None]
    if C.channels != C.shape.head_size:
        mask = mask & (channel < C.shape.head_size)[None, :]
    return mask


@gluon.jit
def rows_of(work, GROUP: gl.constexpr, LAYOUT: gl.constexpr, C: gl.constexpr):
    """(token, query head, position, whether there is such a row) of a group's rows, [HALF]."""
    row = GROUP * HALF + gl.arange(0, HALF, LAYOUT)
    index = work.row_start + row // C.shape.group
    valid = (row // C.shape.group < work.num_rows) & (row < C.tokens * C.shape.group)
    return work.first_token + index, work.kv_head * C.shape.group + row % C.shape.group, work.context_len + index, valid


@gluon.jit
def load_queries(work, GROUP: gl.constexpr, BALANCED: gl.constexpr, ADJACENT: gl.constexpr, C: gl.constexpr):
    """A group's rows into its part of the query tile, in the order of the keys' operands; what is left to multiply scores by, [HALF].

    Rows for packed keys are brought to a peak of 1/2 to 1, so that no score overflows, by the score's factor and a power of two. That power
    of two is what is left, as in kvq_core.kernels.queries.row_factors. Rows for staged keys from LEAST_QUERY to LARGEST_QUERY, and zeros,
    are in log2 units, so that 1 is left. Rows for unquantized keys stay as they are.
    """
    channel = gl.arange(0, C.channels, gl.SliceLayout(0, QUERY))
    if C.format.key.rotated and C.format.key.staged:
        copy_matrix(work, GROUP, C)
    if not C.format.key.rotated:
        channel = channel_at(channel, ADJACENT, C)
    place = channel
    if C.format.key.ordered:
        channel = load_channels(work.factor + C.shape.head_size, place, work, C, 2).to(gl.int32, bitcast=True)
    x = load_rows(work, channel, GROUP, C)
    tile = work.tile.index(GROUP)
    y = x
    if BALANCED:
        FACTOR_ROWS: gl.constexpr = 2 if C.format.key.ordered else 1
        y = x.to(gl.float32) * load_channels(work.factor, place, work, C, FACTOR_ROWS)[None, :]
    score_scale = gl.full([HALF], 0.0, gl.float32, ROWS) + work.score_unit
    if not C.format.key.in_float16:
        tile.store(y.to(x.dtype))
    else:
        # Eight bits are a part: what a dtype's numbers have of them.
        PARTS: gl.constexpr = 1 if y.dtype == gl.bfloat16 else (2 if y.dtype == gl.float16 else 3)
        y = y.to(gl.float32)
        if C.format.key.rotated:
            y = rotated(y, tile, work, GROUP, ADJACENT, PARTS, C)
        top = gl.minimum(gl.maximum(gl.max(gl.abs(y), 1) * work.score_unit, 2.0**-100), 2.0**120)
        power = (top.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
        if C.format.key.staged:
            power = gl.where((power >= LEAST_QUERY) & (power < LARGEST_QUERY) | (power == 2.0**-100), 0.5, power)
        tile.store((y * (work.score_unit * (0.5 / power))[:, None]).to(gl.float16))
        score_scale = gl.convert_layout(power, ROWS) * 2.0
    fence_async_shared()
    # Above 0, so that -inf stays what it is.
    return gl.maximum(score_scale, 2.0**-126)


@gluon.jit
def load_rows(work, channel, GROUP: gl.constexpr, C: gl.constexpr):
    """These channels of a group's rows, in QUERY; 0 for those that a head has not."""
    token, head, _, valid = rows_of(work, GROUP, gl.SliceLayout(1, QUERY), C)
    offset = token.to(gl.int64) * work.token_stride + head.to(gl.int64) * work.head_stride
    return gl.load(work.queries + offset[:, None] + channel[None, :], mask=existing(valid, channel, C), other=0.0)


@gluon.jit
def load_channels(table, channel, work, C: gl.constexpr, ROWS_OF_HEAD: gl.constexpr = 1):
    """What ``table`` [kv heads, head size], or the first of ROWS_OF_HEAD rows of each head there, has of these channels; 0 for those that a
    head has not."""
    SIZE: gl.constexpr = C.shape.head_size
    return gl.load(table + work.kv_head * (ROWS_OF_HEAD * SIZE) + channel, mask=channel < SIZE, other=0.0)


@gluon.jit
def score_shift(work, unit, GROUP: gl.constexpr, C: gl.constexpr):
    """What the smoothed keys' mean adds to all scores of a row, ``unit`` times q.mean, [HALF]."""
    channel = gl.arange(0, C.channels, gl.SliceLayout(0, QUERY))
    mean = load_channels(work.mean, channel, work, C)
    return gl.convert_layout(gl.sum(load_rows(work, channel, GROUP, C).to(gl.float32) * mean[None, :], 1) * unit, ROWS)


@gluon.jit
def rotated(y, tile, work, GROUP: gl.constexpr, ADJACENT: gl.constexpr, PARTS: gl.constexpr, C: gl.constexpr):
    """Float32 rows [HALF, D], rotated, by way of ``tile``; their first PARTS times eight bits count. Makes half of the matrix first, unless
    it is being copied."""
    D: gl.constexpr = C.shape.head_size
    parts = reinterpreted(tile, gl.bfloat16, HALF, D, OPERAND)
    if C.format.key.staged:
        async_copy.wait_group(0)
    else:
        work.matrix.slice(GROUP * HALF, HALF).store(matrix_rows(GROUP * HALF, ADJACENT, C))
    fence_async_shared()
    mbarrier.arrive(work.ready, count=1)
    mbarrier.wait(work.ready, 0)
    result = gl.zeros([HALF, D], gl.float32, PRODUCT)
    for _ in gl.static_range(PARTS):
        part = high_part(y)
        y = y - part
        parts.store(part.to(gl.bfloat16))
        fence_async_shared()
        result = warpgroup_mma(parts, work.matrix, result)
    return result


@gluon.jit
def copy_matrix(work, GROUP: gl.constexpr, C: gl.constexpr):
    """Begin to copy a group's half of the matrix, which was made as keys were staged."""
    row = GROUP * HALF + gl.arange(0, HALF, gl.SliceLayout(1, QUERY))
    channel = gl.arange(0, C.shape.head_size, gl.SliceLayout(0, QUERY))
    source = work.matrix_ptr.to(gl.pointer_type(gl.bfloat16), bitcast=True)
    at = source + (row[:, None] * C.shape.head_size + channel[None, :])
    async_load(work.matrix.slice(GROUP * HALF, HALF), at)
    async_copy.commit_group()


@gluon.jit
def unrotated(y, work, PARTS: gl.constexpr, C: gl.constexpr):
    """Float32 rows [HALF, D] in PRODUCT, rotated back and in the channels' order; their first PARTS times eight bits count."""
    D: gl.constexpr = C.shape.head_size
    result = gl.zeros([HALF, D], gl.float32, PRODUCT)
    for _ in gl.static_range(PARTS):
        part = high_part(y)
        y = y - part
        result = warpgroup_mma(gl.convert_layout(part.to(gl.bfloat16), WEIGHTS), work.matrix.permute((1, 0)), result)
    return result


@gluon.jit
def high_part(x):
    """The leading eight bits of float32 ``x``, cut off, not rounded: a bfloat16, still as float32."""
    return (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def matrix_rows(FIRST: gl.constexpr, ADJACENT: gl.constexpr, C: gl.constexpr):
    """Rows FIRST to FIRST + 63 of [channel, place in an unpacked row], +-1 in bfloat16: the codec's rotation (kvq_core.hadamard)."""
    D: gl.constexpr = C.shape.head_size
    SIGNS: gl.constexpr = C.format.key.signs
    channel = FIRST + gl.arange(0, HALF, gl.SliceLayout(1, QUERY))[:, None]
    odd = channel & channel_at(gl.arange(0, D, gl.SliceLayout(0, QUERY))[None, :], ADJACENT, C)
    odd = odd ^ (odd >> 4)
    odd = odd ^ (odd >> 2)
    odd = odd ^ (odd >> 1)
    if SIGNS is not None:
        kept = gl.zeros_like(channel)
        for word in gl.static_range(D // 32):
            kept = gl.where(channel // 32 == word, sign_word(SIGNS, word, channel) >> (channel % 32), kept)
        odd = odd ^ kept ^ 1
    return gl.where((odd & 1) == 1, -1.0, 1.0).to(gl.bfloat16)


@gluon.jit
def sign_word(SIGNS: gl.constexpr, WORD: gl.constexpr, like):
    """Bits 32 WORD .. 32 WORD + 31 of the sign vector, as a signed word in every place of ``like``."""
    BITS: gl.constexpr = ((SIGNS >> (32 * WORD)) & 0xFFFFFFFF) - ((SIGNS >> (32 * WORD + 31)) & 1) * 0x100000000
    return gl.full_like(like, BITS)


@gluon.jit
def store_output(y, share, work, GROUP: gl.constexpr, JOINS: gl.constexpr, ADJACENT: gl.constexpr, C: gl.constexpr):
    """A group's finished float32 rows [HALF, C.channels], if JOINS with ``share`` [HALF] of another read's."""
    OUTPUT: gl.constexpr = product_layout(C.channels)
    channel = gl.arange(0, C.channels, gl.SliceLayout(0, OUTPUT))
    if C.format.key.rotated:
        # Two parts are sixteen bits, more than a 16-bit output keeps.
        PARTS: gl.constexpr = 3 if work.output.dtype.element_ty == gl.float32 else 2
        y = unrotated(y, work, PARTS, C)
    else:
        channel = channel_at(channel, ADJACENT, C)
    token, head, _, valid = rows_of(work, GROUP, gl.SliceLayout(1, OUTPUT), C)
    offset = token.to(gl.int64) * work.out_token_stride + head.to(gl.int64) * work.out_head_stride
    mask = existing(valid, channel, C)
    if JOINS:
        row = token.to(gl.int64) * (gl.num_programs(1) * C.shape.group) + head
        other = gl.load(work.other + (row * C.shape.head_size_v)[:, None] + channel[None, :], mask=mask, other=0.0)
        y += other * gl.convert_layout(share, gl.SliceLayout(1, OUTPUT))[:, None]
    y = y.to(work.output.dtype.element_ty)
    if C.format.key.in_float16 and work.output.dtype.element_ty == gl.float16:
        y = in_float16(y)
    gl.store(work.output + offset[:, None] + channel[None, :], y, mask=mask)
