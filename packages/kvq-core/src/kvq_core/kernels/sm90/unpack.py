"""The producer group: pages in memory become operands in shared memory. Its loads run one tile ahead of its unpacking."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from kvq_core.kernels.sm90.copying import copy_staged, copy_tiles
from kvq_core.kernels.sm90.key_places import UNSEEN, key_positions, row_starts
from kvq_core.kernels.sm90.layouts import HALF, OPERAND_PAIRS, VECTOR
from kvq_core.kernels.sm90.renamed import reinterpreted
from kvq_core.kernels.sm90.rotary import fill_rotary


@gluon.jit
def fill_tiles(
    keys, values, span, shared, rotary, COPIED: gl.constexpr,
    SCALED: gl.constexpr, KEY_PRESCALE: gl.constexpr, FINITE: gl.constexpr, UNPACK: gl.constexpr, SCALE_OF: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Tile after tile into the next free buffers."""
    if not COPIED:
        unpack_tiles(keys, values, span, shared, rotary, SCALED, KEY_PRESCALE, FINITE, UNPACK, SCALE_OF, C)
    elif SCALED:
        copy_staged(keys, values, span, shared, C)
    else:
        copy_tiles(keys, values, span, shared, C)


@gluon.jit
def unpack_tiles(
    keys, values, span, shared, rotary,
    SCALED: gl.constexpr, KEY_PRESCALE: gl.constexpr, FINITE: gl.constexpr, UNPACK: gl.constexpr, SCALE_OF: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Tiles of packed rows. While one is unpacked, the next one's loads are on their way."""
    KEYS: gl.constexpr = C.tile.keys
    WORDS: gl.constexpr = C.shape.head_size // (2 * C.format.key.ways)
    LAYOUT: gl.constexpr = word_layout(WORDS)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    k_word = gl.zeros([KEYS], gl.float32, VECTOR)
    v_word = k_word
    largest = gl.to_tensor(1e-30)
    block, slot, seen, key_position = key_positions(0, span, BY_ROW, C)
    k = load_words(keys, block, slot, seen, True, WORDS, LAYOUT, C)
    v = load_words(values, block, slot, seen, FINITE, WORDS, LAYOUT, C)
    block, slot, seen, key_position = key_positions(0, span, VECTOR, C)
    if SCALED:
        k_word = load_scales(keys, block, slot, seen)
        v_word = load_scales(values, block, slot, seen)
    for n in range(0, span.last):
        at = n % C.tile.stages
        free = (n // C.tile.stages) & 1 ^ 1
        row_block, row_slot, row_seen, _ = key_positions(n + 1, span, BY_ROW, C)
        mbarrier.wait(shared.k_free.index(at), free)
        shared.positions.index(at).store(gl.where(seen, key_position, UNSEEN))
        if SCALED:
            shared.k_scales.index(at).store(SCALE_OF(k_word) * KEY_PRESCALE)
        if C.features.rotary_pairs > 0:
            fill_rotary(n, rotary, shared.rotary.index(at), C)
        hand_over(k, gl.convert_layout(k_word, BY_ROW), shared.k.index(at), shared.k_full.index(at), UNPACK, C)
        k = load_words(keys, row_block, row_slot, row_seen, True, WORDS, LAYOUT, C)
        block, slot, seen, key_position = key_positions(n + 1, span, VECTOR, C)
        if SCALED:
            k_word = load_scales(keys, block, slot, seen)
        mbarrier.wait(shared.v_free.index(at), free)
        if SCALED:
            # float16 does not hold weights of 2^16, so scales are taken relative to the largest so far.
            scale = SCALE_OF(v_word)
            largest = gl.maximum(largest, gl.max(scale, 0))
            shared.v_scales.index(at).store(scale * (2.0 / largest))
            shared.v_largest.index(at).store(gl.zeros([HALF], gl.float32, VECTOR) + largest)
        hand_over(v, gl.convert_layout(v_word, BY_ROW), shared.v.index(at), shared.v_full.index(at), UNPACK, C)
        v = load_words(values, row_block, row_slot, row_seen, FINITE, WORDS, LAYOUT, C)
        if SCALED:
            v_word = load_scales(values, block, slot, seen)


@gluon.jit
def hand_over(words, scales, tile, full, UNPACK: gl.constexpr, C: gl.constexpr):
    """Packed rows as operands into ``tile``, which is then announced as full."""
    KEYS: gl.constexpr = C.tile.keys
    WIDTH: gl.constexpr = C.shape.head_size // 2
    reinterpreted(tile, gl.uint32, KEYS, WIDTH, OPERAND_PAIRS).store(UNPACK(words, scales).reshape([KEYS, WIDTH]))
    fence_async_shared()
    mbarrier.arrive(full, count=1)


@gluon.jit
def load_words(plane, block, slot, seen, FINITE: gl.constexpr, WORDS: gl.constexpr, LAYOUT: gl.constexpr, C: gl.constexpr):
    """A tile's packed rows, [KEYS, WORDS] of 32 bits; with side bytes (words, :func:`load_side_bytes`). Unseen rows are 0 unless FINITE: a
    weight of 0 takes out all but NaN."""
    base = plane.codes.to(gl.pointer_type(gl.uint32), bitcast=True)
    word = gl.arange(0, WORDS, gl.SliceLayout(0, LAYOUT))
    at = base + (row_starts(block, slot, plane, C) * 4)[:, None] + word[None, :]
    if FINITE:
        words = gl.load(at)
    else:
        words = gl.load(at, mask=seen[:, None], other=0)
    if C.format.key.side_bytes:
        words = (words, load_side_bytes(plane, block, slot, WORDS, LAYOUT, C))
    return words


@gluon.jit
def load_side_bytes(plane, block, slot, WORDS: gl.constexpr, LAYOUT: gl.constexpr, C: gl.constexpr):
    """The bytes beside the lanes of a tile's rows, [KEYS, WORDS] of 32 bits: those of a word's two lanes in the low bytes of its halves.
    Two words half a row apart have theirs in one (:func:`kvq_core.kernels.side_bytes.load_side_bytes`)."""
    HALF: gl.constexpr = WORDS // 2
    word = gl.arange(0, WORDS, gl.SliceLayout(0, LAYOUT))
    base = plane.codes.to(gl.pointer_type(gl.uint32), bitcast=True)
    both = gl.load(base + (row_starts(block, slot, plane, C) * 4)[:, None] + (WORDS + word % HALF)[None, :])
    return (both >> (word // HALF * 8).to(gl.uint32)[None, :]) & 0x00FF00FF


@gluon.jit
def load_scales(plane, block, slot, seen):
    """A tile's scale words, [KEYS] float32; 0 for unseen keys."""
    offset = block.to(gl.int64) * plane.scale_block_stride + slot.to(gl.int64) * plane.scale_slot_stride
    return gl.load(plane.scales + offset, mask=seen, other=0.0)


@gluon.constexpr_function
def word_layout(words):
    """How the group's threads hold packed rows [128, words]: four words each, of such rows that the eight threads whose 16-byte stores go
    together meet eight different places of the operand's swizzle."""
    lanes = {
        32: [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]],
        16: [[0, 4], [0, 8], [4, 0], [1, 0], [2, 0]],
        8: [[0, 4], [2, 0], [4, 0], [1, 0], [8, 0]],
    }[words]
    rows = [[row, 0] for row in (1, 2, 4, 8, 16, 32, 64) if [row, 0] not in lanes]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], *rows[2:]], lanes, rows[:2], [], [128, words])
