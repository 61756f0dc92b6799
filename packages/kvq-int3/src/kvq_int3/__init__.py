"""The ``int3_per_token_head`` mode: Hadamard-rotated 3-bit codes in equal steps with one scale per token and head.

Importing this package imports no triton: the kernels come with their first launch. Most callers ask ``kvq_core.get_backend`` instead.
"""

from kvq_int3.backend import Int3PerTokenHead

__version__ = "0.1.0"

__all__ = ["Int3PerTokenHead"]
