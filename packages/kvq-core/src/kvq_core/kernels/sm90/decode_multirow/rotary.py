"""A rotary mean in multi-row decode: cosines and sines of a tile's positions are left operands, made in the registers that hold them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from kvq_core.kernels.queries import head_offset
from kvq_core.kernels.rotary import cosine_sine
from kvq_core.kernels.sm90.decode_multirow.layouts import left_operand
from kvq_core.kernels.sm90.decode_multirow.queries import rows_of
from kvq_core.kernels.sm90.layouts import ROTARY_ROWS
from kvq_core.kernels.sm90.rotary import PAIRS, SHARE, load_pairs, rotary_of


@gluon.jit
def load_rotary(queries, tile, work, kv_head, softmax_scale, batch, C: gl.constexpr):
    """The rotary mean of a work tile's keys, if there is one; what its query rows take of it is in ``tile`` [2, ROWS, PAIRS]."""
    rotary = rotary_of(queries, kv_head, work.seq, softmax_scale, tile, batch, C)
    if C.features.rotary_pairs > 0:
        index, head, valid = rows_of(work, kv_head, gl.SliceLayout(1, ROTARY_ROWS), C)
        offset = (work.first_token + index).to(gl.int64) * queries.token_stride + head_offset(head, queries.head_stride, C)
        along, across = load_pairs(queries.ptr, rotary, offset, valid)
        tile.index(0).store(along)
        tile.index(1).store(across)
        fence_async_shared()
    return rotary


@gluon.jit
def add_rotary_scores(number, s, rotary, C: gl.constexpr):
    """Scores of key tile ``number`` in log2 units, and ``q . R_j b``."""
    LEFT: gl.constexpr = left_operand(C.tile.rows)
    step = gl.load(rotary.table + 4 * PAIRS + gl.arange(0, PAIRS, gl.SliceLayout(0, LEFT))).to(gl.int32, bitcast=True)
    position = rotary.first + number * C.tile.keys + gl.arange(0, C.tile.keys, gl.SliceLayout(1, LEFT))
    cosine, sine = cosine_sine(step[None, :] * position[:, None], C.features.use_asm)
    s = warpgroup_mma((cosine * SHARE).to(gl.float16), rotary.tile.index(0).permute((1, 0)), s, is_async=True)
    s = warpgroup_mma((sine * SHARE).to(gl.float16), rotary.tile.index(1).permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(0, deps=(s,))
