"""Names that differ between Triton's versions."""

from triton.experimental.gluon import language as gl

# Triton 3.6 calls it thread_barrier, 3.7 barrier.
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
