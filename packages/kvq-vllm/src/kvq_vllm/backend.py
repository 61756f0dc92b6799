"""The attention backend that vLLM makes layers of."""

from __future__ import annotations

from kvq_vllm.builder import KVQMetadataBuilder
from kvq_vllm.impl import KVQImpl
from kvq_vllm.page_backend import PageBackend


class KVQBackend(PageBackend):
    """kvq as vLLM's ``CUSTOM`` backend, for every layer: those that are not quantized have mode ``none``."""

    @staticmethod
    def get_impl_cls() -> type[KVQImpl]:
        return KVQImpl

    @staticmethod
    def get_builder_cls() -> type[KVQMetadataBuilder]:
        return KVQMetadataBuilder


class KVQCPUBackend(KVQBackend):
    """The same on vLLM's CPU platform, which knows its backend by that name alone."""

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"
