"""The copying group, in the place of the unpacking one: tiles that are operands already, of unquantized pages or staged.

Copies arrive at a tile's barrier themselves, so the group waits for none.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kvq_core.kernels.sm90.key_places import UNSEEN, key_positions, lane_row_places
from kvq_core.kernels.sm90.layouts import HALF, REST, VECTOR, row_layout
from kvq_core.kernels.sm90.queries import existing
from kvq_core.kernels.sm90.rotary import PAIRS


@gluon.jit
def copy_tiles(keys, values, span, shared, C: gl.constexpr):
    """Tiles of unquantized rows."""
    for n in range(0, span.last):
        at = n % C.tile.stages
        free = (n // C.tile.stages) & 1 ^ 1
        block, slot, seen, _ = key_positions(n, span, gl.SliceLayout(1, row_layout(C.channels)), C)
        _, _, key_seen, key_position = key_positions(n, span, VECTOR, C)
        mbarrier.wait(shared.k_free.index(at), free)
        shared.positions.index(at).store(gl.where(key_seen, key_position, UNSEEN))
        mbarrier.arrive(shared.k_full.index(at), count=1)
        copy_rows(shared.k.index(at), keys, block, slot, seen, C)
        async_copy.mbarrier_arrive(shared.k_full.index(at), increment_count=False)
        mbarrier.wait(shared.v_free.index(at), free)
        copy_rows(shared.v.index(at), values, block, slot, seen, C)
        async_copy.mbarrier_arrive(shared.v_full.index(at), increment_count=False)
    async_copy.wait_group(0)


@gluon.jit
def copy_rows(target, plane, block, slot, seen, C: gl.constexpr):
    """Begin to copy a tile's rows; those of unseen keys become 0, since 0 * NaN is NaN, as do channels that a head has not."""
    channel = gl.arange(0, C.channels, gl.SliceLayout(0, row_layout(C.channels)))
    at = plane.codes + (lane_row_places(block, slot, plane, C) * 8)[:, None] + channel[None, :]
    async_copy.async_copy_global_to_shared(target, at, mask=existing(seen, channel, C))
    async_copy.commit_group()


@gluon.jit
def copy_staged(keys, values, span, shared, C: gl.constexpr):
    """Tiles of staged rows (:mod:`kvq_core.kernels.staging`), and their scales; the next one's scales are on their way meanwhile."""
    k_scale, v_scale = load_staged_scales(0, keys, values, span, C)
    for n in range(0, span.last):
        at = n % C.tile.stages
        free = (n // C.tile.stages) & 1 ^ 1
        position = n * C.tile.keys + gl.arange(0, C.tile.keys, VECTOR)
        mbarrier.wait(shared.k_free.index(at), free)
        shared.positions.index(at).store(gl.where(k_scale >= 0.0, position, UNSEEN))
        shared.k_scales.index(at).store(k_scale * (1.0 / REST))
        shared.v_scales.index(at).store(v_scale)
        # Of a tile whose rows share one, the largest is it.
        shared.v_largest.index(at).store(gl.zeros([HALF], gl.float32, VECTOR) + gl.max(v_scale, 0))
        mbarrier.arrive(shared.k_full.index(at), count=1)
        copy_block(shared.k.index(at), keys, span.first + n, 0, C.channels, C.staged_key_size, C)
        if C.features.rotary_pairs > 0:
            copy_block(shared.rotary.index(at), keys, span.first + n, C.channels, 2 * PAIRS, C.staged_key_size, C)
        async_copy.mbarrier_arrive(shared.k_full.index(at), increment_count=False)
        mbarrier.wait(shared.v_free.index(at), free)
        copy_block(shared.v.index(at), values, span.first + n, 0, C.channels, C.channels, C)
        async_copy.mbarrier_arrive(shared.v_full.index(at), increment_count=False)
        k_scale, v_scale = load_staged_scales(gl.minimum(n + 1, span.last - 1), keys, values, span, C)
    async_copy.wait_group(0)


@gluon.jit
def load_staged_scales(n, keys, values, span, C: gl.constexpr):
    """Of a tile's keys and values, [KEYS] float32 each."""
    at = (span.first + n).to(gl.int64) * keys.scale_block_stride + gl.arange(0, C.tile.keys, VECTOR)
    return gl.load(keys.scales + at), gl.load(values.scales + at)


@gluon.jit
def copy_block(target, plane, block, FIRST: gl.constexpr, COUNT: gl.constexpr, SIZE: gl.constexpr, C: gl.constexpr):
    """Begin to copy COUNT channels, from FIRST on, of a staged tile's rows of SIZE, which lie side by side."""
    LAYOUT: gl.constexpr = row_layout(COUNT)
    row = gl.arange(0, C.tile.keys, gl.SliceLayout(1, LAYOUT))
    channel = FIRST + gl.arange(0, COUNT, gl.SliceLayout(0, LAYOUT))
    start = plane.codes + block.to(gl.int64) * plane.block_stride
    async_copy.async_copy_global_to_shared(target, start + (row[:, None] * SIZE + channel[None, :]))
    async_copy.commit_group()
