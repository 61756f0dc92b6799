"""What vLLM asks about layers and their pages, whether these hold packed rows or exact ones."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, MultipleOf

from kvq_core.backend import QuantKVBackend
from kvq_core.errors import ArgumentError, KVQError
from kvq_core.registry import get_backend
from kvq_vllm.names import PLAIN_NAMES, VLLM_NAMES, mode_of
from kvq_vllm.pages import content_bytes
from kvq_vllm.plugin import SLOT
from kvq_vllm.refusals import explained, head_size_reason
from kvq_vllm.settings import NOTHING, SECTION, current, smallest_block
from kvq_vllm.smoothing import load


def asks_for_sizes() -> bool:
    """Whether this vLLM asks a backend for the bytes of its pages (0.28 and later)."""
    return hasattr(AttentionBackend, "customize_spec")


class PageBackend(AttentionBackend):
    """Which layers kvq serves, and the size and the layout of their pages: the same for packed and for exact rows."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return SLOT

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    # -- what is supported ----------------------------------------------------------------------------------------------

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        return kv_cache_dtype is None or mode_of(kv_cache_dtype) is not None

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """No: the longest query of a step, which launch plans rest on, is the CPU's (vLLM 0.30 and later)."""
        return False

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        """vLLM's reasons against a configuration, each with why and what would work, and kvq's own."""
        asked = super().validate_configuration
        reasons = [explained(reason) for reason in asked(*args, **kwargs)]
        facts = inspect.signature(asked).bind(*args, **kwargs).arguments
        try:
            settings = current()
            mode = mode_of(facts.get("kv_cache_dtype") or "auto", settings.override)
            unfit = None if mode is None else head_size_reason(mode, facts["head_size"])
            if settings.smoothing not in (None, NOTHING):
                load(settings.smoothing)
        except KVQError as problem:
            unfit = str(problem)
        return reasons + ([] if unfit is None else [unfit])

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Where the user asks for none: one whose pages hold 16 exact rows, with a residual window or sinks."""
        preferred: int = super().get_preferred_block_size(default_block_size)
        return max(preferred, smallest_block())

    # -- pages ----------------------------------------------------------------------------------------------------------

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Bytes of a token and head (vLLM 0.28 and later). Layers that are not quantized keep vLLM's rows."""
        settings = current()
        if spec.state_content_bytes is not None or not spec.kv_quant_mode:
            return spec
        head_size_v = getattr(spec, "head_size_v", None) or spec.head_size
        if settings.kv_cache_dtype in PLAIN_NAMES:
            need = "a quantized name, if a draft model's layers are to have one"
            raise ArgumentError("--kv-cache-dtype", settings.kv_cache_dtype, need)
        backend = settings.backend(settings.kv_cache_dtype)
        return replace(spec, state_content_bytes=content_bytes(backend, spec.head_size, head_size_v, settings.dtype))

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Layouts whose pages are in one piece, head-major first (vLLM 0.29 and later)."""
        from vllm.v1.kv_cache_interface import KVCacheLayout

        return (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC, KVCacheLayout.BLHNC, KVCacheLayout.BLNHC)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Of a page, which has the bytes of its mode where vLLM asks for these (0.28), and else those of its name (0.26, 0.27)."""
        content = 2 * head_size
        if cache_dtype_str in VLLM_NAMES:
            settings = current()
            mode = settings.backend(cache_dtype_str)
            content = content_bytes(mode, head_size, head_size, settings.dtype)
            if not asks_for_sizes():
                content = _within_the_name(mode, content, cache_dtype_str, head_size)
        return (num_blocks, num_kv_heads, block_size, content)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Head-major pages (0.26 to 0.28)."""
        return (1, 2, 0, 3, 4) if include_num_layers_dimension else (0, 1, 2, 3)

    @classmethod
    def get_required_kv_cache_layout(cls) -> str:
        """Head-major pages (0.26 to 0.28)."""
        return "HND"


def _within_the_name(mode: QuantKVBackend, need: int, name: str, head_size: int) -> int:
    """The bytes of a token and head in pages of ``name``; :class:`ArgumentError` if ``mode`` needs more."""
    content = content_bytes(get_backend(name), head_size, head_size, torch.bfloat16)
    if need > content:
        fitting = f"a mode with at most {content} bytes a token and head, as {name} has in this vLLM"
        raise ArgumentError(f"--additional-config {SECTION}.mode", f"{mode.mode}, which takes {need}", fitting)
    return content
