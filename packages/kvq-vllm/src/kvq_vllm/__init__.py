"""Quantized, paged KV caches in vLLM.

::

    vllm serve MODEL --kv-cache-dtype kvq_int4 --attention-backend CUSTOM             # vLLM 0.33 and later
    vllm serve MODEL --kv-cache-dtype int4_per_token_head --attention-backend CUSTOM  # vLLM 0.26 to 0.32

vLLM calls :func:`register` (entry point group ``vllm.general_plugins``) in each of its processes, before it reads its options. Importing
this package imports neither torch nor vLLM.
"""

__version__ = "0.1.0"

__all__ = ["register"]


def register() -> None:
    """Offer kvq's modes and attention backend to the vLLM of this process. Never raises: what does not fit is logged in one line."""
    from kvq_vllm.plugin import offer

    offer()
