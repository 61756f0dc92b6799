"""K in one mode and V in another. The conformance suite holds two such modes to it (test_backends.py); here is what is around them."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import click.testing
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvq_core import ArgumentError, PagedKVCache, UnknownModeError, get_backend, has_backend
from kvq_core.cache.layout import cell_size, cell_views, fields
from kvq_core.cli.app import app
from kvq_core.kernels.formats import Format
from kvq_transformers import KVQCache
from kvq_transformers.naming import cache_argument

pytestmark = pytest.mark.quick
LONG = "int8_per_token_head/int4_per_token_head"


def test_one_instance_by_every_name() -> None:
    composed = get_backend("int8/int4")
    assert composed.mode == LONG and composed.key_half is get_backend("int8") and composed.value_half is get_backend("int4")
    for name in (LONG, "k8v4", " k8v4 ", "kvq-int8fp8:int8/int4", "int8 / int4"):
        assert get_backend(name) is composed and has_backend(name)
    assert get_backend("int4/int4") is get_backend("int4") is get_backend("k4v4")
    assert pickle.loads(pickle.dumps(composed)) is copy.deepcopy(composed) is composed


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("int8/int5", UnknownModeError, "int5"),
        ("k8v7", UnknownModeError, "int7_per_token_head"),
        ("int8/none", ArgumentError, "value_half: got mode none"),
        ("fp8_per_tensor/int4", ArgumentError, "key_half: got mode fp8_per_tensor"),
        ("int8/int4/int2", ArgumentError, "value_half: got mode int4_per_token_head/int2_per_token_head"),
        ("/int4", UnknownModeError, "''"),
    ],
)
def test_what_does_not_compose(name: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        get_backend(name)


def test_what_differs_is_asked_of_a_half() -> None:
    composed = get_backend("k8v4")
    for ask in (
        lambda: composed.packed_head_size(64),
        lambda: composed.cache_dtype(torch.bfloat16),
        lambda: composed.decode(torch.zeros(1, 64, dtype=torch.uint8), torch.ones(1)),
    ):
        with pytest.raises(ArgumentError, match="key_half or its value_half"):
            ask()
    assert composed.head_size_multiple == 4 and composed.max_head_size == 256
    form = composed.kernels().format
    assert form == Format(get_backend("int8").kernels().format.key, get_backend("int4").kernels().format.value)


def test_cells_hold_both() -> None:
    composed = get_backend("k4v2")
    stored = fields(composed, 64, 64, torch.bfloat16)
    assert [(field.name, field.nbytes) for field in stored] == [
        ("key_cache", 32), ("k_scale_cache", 4), ("value_cache", 16), ("v_scale_cache", 4),
    ]  # fmt: skip
    caches = cell_views(composed, torch.zeros(3, 16, 2, cell_size(stored), dtype=torch.uint8), 64, 64, torch.bfloat16)
    assert caches.key_cache.shape == (3, 16, 2, 32) and caches.value_cache.shape == (3, 16, 2, 16)


def test_a_cache_saves_and_loads(tmp_path: Path, torch_path: None) -> None:
    cache = PagedKVCache("k8v4", num_blocks=4, num_kv_heads=2, head_size=64)
    step = cache.append({cache.allocate_sequence(): 9})
    rows = torch.randn(9, 2, 64, generator=torch.Generator().manual_seed(0))
    cache.write(0, rows, rows, step)
    cache.save(tmp_path / "pages.safetensors")
    loaded = PagedKVCache.load(tmp_path / "pages.safetensors")
    assert loaded.backend is cache.backend and loaded.bits_per_element == cache.bits_per_element == 6.5
    for name in ("key_cache", "value_cache", "k_scale_cache", "v_scale_cache"):
        assert torch.equal(getattr(loaded.layer(0), name), getattr(cache.layer(0), name))


def test_transformers(torch_path: None) -> None:
    """Between its halves: nearer to the model without a cache than V in both, as near as K in both lets it. Spelled in any way."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    config = LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=64)
    model, ids = LlamaForCausalLM(config).eval(), torch.randint(3, 64, (2, 40))

    def logits(mode: object) -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=ids, use_cache=True, **{cache_argument(model.forward): KVQCache(config, mode)}).logits.double()

    exact, composed = logits("none"), logits("k8v4")
    for spelled in (("int8", "int4"), {"default": ("int8", "int4")}):
        assert torch.equal(logits(spelled), composed)
    error = [float((found - exact).square().mean()) for found in (logits("int8"), composed, logits("int2"))]
    assert error[0] < error[1] < error[2]


def test_commands(tmp_path: Path, torch_path: None) -> None:
    runner = click.testing.CliRunner()
    listed = runner.invoke(app, ["list", "--mode", "k8v4,int4/int2", "--check"])
    assert listed.exit_code == 0 and LONG in listed.output and "k4v2" in listed.output, listed.output
    (tmp_path / "config.json").write_text(LlamaConfig(num_hidden_layers=4).to_json_string())
    sized = runner.invoke(app, ["calc", str(tmp_path), "--mode", "int8,k8v4,int4", "--csv"])
    assert sized.exit_code == 0 and LONG in sized.output, sized.output
