"""A rotary mean: cosines and sines of a tile's positions are one more operand, of the same product for all rows.

What the Triton kernels do in two products over pairs (:mod:`kvq_core.kernels.rotary`) is one in prefill, over both.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from kvq_core.kernels.args import LOG2E as _LOG2E
from kvq_core.kernels.rotary import SHARE as _SHARE
from kvq_core.kernels.rotary import cosine_sine, pair_products
from kvq_core.kernels.sm90.layouts import QUERY, ROTARY_ROWS, RotaryArgs
from kvq_core.kernels.sm90.queries import load_channels, load_rows, rows_of
from kvq_core.kernels.staging import MEAN_SHARE as _MEAN_SHARE

PAIRS = gl.constexpr(16)
SHARE = gl.constexpr(_SHARE.value)
MEAN_SHARE = gl.constexpr(_MEAN_SHARE.value)
LOG2E = gl.constexpr(_LOG2E.value)


@gluon.jit
def rotary_of(queries, kv_head, seq, softmax_scale, tile, batch, C: gl.constexpr):
    """The rotary mean of a sequence's keys, if there is one. ``tile``: :class:`RotaryArgs`."""
    table = queries.ptr
    first = 0
    if C.features.rotary_pairs > 0:
        gl.static_assert(C.features.rotary_pairs == PAIRS and C.format.key.in_float16, "a rotary mean of 16 pairs, of packed keys")
        table = queries.rotary + kv_head * (5 * PAIRS)
        if batch.first_positions is not None:
            first = gl.load(batch.first_positions + seq)
    return RotaryArgs(table, first, softmax_scale * LOG2E, tile)


@gluon.jit
def fill_rotary(number, rotary, tile, C: gl.constexpr):
    """Cosines and sines of a tile's positions into ``tile`` [KEYS, 2 PAIRS]."""
    KEYS: gl.constexpr = C.tile.keys
    p = gl.arange(0, PAIRS, gl.SliceLayout(0, ROTARY_ROWS))
    step = gl.load(rotary.table + 4 * PAIRS + p).to(gl.int32, bitcast=True)
    position = rotary.first + number * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, ROTARY_ROWS))
    cosine, sine = cosine_sine(step[None, :] * position[:, None], C.features.use_asm)
    tile.slice(0, PAIRS, dim=1).store((cosine * SHARE).to(gl.float16))
    tile.slice(PAIRS, PAIRS, dim=1).store((sine * SHARE).to(gl.float16))


@gluon.jit
def load_rotary_queries(work, rotary, GROUP: gl.constexpr, C: gl.constexpr):
    """What a group's rows take of the mean, into its part of ``rotary.tile`` [HALF, 2 PAIRS], in log2 units."""
    BY_ROW: gl.constexpr = gl.SliceLayout(1, ROTARY_ROWS)
    token, head, _, valid = rows_of(work, GROUP, BY_ROW, C)
    offset = token.to(gl.int64) * work.token_stride + head.to(gl.int64) * work.head_stride
    along, across = load_pairs(work.queries, rotary, offset, valid)
    tile = rotary.tile.index(GROUP)
    tile.slice(0, PAIRS, dim=1).store(along)
    tile.slice(PAIRS, PAIRS, dim=1).store(across)
    fence_async_shared()


@gluon.jit
def load_rotary_channels(work, rotary, score_scale, GROUP: gl.constexpr, BALANCED: gl.constexpr, C: gl.constexpr):
    """The channels of a group's rows that a rotary mean has, in units of ``score_scale`` [HALF] as the rows are, into the group's part of
    ``rotary.tile`` [HALF, 2 PAIRS]: for staged keys. Ordered ones have their mean as it is."""
    channel = gl.load(rotary.table + gl.arange(0, 2 * PAIRS, gl.SliceLayout(0, QUERY))).to(gl.int32, bitcast=True)
    x = load_rows(work, channel, GROUP, C).to(gl.float32)
    if BALANCED and not C.format.key.ordered:
        x = x * load_channels(work.factor, channel, work, C)[None, :]
    # Rows' share of the score's unit (staging.QUERY_SHARE) is off: the scale that the mean is staged over has it already.
    unit = gl.convert_layout(work.score_unit * (MEAN_SHARE / C.key_number_scale / score_scale), gl.SliceLayout(1, QUERY))
    rotary.tile.index(GROUP).store((x * unit[:, None]).to(gl.float16))
    fence_async_shared()


@gluon.jit
def load_pairs(queries, rotary, offset, valid):
    """A and B of the rows at ``offset``, [ROWS, PAIRS], in log2 units."""
    p = gl.arange(0, PAIRS, gl.SliceLayout(0, ROTARY_ROWS))
    along, across, _ = pair_products(queries, rotary.table, offset, valid, PAIRS, p)
    unit = rotary.unit / SHARE
    return (along * unit).to(gl.float16), (across * unit).to(gl.float16)
