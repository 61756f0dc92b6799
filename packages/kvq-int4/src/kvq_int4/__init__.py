"""The ``int4_per_token_head`` mode: rotated, asymmetric 4-bit codes with one scale per token and head.

Importing this package imports no triton: the kernels come with their first launch. Most callers ask ``kvq_core.get_backend`` instead.
"""

from kvq_int4.backend import Int4PerTokenHead

__version__ = "0.1.0"

__all__ = ["Int4PerTokenHead"]
