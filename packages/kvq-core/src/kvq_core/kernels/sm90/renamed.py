"""What Triton's versions name differently."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

# Triton 3.6 calls it thread_barrier, 3.7 barrier.
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
# Triton 3.7 calls it async_copy_global_to_shared, 3.8 async_load; 3.9 has the former, which fails.
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
# Triton 3.8 calls it _reinterpret.
_IS_PUBLIC = gl.constexpr(hasattr(getattr(gl, "shared_memory_descriptor", None), "reinterpret"))


@gluon.jit
def reinterpreted(buffer, DTYPE: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """The bytes of a buffer in shared memory as [ROWS, COLUMNS] of another type and layout."""
    if _IS_PUBLIC:
        other = buffer.reinterpret(DTYPE, [ROWS, COLUMNS], LAYOUT)
    else:
        other = buffer._reinterpret(DTYPE, [ROWS, COLUMNS], LAYOUT)
    return other
