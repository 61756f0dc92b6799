"""The bytes beside a row's lanes, of formats that have one for each (:class:`~kvq_core.kernels.formats.PlaneFormat`)."""

import triton
import triton.language as tl


@triton.jit
def load_side_bytes(
    plane, offset, kv_head, selector, HEADS: tl.constexpr, ALIGNMENT: tl.constexpr, C: tl.constexpr, TRANSPOSED: tl.constexpr,
    FIRST: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """The bytes beside COUNT lanes of a tile's rows, from lane FIRST on, as uint16 in the shape of :func:`load_lanes`.

    A 16-bit word has the bytes of two lanes half a row apart. A thread that has one of them in a product's operand has the other in another
    register, in the same half: so a row of 16 or 32 lanes needs no exchange. Of invalid keys some existing block's bytes.
    """
    HALF: tl.constexpr = HEADS.lanes // 2
    base = tl.multiple_of(plane.codes + kv_head.to(tl.int64) * plane.head_stride + HEADS.lanes, ALIGNMENT)
    if COUNT == C.tile.fold * HEADS.lanes or (C.tile.decode and HALF % 2 == 0):
        words = load_side_words(base, offset, HEADS, C, TRANSPOSED, FIRST, COUNT)
        side = selected_bytes(words, tl.broadcast_to(selector[:, None] if TRANSPOSED else selector[None, :], words.shape), C)
    else:
        # One load of words of which no two share a vector, or in a tile of many rows, would take more registers than two.
        lane = FIRST + tl.arange(0, COUNT)
        at = base + (offset[None, :] if TRANSPOSED else offset[:, None])
        lane = lane[:, None] if TRANSPOSED else lane[None, :]
        low = tl.load(at + lane, mask=lane < HALF, other=0) & 0xFF
        high = tl.load(at + (lane - HALF), mask=(lane >= HALF) & (lane < HEADS.lanes), other=0) >> 8
        side = (low | high).to(tl.uint16)
    return side


@triton.jit
def load_side_words(
    base, offset, HEADS: tl.constexpr, C: tl.constexpr, TRANSPOSED: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    """Of each lane the word that has its byte; 0 for lanes that pad a row."""
    HALF: tl.constexpr = HEADS.lanes // 2
    FOLD: tl.constexpr = C.tile.fold
    KEYS: tl.constexpr = offset.shape[0]
    if FOLD > 1:
        # Of keys whose lanes fill the row.
        word = (tl.arange(0, FOLD) * (HEADS.lanes + HALF))[:, None] + tl.arange(0, HALF)[None, :]
        pair = tl.load(base + offset[:, None, None] + word[None, :, :])
        pair = tl.broadcast_to(pair[:, :, None, :], [KEYS, FOLD, 2, HALF])
        words = tl.reshape(tl.permute(pair, (1, 2, 3, 0)), [COUNT, KEYS]) if TRANSPOSED else tl.reshape(pair, [KEYS, COUNT])
    elif COUNT == HEADS.lanes:
        at = base + offset[:, None] + tl.arange(0, HALF)[None, :]
        if TRANSPOSED:
            # In three dimensions Triton takes the order in shared memory from the load; in two from the product, in whose order rows
            # cannot be copied asynchronously.
            pair = tl.broadcast_to(tl.load(at[:, None, :]), [KEYS, 2, HALF])
            words = tl.reshape(tl.permute(pair, (1, 2, 0)), [COUNT, KEYS])
        else:
            pair = tl.broadcast_to(tl.load(at)[:, None, :], [KEYS, 2, HALF])
            words = tl.reshape(pair, [KEYS, COUNT])
    else:
        lane = FIRST + tl.arange(0, COUNT)
        # Of a remainder Triton would not see that neighbors lie side by side, and make keys the vectors.
        word = lane - tl.where(lane >= HALF, HALF, 0)
        if TRANSPOSED:
            words = tl.load(base + offset[None, :] + word[:, None], mask=(lane < HEADS.lanes)[:, None], other=0)
        else:
            words = tl.load(base + offset[:, None] + word[None, :], mask=(lane < HEADS.lanes)[None, :], other=0)
    return words


@triton.jit
def side_selectors(plane, num_blocks, HEADS: tl.constexpr, ROW: tl.constexpr):
    """Which byte of its word is a lane's, for :func:`selected_bytes`: [COUNT] uint16 for each chunk of a row's lanes.

    They come from a load that loads nothing, which the compiler cannot know. It carries a product's layout back through operations on
    elements as far as loads, and not to indices: for these it would exchange all operands between threads instead.
    """
    result = ()
    for i in tl.static_range(len(ROW.chunks)):
        lane = ROW.chunk_starts[i] + tl.arange(0, tl.constexpr(ROW.chunks[i]))
        selector = tl.where(lane % HEADS.lanes < HEADS.lanes // 2, 0x4240, 0x4341).to(tl.uint16)
        result = result + (tl.load(plane.codes + lane, mask=lane + num_blocks < 0, other=selector),)
    return result


SELECT = tl.constexpr("""
    {
    .reg .b32 both;
    prmt.b32 both, $2, 0, 0x4430;
    prmt.b32 $0, $1, 0, both;
    }
""")


@triton.jit
def selected_bytes(words, selector, C: tl.constexpr):
    """The low bytes of 16-bit words where ``selector``, a byte permutation of a pair of words, is 0x4240, the high ones where 0x4341.

    Two words that share a register need not be of one half: the first has its byte by its own selector, the second by its own."""
    if C.features.use_asm:
        x = tl.inline_asm_elementwise(SELECT, "=r,r,r", [words, selector], dtype=tl.uint16, is_pure=True, pack=2)
    else:
        x = ((words >> ((selector & 1) * 8).to(tl.uint16)) & 0xFF).to(tl.uint16)
    return x
