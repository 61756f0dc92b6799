"""The calculator's functions, on configs of published models: bytes worked out by hand, parameters as published."""

import json
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
    capacity_of,
    model_shape,
    read_config,
    size_of,
    weight_count,
    weight_file_bytes,
)
from kvq_core.capacity.plan import held_tokens

pytestmark = pytest.mark.quick

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
MODES = sorted({entry.mode for entry in list_backends()})
LLAMA = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4}


def config(name: str) -> dict[str, Any]:
    return read_config(CONFIGS / f"{name}.json")


# -- layers -----------------------------------------------------------------------------------------------------------------


BF16 = torch.bfloat16
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
        found = capacity_of(get_backend(mode), shape, Budget(80 * GIB, 0), context=1024)
        assert found.bytes_per_token == len(windows) * kv_heads * 2 * nbytes, mode
    if parameters is not None:
        count = weight_count(config(name))
        assert count.parameters == pytest.approx(parameters, rel=0.002) and count.bytes_per_parameter == dtype.itemsize


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"sliding_window": 64, "use_sliding_window": False}, [None] * 8),
        ({"sliding_window": 64, "sliding_window_pattern": 4}, [64, 64, 64, None] * 2),
        ({"sliding_window": 64, "sliding_window_pattern": "LLLG"}, [64, 64, 64, None] * 2),
        ({"attn_layer_indices": [3, 5]}, [None] * 2),
        ({"attn_type_list": [0, 0, 0, 1, 0, 0, 0, 1]}, [None] * 2),
        ({"hybrid_override_pattern": "M-M*-ME*"}, [None] * 2),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 6}, [None] * 6 + [64] * 2),
        ({"full_attn_idxs": [2]}, [None]),
        ({"full_attention_interval": 4}, [None] * 2),
        ({"block_types": ["recurrent", "recurrent", "attention"], "attention_window_size": 2048}, [2048] * 2),
        ({"num_kv_shared_layers": 3}, [None] * 5),
    ],
)
def test_which_layers_keep_what(fields: dict[str, Any], expected: list[int | None]) -> None:
    """Said in ways that test_capacity_types.py does not meet or has no record of."""
    assert [layer.window for layer in model_shape({**LLAMA, **fields}).layers] == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2}, AttentionLayer(2, 128, 128)),
        ({"kv_channels": 64, "multi_query_group_num": 2}, AttentionLayer(2, 64, 64)),
        ({"global_head_dim": 512, "num_global_key_value_heads": 1}, AttentionLayer(1, 512, 512)),
    ],
)
def test_heads_of_the_last_layer(fields: dict[str, Any], expected: AttentionLayer) -> None:
    assert model_shape({**LLAMA, **fields}).layers[-1] == expected


