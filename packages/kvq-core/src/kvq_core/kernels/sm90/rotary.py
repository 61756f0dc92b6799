"""A rotary mean in prefill by warp groups: cosines and sines of a tile's positions are one more operand, of the same product for all rows.

What the portable kernels do in two products over pairs (:mod:`kvq_core.kernels.rotary`) is one here, over both.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from kvq_core.kernels.rotary import SHARE as _SHARE
from kvq_core.kernels.rotary import cosine_sine, pair_products
from kvq_core.kernels.sm90.layouts import ROTARY_ROWS
from kvq_core.kernels.sm90.queries import rows_of

PAIRS = gl.constexpr(16)
SHARE = gl.constexpr(_SHARE.value)


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
    p = gl.arange(0, PAIRS, gl.SliceLayout(0, ROTARY_ROWS))
    along, across, _ = pair_products(work.queries, rotary.table, offset, valid, PAIRS, p)
    unit = rotary.unit / SHARE
    tile = rotary.tile.index(GROUP)
    tile.slice(0, PAIRS, dim=1).store((along * unit).to(gl.float16))
    tile.slice(PAIRS, PAIRS, dim=1).store((across * unit).to(gl.float16))
    fence_async_shared()
