"""Kernels without a GPU: what Triton's interpreter lacks for kvq's kernels.

``speedup``
    The interpreter of Triton kernels, without the work that it repeats at each call of a jit function.
``ptx``
    :func:`~kvq_core.testing.interpret.ptx.interpreted_ptx`: inline PTX, instruction by instruction.
``gluon``
    :func:`~kvq_core.testing.interpret.gluon.interpreted_gluon`: imports Gluon kernels with Gluon mapped to Triton's interpreted language.
``machine``
    What those kernels use beside tensors: shared memory, asynchronous copies, barriers, the warp groups of a program.

``ptx``, ``gluon`` and ``machine`` import triton: call :func:`~kvq_core.testing.places.choose_interpreter` first.
"""
