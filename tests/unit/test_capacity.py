"""The calculator's functions, on configs of published models: bytes worked out by hand, parameters as published."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from kvq_core import ArgumentError, PagedKVCache, get_backend, list_backends
from kvq_core.capacity import (
    GIB,
    AttentionLayer,
    Budget,
    ModelShape,
    Workload,
    capacity_of,
    model_shape,
    read_config,
    size_of,
    weight_count,
    weight_file_bytes,
)
from kvq_core.capacity.plan import held_tokens

pytestmark = pytest.mark.quick

BF16 = torch.bfloat16
LLAMA = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4}


def config(name: str) -> dict[str, Any]:
    return read_config(Path(__file__).parents[1] / "data" / "configs" / f"{name}.json")


# -- layers -----------------------------------------------------------------------------------------------------------------


PUBLISHED: dict[str, tuple[list[int | None], int, int, torch.dtype, int | None, float | None]] = {
    "llama-3.1-8b": ([None] * 32, 8, 128, BF16, 131072, 8.030e9),  # head size 4096 / 32
    "mixtral-8x7b": ([None] * 32, 8, 128, BF16, 32768, 46.703e9),
    "qwen3-8b": ([None] * 36, 8, 128, BF16, 40960, 8.191e9),
    "mistral-7b-v0.1": ([4096] * 32, 8, 128, BF16, 32768, 7.242e9),
    "gemma-2-9b": ([4096, None] * 21, 8, 256, torch.float32, 8192, 9.242e9),  # head_dim is not 3584 / 16
    "gemma-3-4b": (([1024] * 5 + [None]) * 5 + [1024] * 4, 4, 256, BF16, None, 3.880e9),  # heads that the class's defaults tell; text
    "gpt-oss-20b": ([128, None] * 12, 8, 64, BF16, 131072, None),
    "qwen3-next-80b-a3b": ([None] * 12, 2, 256, BF16, 262144, 79.67e9),
}
"""Of each layer its window; kv heads, head size, dtype, longest context, parameters."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name: str) -> None:
    windows, kv_heads, size, dtype, max_context, parameters = PUBLISHED[name]
    shape = model_shape(config(name))
    assert list(shape.layers) == [AttentionLayer(kv_heads, size, size, window) for window in windows]
    assert (shape.dtype, shape.max_context) == (dtype, max_context)
    bytes_a_head = {"none": size * dtype.itemsize, "int8": size + 4, "fp8_per_tensor": size, "int4": size // 2 + 4, "int2": size // 4 + 4}
    for mode, nbytes in bytes_a_head.items():
        found = capacity_of(get_backend(mode), shape, Budget(80 * GIB, 0), Workload(context=1024))
        assert found.bytes_per_token == len(windows) * kv_heads * 2 * nbytes, mode
    if parameters is not None:
        count = weight_count(config(name))
        assert count.parameters == pytest.approx(parameters, rel=0.002) and count.bytes_per_parameter == dtype.itemsize


WINDOWED = {"sliding_window": 64}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (WINDOWED | {"use_sliding_window": False}, [None] * 8),
        (WINDOWED | {"sliding_window_pattern": 4}, [64, 64, 64, None] * 2),
        (WINDOWED | {"sliding_window_pattern": "LLLG"}, [64, 64, 64, None] * 2),
        ({"attn_layer_indices": [3, 5]}, [None] * 2),
        ({"attn_type_list": [0, 0, 0, 1, 0, 0, 0, 1]}, [None] * 2),
        ({"hybrid_override_pattern": "M-M*-ME*"}, [None] * 2),
        (WINDOWED | {"use_sliding_window": True, "max_window_layers": 6}, [None] * 6 + [64] * 2),
        ({"full_attn_idxs": [2]}, [None]),
        ({"full_attention_interval": 4}, [None] * 2),
        ({"block_types": ["recurrent", "recurrent", "attention"], "attention_window_size": 2048}, [2048] * 2),
        ({"num_kv_shared_layers": 3}, [None] * 5),
        ({"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2}, AttentionLayer(2, 128, 128)),
        ({"kv_channels": 64, "multi_query_group_num": 2}, AttentionLayer(2, 64, 64)),
        ({"global_head_dim": 512, "num_global_key_value_heads": 1}, AttentionLayer(1, 512, 512)),
    ],
)
def test_what_fields_say_of_windows_or_heads(fields: dict[str, Any], expected: list[int | None] | AttentionLayer) -> None:
    """In ways that test_capacity_types.py does not meet or has no record of."""
    layers = model_shape(LLAMA | fields).layers
    assert ([layer.window for layer in layers] if isinstance(expected, list) else layers[-1]) == expected


# -- bytes ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", sorted({entry.mode for entry in list_backends()}))
def test_bytes_are_those_the_cache_allocates(mode: str) -> None:
    """Exact rows of a residual window included, whatever the context; a mode whose packed rows are no worse keeps none twice."""
    shape, backend = ModelShape("x", (AttentionLayer(3, 96, 64),) * 2, 2, torch.float16, None), get_backend(mode)
    found = capacity_of(backend, shape, Budget(GIB, 0), Workload(context=50))
    made = {"num_blocks": 4, "num_kv_heads": 3, "head_size": 96, "head_size_v": 64, "num_layers": 2, "dtype": torch.float16}
    cache = PagedKVCache(mode, **made)
    assert found.bytes_per_token == cache.bytes_per_token and found.bits_per_element == cache.bits_per_element
    assert found.sequence_bytes == cache.nbytes, "50 tokens take 4 blocks of 16"
    assert found.times_smaller == pytest.approx(16 / cache.bits_per_element)
    for residual in ("none", "int8"):
        options: dict[str, Any] = {"residual_length": 40, "sink_tokens": 20, "residual_mode": residual}
        windowed = size_of(backend, shape, Workload(context=50, **options))
        if backend.mode in ("none", get_backend(residual).mode):
            assert windowed == size_of(backend, shape, Workload(context=50))
        else:
            assert windowed.sequence_bytes == PagedKVCache(mode, **made, **options, max_sequences=1).nbytes
            assert windowed.bits_at_context == 8 * windowed.sequence_bytes / (64 * 2 * 3 * 160)


def test_a_window_holds_the_blocks_it_touches() -> None:
    for window in (1, 15, 16, 17, 18, 32, 33, 100):
        most = max(end // 16 - (end - window + 1) // 16 + 1 for end in range(window, window + 64))  # tokens end-window+1 .. end
        assert held_tokens(AttentionLayer(1, 64, 64, window), 10_000, 16) == 16 * most, window


def test_windowed_layers_keep_their_window_only() -> None:
    a_layer = 4 * 2 * 256 * 2
    at_32k = capacity_of(get_backend("none"), model_shape(config("gemma-3-4b")), Budget(80 * GIB, 0), Workload(context=32768))
    assert at_32k.sequence_bytes == a_layer * (5 * 32768 + 29 * (1024 + 16)) and at_32k.bytes_per_token == 34 * a_layer
    # A model of windows alone has no longest sequence, unless the room ends before the window does.
    shape = model_shape(config("mistral-7b-v0.1"))
    assert capacity_of(get_backend("int4"), shape, Budget(40 * GIB, 14 * GIB), Workload(context=100_000)).tokens is None
    tight = capacity_of(get_backend("none"), shape, Budget(GIB, 0, utilization=0.25), Workload(context=100))
    assert tight.tokens == (GIB // 4) // (131072 * 16) * 16


def test_what_fits_in_a_gpu() -> None:
    """Llama-3.1-8B in 24 GiB: 0.9 x 24 GiB less 8.03e9 x 2 bytes and 1 GiB, by hand."""
    described = config("llama-3.1-8b")
    budget = Budget(24 * GIB, weight_count(described).nbytes, GIB)
    room = int(0.9 * 24 * 2**30) - 2 * 8_029_995_008 - 2**30
    assert budget.cache_bytes == room
    found = capacity_of(get_backend("int4"), model_shape(described), budget, Workload(context=8192, concurrency=20))
    assert found.tokens == room // (34816 * 16) * 16
    assert found.sequences == room // (34816 * 8192) == 21
    assert found.fits and found.total_bytes == 20 * 34816 * 8192
    assert found.concurrent_context == room // 20 // (34816 * 16) * 16
    none = capacity_of(get_backend("none"), model_shape(described), budget, Workload(context=8192, concurrency=20))
    assert not none.fits and none.sequences == 5 and none.times_smaller == 1


# -- refusals ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("described", "message"),
    [
        (LLAMA | {"num_hidden_layers": "many"}, "num_hidden_layers: got 'many'"),
        (LLAMA | {"head_dim": -1}, "head_dim: got -1"),
        (LLAMA | {"sliding_window": 4, "sliding_window_pattern": 0.5}, "sliding_window_pattern"),
        ({"model_type": "resnet", "depths": [3, 4]}, "num_hidden_layers: got none in a config of model type 'resnet'"),
        ({"num_hidden_layers": 3}, "num_attention_heads"),
        ({"num_hidden_layers": 3, "num_attention_heads": 3}, "hidden_size"),
        # Caches of these are known, but not their weights.
        (config("gpt-oss-20b"), "quantized weights .mxfp4."),
        (LLAMA | {"vocab_size": 9, "layer_types": ["mamba", "attention"] * 4}, "layers that are not attention"),
        (LLAMA | {"vocab_size": 9, "num_kv_shared_layers": 1}, "share their keys"),
        (LLAMA, "vocab_size"),
    ],
)
def test_what_kvq_cannot_cache_or_count_is_refused(described: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        weight_count(described)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("context", 0), ("concurrency", 0), ("block_size", 12), ("residual_length", -1), ("gpu_bytes", 0), ("weight_bytes", -1)),
        *(("context", 1.5), ("context", True), ("concurrency", 1.5), ("gpu_bytes", math.inf), ("weight_bytes", "1"), ("utilization", "1")),
        *(("utilization", 0.0), ("utilization", 1.1), ("shape", ModelShape("x", (AttentionLayer(1, 512, 512),), 1, BF16, None))),
    ],
)
def test_numbers_out_of_range_are_refused(name: str, value: object) -> None:
    given: dict[str, Any] = {"shape": model_shape(config("qwen3-8b")), "context": 9, "gpu_bytes": GIB, "weight_bytes": 0} | {name: value}
    memory = {part: given.pop(part) for part in ("gpu_bytes", "weight_bytes", "utilization") if part in given}
    with pytest.raises(ArgumentError, match="head size 512" if name == "shape" else name):
        capacity_of(get_backend("int4"), given.pop("shape"), Budget(**memory), Workload(**given))


def test_weights_beside_the_config(tmp_path: Path) -> None:
    assert weight_file_bytes(tmp_path) is None
    (tmp_path / "a.safetensors").write_bytes(b"x" * 100)
    (tmp_path / "b.safetensors").write_bytes(b"x" * 11)
    assert weight_file_bytes(tmp_path) == 111
    for index, nbytes in (("[" * 100_000, 111), (json.dumps({"metadata": {"total_size": 12345}}), 12345)):
        (tmp_path / "model.safetensors.index.json").write_text(index)
        assert weight_file_bytes(tmp_path) == nbytes
