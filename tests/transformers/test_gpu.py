"""KVQCache on a GPU: the kernels behind generate, eagerly and as a compiled decode step in a CUDA graph; and its peak memory."""

import copy
from typing import Any

import pytest
import torch
from transformers import CompileConfig

from kvq_core.testing import places
from kvq_transformers import KVQCache, balance_values, calibrate
from kvq_transformers.naming import GENERATE
from transformers_families import logits_in_steps, make_model, prompts, uneven, whole_text, worst

pytestmark = pytest.mark.gpu
GREEDY: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    return places.enter("gpu", monkeypatch).device


def on_gpu(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in inputs.items()}


COMPILED = [(family, mode) for family in ("Llama", "Gemma2") for mode in ("none", "int8", "int4", "int2", "fp8_per_tensor")]
COMPILED += [("Qwen2", "int8"), ("Qwen2", "int4"), ("Qwen3", "int4")]
"""gpt-oss's loop over experts does not compile (transformers 5.17, torch 2.11)."""


@pytest.mark.parametrize(("family", "mode"), COMPILED)
def test_a_compiled_decode_step_gives_the_same_tokens(family: str, mode: str) -> None:
    """``generate`` compiles by itself: inductor, CUDA graphs. Held to the same cache without compilation. One mode is calibrated, and
    two families have what is read from the weights: key biases, norms of keys."""
    model = (uneven(family) if family == "Qwen3" else make_model(family)).to("cuda", torch.bfloat16)
    inputs = on_gpu(prompts(2, 23, (0, 9)))
    given: dict[str, Any] = vars(calibrate(model, **inputs, smoothing="balanced")) if mode == "fp8_per_tensor" else {}

    def make() -> KVQCache:
        return KVQCache(model, mode, max_cache_len=128, **given)

    plain = model.generate(**inputs, **GREEDY, **{GENERATE: make()}, disable_compile=True)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    cache = make()
    options = inputs | GREEDY | {"compile_config": CompileConfig(fullgraph=True), GENERATE: cache}
    first = model.generate(**options)
    assert counters["stats"]["unique_graphs"] == 1 and counters["inductor"]["cudagraph_skips"] == 0
    cache.reset()
    again = model.generate(**options)
    assert torch.equal(first, again)
    # Inductor rounds elsewhere, so that near-ties may fall otherwise: most tokens agree, the first ones all.
    assert torch.equal(first[:, :25], plain[:, :25])


def test_values_are_balanced_as_on_a_cpu() -> None:
    """The same projections, to the rounding of the attention that the text is read with."""
    model, text = make_model("Llama"), prompts(2, 200, (0, 60))
    twin = balance_values(copy.deepcopy(model), **text)
    balance_values(model.cuda(), **on_gpu(text))
    for (name, found), wanted in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert float((found.cpu() - wanted).norm()) <= 1e-2 * float(wanted.norm()), name


def test_no_copy_of_the_cache_is_ever_made() -> None:
    """Peak memory of decoding over a long text, beyond what was there before the step: far below the cache, let alone an unpacked one."""
    model = make_model("Llama", torch.bfloat16, num_hidden_layers=1, max_position_embeddings=200_000).cuda()
    ids = torch.randint(3, 97, (1, 131_072), generator=torch.Generator().manual_seed(0)).cuda()
    cache = KVQCache(model.config, "int4", max_cache_len=131_072 + 64)
    with torch.no_grad():
        for part in ids.split(16_384, 1):
            model(part, **{GENERATE: cache}, logits_to_keep=1)
        model(ids[:, :1], **{GENERATE: cache})
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(4):
            model(ids[:, :1], **{GENERATE: cache})
    assert torch.cuda.max_memory_allocated() - before < cache.nbytes / 4


@torch.no_grad()
def test_codes_lose_less_by_the_norms_of_keys() -> None:
    model, inputs = uneven("Qwen3").cuda(), on_gpu(prompts(2, 33, (0, 5)))
    gold = whole_text(model, inputs)

    def loss(mode: str, **given: Any) -> float:
        found = logits_in_steps(model, inputs, KVQCache(model, mode, **given), [19, 9, 1, 1, 3])
        return worst(found, gold, inputs["attention_mask"])

    assert loss("none") < 1e-2 * float(gold.abs().max())
    assert loss("int8") < 0.6 * loss("int8", smoothing="key_bias")
