"""Kernels for tests of the interpreted Gluon: right and wrong, as they are told."""

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

ROW = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@dataclass(frozen=True)
class Sample:
    """``left``: copies that are not waited for. ``waits``: for what is read. ``frees``: what was read may be written again."""

    left: int = 0
    rounds: int = 0
    waits: bool = True
    frees: bool = True
    asm: str = ""


@gluon.jit
def double(source, target, C: gl.constexpr):
    """By way of shared memory, in two copies."""
    offsets = gl.arange(0, 32, ROW)
    shared = gl.allocate_shared_memory(gl.float32, [2, 32], PLAIN)
    for half in gl.static_range(2):
        async_copy.async_copy_global_to_shared(shared.index(half), source + half * 32 + offsets, mask=offsets < 31)
        async_copy.commit_group()
    async_copy.wait_group(C.left)
    for half in gl.static_range(2):
        gl.store(target + half * 32 + offsets, shared.index(half).load(ROW) * 2.0)


@gluon.jit
def fill(shared, full, free, C: gl.constexpr):
    for n in range(0, C.rounds):
        mbarrier.wait(free, n & 1 ^ 1)
        shared.store((gl.arange(0, 32, ROW) + n).to(gl.float32))
        mbarrier.arrive(full, count=1)


@gluon.jit
def drain(target, shared, full, free, C: gl.constexpr):
    for n in range(0, C.rounds):
        if C.waits:
            mbarrier.wait(full, n & 1)
        gl.store(target + n * 32 + gl.arange(0, 32, ROW), shared.load(ROW))
        if C.frees:
            mbarrier.arrive(free, count=1)


@gluon.jit
def hand_over(target, C: gl.constexpr):
    """Rounds of numbers from one group to another, through one buffer that is filled again once it is free."""
    shared = gl.allocate_shared_memory(gl.float32, [32], PLAIN)
    barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for at in gl.static_range(2):
        mbarrier.init(barriers.index(at), count=1)
    full, free = barriers.index(0), barriers.index(1)
    gl.warp_specialize([(fill, (shared, full, free, C)), (drain, (target, shared, full, free, C))], [4], [64])


@gluon.jit
def apply(source, target, C: gl.constexpr):
    """Inline PTX on pairs of 16-bit elements."""
    offsets = gl.arange(0, 32, ROW)
    x = gl.inline_asm_elementwise(C.asm, "=r,r", [gl.load(source + offsets)], dtype=gl.uint16, is_pure=True, pack=2)
    gl.store(target + offsets, x)
