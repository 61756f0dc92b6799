"""torch's default dtype and device are the caller's, who sets them for models of its own: no byte and no result depends on them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from cache_checks import MODES as OF_CACHES
from cache_checks import shared_cache
from kvq_core import get_backend, hadamard
from kvq_core.selfcheck import check
from kvq_core.testing import scene
from kvq_core.testing.cases import Case
from kvq_transformers import KVQCache, calibrate

CPU = torch.device("cpu")
MODES = (*OF_CACHES, "int3_per_token_head", "int4_per_token_head/int2_per_token_head")
ROWS = Case(query_lens=(3, 1, 8), seq_lens=(65, 48, 32), queries_per_kv=3)
CASES = (ROWS, *(Case(query_lens=(2, 20), seq_lens=(40, 33), smoothing=kind) for kind in ("balanced", "rotary", "ordered")))


@pytest.fixture(params=["float64", "bfloat16", "float16", "on meta"])
def default(request: pytest.FixtureRequest) -> Iterator[Callable[[], Any]]:
    """Sets one of these, and undoes it at the end."""
    before = torch.get_default_dtype()

    def change() -> None:
        hadamard._sylvester.cache_clear()
        hadamard.sign_bits.cache_clear()
        if request.param == "on meta":
            torch.set_default_device("meta")
        else:
            torch.set_default_dtype(getattr(torch, request.param))

    yield change
    torch.set_default_device(None)
    torch.set_default_dtype(before)
    hadamard._sylvester.cache_clear()


@pytest.mark.usefixtures("torch_path")
@pytest.mark.parametrize("mode", MODES)
def test_doors(mode: str, default: Callable[[], None]) -> None:
    backend = get_backend(mode)
    cases = [case for case in CASES if case.smoothing != "ordered" or backend.key_half.order_multiple]
    found: list[list[torch.Tensor]] = []
    scenes = [(scene.build(case, backend, CPU), scene.build(case, backend, CPU)) for case in cases]
    arguments = [[(built.write_arguments(), built.read_arguments(), built.fresh_out()) for built in pair] for pair in scenes]
    for index in range(2):
        if index:
            default()
        for of_case, pair in zip(arguments, scenes, strict=True):
            writing, reading, out = of_case[index]
            backend.reshape_and_cache(**writing)
            backend.unified_attention(out=out["rows"], **reading)
            found.append([pair[index].pages.raw, out.raw])
    torch.set_default_device(None)
    half = len(cases)
    for before, after in zip(found[:half], found[half:], strict=True):
        for x, y in zip(before, after, strict=True):
            assert torch.equal(x, y)


def test_hadamard_transforms(default: Callable[[], None]) -> None:
    x = torch.randn(5, 80)
    wanted = hadamard.single_rht(x), hadamard.rht_signs(80), hadamard.hadamard_matrix(16), hadamard.headroom(x)
    default()
    found = hadamard.single_rht(x), hadamard.rht_signs(80), hadamard.hadamard_matrix(16), hadamard.headroom(x)
    torch.set_default_device(None)
    for one, other in zip(wanted, found, strict=True):
        assert one.dtype == other.dtype == torch.float32 and torch.equal(one, other)


@pytest.mark.usefixtures("torch_path")
def test_a_saved_cache_and_the_self_check(default: Callable[[], None], tmp_path: Path) -> None:
    cache = shared_cache("int4")
    default()
    cache.save(tmp_path / "cache.safetensors")
    again = type(cache).load(tmp_path / "cache.safetensors")
    check(get_backend("int2"))
    torch.set_default_device(None)
    for name, tensor in cache._pages.tensors.items():
        assert torch.equal(tensor, again._pages.tensors[name])


@pytest.mark.usefixtures("torch_path")
@pytest.mark.parametrize("default", ["float64", "bfloat16", "float16"], indirect=True)
@pytest.mark.parametrize("smoothing", ["weights", "first_prefill", "rotary", "rotary_balanced", "rotary_ordered"])
def test_a_models_cache(smoothing: str, default: Callable[[], None]) -> None:
    """Not with another default device, which transformers' own masks follow."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32, "num_hidden_layers": 2}
    torch.manual_seed(0)
    kinds = (Qwen2Config, Qwen2ForCausalLM) if smoothing == "weights" else (LlamaConfig, LlamaForCausalLM)
    model: Any = kinds[1](kinds[0](vocab_size=64, head_dim=32, **sizes)).eval()
    text, ids = torch.randint(64, (1, 80)), torch.randint(64, (1, 40))
    found = []
    for index in range(2):
        if index:
            default()
        given = smoothing if smoothing in ("weights", "first_prefill") else calibrate(model, text, smoothing=smoothing).smoothing
        cache = KVQCache(model, "int2" if smoothing == "rotary_ordered" else "int4", smoothing=given, residual_length=16)
        with torch.no_grad():
            model(ids, past_key_values=cache)
        found.append([*cache.layers[1].pages._pages.tensors.values(), *cache.layers[1].pages.exact_tensors])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
