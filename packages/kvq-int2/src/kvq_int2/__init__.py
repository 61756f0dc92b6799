"""The ``int2_per_token_head`` mode: Hadamard-rotated Lloyd-Max 2-bit codes with one scale per token and head.

Importing this package imports no triton: the kernels come with their first launch. Most callers ask ``kvq_core.get_backend`` instead.
"""

from kvq_int2.backend import Int2PerTokenHead

__version__ = "0.1.0"

__all__ = ["Int2PerTokenHead"]
