"""What stands under different names in Triton's versions."""

from triton.experimental.gluon import language as gl

# Triton 3.6 has the barrier of a program's threads under its first name.
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