# -- refusals ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("described", "message"),
    [
        (config("deepseek-v3"), "kv_lora_rank 512: multi-head latent attention"),
        ({**LLAMA, "is_encoder_decoder": True}, "an encoder-decoder"),
        ({**LLAMA, "attention_chunk_size": 8192}, "chunked attention"),
        ({**LLAMA, "layer_types": ["compressed_sparse_attention"] * 8}, "layer_types: got 'compressed_sparse_attention'"),
        ({**LLAMA, "layer_types": ["mamba"] * 8}, "without attention layers"),
        ({**LLAMA, "layer_types": ["full_attention"] * 4}, "layer_types: got 4 entries, need 8"),
        ({**LLAMA, "num_hidden_layers": "many"}, "num_hidden_layers: got 'many'"),
        ({**LLAMA, "head_dim": -1}, "head_dim: got -1"),
        ({**LLAMA, "sliding_window": 4, "sliding_window_pattern": 0.5}, "sliding_window_pattern"),
        ({"model_type": "resnet", "depths": [3, 4]}, "num_hidden_layers: got none in a config of model type 'resnet'"),
        ({"model_type": "x", "num_hidden_layers": 3}, "num_attention_heads"),
        ({"model_type": "x", "num_hidden_layers": 3, "num_attention_heads": 3}, "hidden_size"),
    ],
)
def test_what_kvq_cannot_cache_is_refused(described: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        model_shape(described)


# -- bytes ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_bytes_are_those_the_cache_allocates(mode: str) -> None:
    shape = ModelShape("x", (AttentionLayer(3, 96, 64),) * 2, 2, torch.float16, None)
    found = capacity_of(get_backend(mode), shape, Budget(GIB, 0), context=50)
    cache = PagedKVCache(mode, num_blocks=4, num_kv_heads=3, head_size=96, head_size_v=64, num_layers=2, dtype=torch.float16)
    assert found.bytes_per_token == cache.bytes_per_token and found.bits_per_element == cache.bits_per_element
    assert found.sequence_bytes == cache.nbytes, "50 tokens take 4 blocks of 16"
    assert found.times_smaller == pytest.approx(16 / cache.bits_per_element)


def test_a_window_holds_the_blocks_it_touches() -> None:
    for window in (1, 15, 16, 17, 18, 32, 33, 100):
        most = max(end // 16 - (end - window + 1) // 16 + 1 for end in range(window, window + 64))  # tokens end-window+1 .. end
        assert held_tokens(AttentionLayer(1, 64, 64, window), 10_000, 16) == 16 * most, window


def test_windowed_layers_keep_their_window_only() -> None:
    a_layer = 4 * 2 * 256 * 2
    at_32k = capacity_of(get_backend("none"), model_shape(config("gemma-3-4b")), Budget(80 * GIB, 0), context=32768)
    assert at_32k.sequence_bytes == a_layer * (5 * 32768 + 29 * (1024 + 16)) and at_32k.bytes_per_token == 34 * a_layer
    # A model of windows alone has no longest sequence, unless the room ends before the window does.
    shape = model_shape(config("mistral-7b-v0.1"))
    assert capacity_of(get_backend("int4"), shape, Budget(40 * GIB, 14 * GIB), context=100_000).tokens is None
    tight = capacity_of(get_backend("none"), shape, Budget(GIB, 0, utilization=0.25), context=100)
    assert tight.tokens == (GIB // 4) // (131072 * 16) * 16


def test_what_fits_in_a_gpu() -> None:
    """Llama-3.1-8B in 24 GiB: 0.9 x 24 GiB less 8.03e9 x 2 bytes and 1 GiB, by hand."""
    described = config("llama-3.1-8b")
    budget = Budget(24 * GIB, weight_count(described).nbytes, GIB)
    room = int(0.9 * 24 * 2**30) - 2 * 8_029_995_008 - 2**30
    assert budget.cache_bytes == room
    found = capacity_of(get_backend("int4"), model_shape(described), budget, context=8192, concurrency=20)
    assert found.tokens == room // (34816 * 16) * 16
    assert found.sequences == room // (34816 * 8192) == 21
    assert found.fits and found.total_bytes == 20 * 34816 * 8192
    assert found.concurrent_context == room // 20 // (34816 * 16) * 16
    none = capacity_of(get_backend("none"), model_shape(described), budget, context=8192, concurrency=20)
    assert not none.fits and none.sequences == 5 and none.times_smaller == 1


def test_exact_rows_are_counted() -> None:
    """As a cache of that window allocates them, whatever the context; mode none keeps no rows twice."""
    shape = ModelShape("test", (AttentionLayer(2, 64, 32),) * 3, 3, torch.bfloat16, None)
    made = {"num_blocks": 64, "num_kv_heads": 2, "head_size": 64, "head_size_v": 32, "num_layers": 3}
    window: dict[str, Any] = {"residual_length": 40, "sink_tokens": 20}
    in_int8 = window | {"residual_mode": "int8"}
    for options in (window, in_int8):
        found = capacity_of(get_backend("int4"), shape, Budget(GIB, 0), context=1024, **options)
        assert found.sequence_bytes == PagedKVCache("int4", **made, **options, max_sequences=1).nbytes
        assert found.bits_at_context == 8 * found.sequence_bytes / (1024 * 3 * 2 * 96)
    for mode, options in (("none", window), ("int8", in_int8)):
        assert size_of(get_backend(mode), shape, context=1024, **options) == size_of(get_backend(mode), shape, context=1024)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 0}, "context"),
        ({"concurrency": 0}, "concurrency"),
        ({"block_size": 12}, "block_size"),
        ({"residual_length": -1}, "residual_length"),
        ({"gpu_bytes": 0}, "gpu_bytes"),
        ({"weight_bytes": -1}, "weight_bytes"),
        ({"utilization": 0.0}, "utilization"),
        ({"utilization": 1.1}, "utilization"),
        ({"shape": ModelShape("x", (AttentionLayer(1, 512, 512),), 1, torch.bfloat16, None)}, "head size 512"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"shape": model_shape(config("qwen3-8b")), "context": 9} | options
    memory = {name: given.pop(name, default) for name, default in (("gpu_bytes", GIB), ("weight_bytes", 0), ("utilization", 0.9))}
    with pytest.raises(ArgumentError, match=message):
        capacity_of(get_backend("int4"), budget=Budget(**memory), **given)


# -- weights ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("described", "what"),
    [
        (config("gpt-oss-20b"), "quantized weights .mxfp4."),
        ({**LLAMA, "vocab_size": 9, "layer_types": ["mamba", "attention"] * 4}, "layers that are not attention"),
        ({**LLAMA, "vocab_size": 9, "num_kv_shared_layers": 1}, "share their keys"),
        (LLAMA, "vocab_size"),
    ],
)
def test_weights_that_are_not_counted(described: dict[str, Any], what: str) -> None:
    with pytest.raises(ArgumentError, match=what):
        weight_count(described)


def test_weights_beside_the_config(tmp_path: Path) -> None:
    assert weight_file_bytes(tmp_path) is None
    (tmp_path / "a.safetensors").write_bytes(b"x" * 100)
    (tmp_path / "b.safetensors").write_bytes(b"x" * 11)
    assert weight_file_bytes(tmp_path) == 111
    (tmp_path / "model.safetensors.index.json").write_text("[" * 100_000)
    assert weight_file_bytes(tmp_path) == 111
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 12345}}))
    assert weight_file_bytes(tmp_path) == 12345
