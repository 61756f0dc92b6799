"""The 8-bit modes: ``int8_per_token_head``, ``fp8_per_token_head`` and ``fp8_per_tensor``.

Importing this package imports no triton: the kernels come with their first launch. Most callers ask ``kvq_core.get_backend`` instead.
"""

from kvq_int8fp8.backend import FP8PerTensor, FP8PerTokenHead, Int8PerTokenHead

__version__ = "0.1.0"

__all__ = ["FP8PerTensor", "FP8PerTokenHead", "Int8PerTokenHead"]
