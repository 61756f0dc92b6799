"""The names of kvq's modes in a vLLM that takes names of others (0.33 and later), and what kvq's backend refuses, in vLLM's own words.

``python tests/vllm/check_names.py [NAME ...]``; each ``NAME`` must be among them.
"""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config.cache import (
    KV_CACHE_DTYPES,
    STR_DTYPE_TO_TORCH_DTYPE,
    CacheConfig,
    KVCacheDTypeHandler,
    get_kv_cache_dtype_handler,
    is_known_kv_cache_dtype,
)
from vllm.platforms.interface import DeviceCapability
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import KVQuantMode, get_kv_quant_mode

from kvq_core import QuantKVBackend, get_backend, list_backends, register_backend
from kvq_vllm.builder import KVQMetadataBuilder
from kvq_vllm.plugin import PATH

ASKED = {
    "head_size": 128,
    "dtype": torch.bfloat16,
    "block_size": 16,
    "use_mla": False,
    "has_sink": True,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "device_capability": DeviceCapability(9, 0),
    "attn_type": "decoder",
    "has_sliding_window": True,
    "use_batch_invariant": True,
}
FLAGS = "use_mla use_sparse use_mm_prefix use_per_head_quant_scales use_non_causal use_kv_connector use_pcp use_adaptive_verification"
UNSERVED: tuple[dict[str, Any], ...] = (
    *({name: True} for name in (*FLAGS.split(), "use_dcp", "use_rswa")),
    *({"attn_type": kind} for kind in ("encoder", "encoder_only", "encoder_decoder")),
    {"kv_cache_dtype": "nvfp4"},
    {"head_size": 66, "kv_cache_dtype": "kvq_int2"},
    {"block_size": 8},
    {"dtype": torch.float64},
)


class WithoutKernels(type(get_backend("int8"))):  # type: ignore[misc]
    """int8 in plain torch."""

    mode = "plain_int8"
    kernels = QuantKVBackend.kernels


def check_graphs() -> None:
    """Doors that are no kernels cannot be captured."""
    register_backend(WithoutKernels)
    names = {"kvq_int4": AttentionCGSupport.UNIFORM_BATCH, "kvq_k8v4": AttentionCGSupport.UNIFORM_BATCH}
    for name, support in (names | {"kvq_plain_int8": AttentionCGSupport.NEVER}).items():
        cache, model = SimpleNamespace(cache_dtype=name), SimpleNamespace(dtype=torch.bfloat16)
        config = SimpleNamespace(cache_config=cache, model_config=model, additional_config={})
        found = KVQMetadataBuilder.get_cudagraph_support(config, None)
        assert found == support, f"{name}: CUDA graphs {found}, need {support}"


def main() -> None:
    load_general_plugins()
    names = {"kvq_" + entry.mode.removesuffix("_per_token_head") for entry in list_backends()}
    missing = {*names, *sys.argv[1:]} - set(KV_CACHE_DTYPES)
    assert not missing, f"vLLM lacks {sorted(missing)}; it has {KV_CACHE_DTYPES}"
    assert AttentionBackendEnum.CUSTOM.get_path() == PATH
    backend = AttentionBackendEnum.CUSTOM.get_class()
    for name in sorted(names):
        assert isinstance(get_kv_cache_dtype_handler(name), KVCacheDTypeHandler) and is_known_kv_cache_dtype(name), name
        assert CacheConfig(cache_dtype=name).cache_dtype == name
        assert STR_DTYPE_TO_TORCH_DTYPE[name] == torch.uint8 and get_kv_quant_mode(name) == KVQuantMode.CUSTOM, name
        reasons = backend.validate_configuration(**ASKED, kv_cache_dtype=name)
        assert not reasons, f"{name}: {reasons}"
    print(f"{len(names)} names: {', '.join(sorted(names))}")
    check_graphs()
    known = inspect.signature(AttentionBackend.validate_configuration).parameters
    for case in UNSERVED:
        if known.keys() >= case.keys():
            reasons = backend.validate_configuration(**ASKED | {"kv_cache_dtype": "kvq_int4"} | case)
            explained = reasons and all("--kv-cache-dtype" in reason and ": " in reason and "; " in reason for reason in reasons)
            assert explained, f"{case}: {reasons}, need a refusal with why, and what would work"


if __name__ == "__main__":
    main()
