"""Balanced values: weights that compute what they did, whose values lose less in few bits."""

import copy
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache, PreTrainedModel

from kvq_core import ArgumentError
from kvq_transformers import KVQCache, balance_values
from kvq_transformers.layers import GrowingLayer
from kvq_transformers.naming import GENERATE
from kvq_transformers.reading import read_through
from kvq_transformers.value_balance import _Projections, _WeighingLayer, balance
from transformers_families import FAMILIES, eager_twin, exact_twin, logits_in_steps, make_model, prompts, worst

pytestmark = pytest.mark.usefixtures("torch_path")
TEXT = prompts(2, 90, (0, 20))
GATED = "Qwen3Next"  # a gate stands between attention and its output projection


def weights(model: PreTrainedModel) -> list[torch.Tensor]:
    return [parameter.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in (GATED, "Lfm2")])
def test_a_balanced_model_computes_what_it_did(family: str) -> None:
    """To the rounding of its own weights: biases, groups of heads and fused projections among them. Nothing but projections changes."""
    model = make_model(family)
    twin = exact_twin(model)
    before, exact = weights(model), logits_in_steps(twin, TEXT, DynamicCache(config=model.config), [90])
    assert balance_values(model, **TEXT, residual_length=5, sink_tokens=2, chunk=37) is model
    own = logits_in_steps(eager_twin(make_model(family)), TEXT, DynamicCache(config=model.config), [90])
    found = logits_in_steps(eager_twin(model), TEXT, DynamicCache(config=model.config), [90])
    assert worst(found, exact, TEXT["attention_mask"]) <= 20 * worst(own, exact, TEXT["attention_mask"])
    names = [name for (name, now), was in zip(model.named_parameters(), before, strict=True) if not torch.equal(now, was)]
    assert names and all(name.split(".")[-2] in ("v_proj", "qkv_proj", "o_proj") for name in names)


@torch.no_grad()
def uneven(model: PreTrainedModel) -> PreTrainedModel:
    """``model`` with a few channels of values a tenth, and their columns of output projections ten times as large."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if hasattr(module, "v_proj"):
            size = module.v_proj.out_features // model.config.num_key_value_heads
            small = torch.where(torch.arange(size) % 4 == 0, 1.0, 0.1)
            module.v_proj.weight *= small.repeat(model.config.num_key_value_heads)[:, None]
            module.o_proj.weight /= small.repeat(module.o_proj.in_features // size)
    return model


def error(model: PreTrainedModel, twin: PreTrainedModel, mode: str) -> float:
    ids = prompts(1, 90)["input_ids"]
    with torch.no_grad():
        exact = twin(ids).logits
        cache = KVQCache(model, mode)
        found = [model(ids[:, first : first + 15], **{GENERATE: cache}).logits for first in range(0, 90, 15)]
    return float((torch.cat(found, 1) - exact).square().mean())


@pytest.mark.parametrize("mode", ["int8/int2", "int8/int4"])
def test_values_of_few_bits_lose_less(mode: str) -> None:
    """Where other channels of values than those that count take up a row's scale; and no more where balanced weights start."""
    model = make_model("Llama")
    text = prompts(4, 120)["input_ids"]
    rough, even = uneven(model), copy.deepcopy(model)
    before = error(rough, eager_twin(rough), mode)
    balanced = error(balance_values(copy.deepcopy(rough), text, residual_length=0, sink_tokens=0), eager_twin(rough), mode)
    assert balanced < 0.5 * before
    # The same values up to a rotation, whose codes fall otherwise.
    assert balanced < 1.3 * error(balance_values(even, text, residual_length=0, sink_tokens=0), eager_twin(even), mode)


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GptOss", "Mistral"])
def test_keys_count_by_what_is_made_of_them(family: str) -> None:
    """Under windows, softcap and sinks, with padding, in chunks: the squares of the weights that the model's own attention has."""
    model = make_model(family)
    with ExitStack() as hooks:

        def weighing(layer: GrowingLayer) -> _WeighingLayer:
            return _WeighingLayer(layer, 5, _Projections.of(model, layer.index), hooks)

        layers = read_through(model, TEXT["input_ids"], TEXT["attention_mask"], 37, weighing)
    twin, mask = eager_twin(model), TEXT["attention_mask"].bool()
    positions = (TEXT["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        out = twin(**TEXT, position_ids=positions, output_attentions=True)
    distance = torch.arange(90)[:, None] - torch.arange(90)
    for layer, attentions in zip(layers, out.attentions, strict=True):
        for row, real, weight in zip(layer.rows, mask, attentions, strict=True):
            squares = (weight * (distance >= 5)).square()[:, real][:, :, real].sum(1).view(2, -1, int(real.sum())).sum(1)
            torch.testing.assert_close(row.weight, squares, rtol=1e-3, atol=1e-5)
            moment = torch.einsum("hn,hni,hnj->hij", row.weight[:, 3:], row.value[:, 3:], row.value[:, 3:]).double()
            torch.testing.assert_close(row.moment(3), moment, rtol=1e-3, atol=1e-5)


@given(seed=st.integers(0, 2**32), size=st.sampled_from([2, 16, 48]), spread=st.floats(0, 4))
def test_no_other_matrix_costs_less(seed: int, size: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    moment, metric = (x @ torch.diag((spread * drawn(size)).exp()) @ x.mT for x in (drawn(3, size, size), drawn(3, size, size)))

    def cost(matrix: torch.Tensor) -> torch.Tensor:
        inverse = torch.linalg.inv(matrix)
        return torch.einsum("hji,hjk,hki->h", inverse, metric, inverse) * torch.einsum("hij,hjk,hik->h", matrix, moment, matrix)

    matrix, inverse = balance(moment, metric)
    torch.testing.assert_close(matrix @ inverse, torch.eye(size, dtype=torch.float64).expand(3, -1, -1), rtol=1e-6, atol=1e-6)
    assert (cost(matrix) <= cost(torch.eye(size, dtype=torch.float64).expand(3, -1, -1)) * 1.001).all()
    for scale in (1e-3, 0.1, 1.0):
        assert (cost(matrix) <= cost(matrix + scale * matrix.norm() / size * drawn(3, size, size)) * 1.001).all()


def test_it_is_saved_as_any_checkpoint(tmp_path: Path) -> None:
    model = balance_values(make_model("Qwen2"), **TEXT)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(TEXT["input_ids"]).logits, model(TEXT["input_ids"]).logits)


def test_nothing_to_go_by_changes_nothing() -> None:
    """No weight on a head's keys, as behind a window shorter than the residual one; or no output that it goes to."""
    matrix, zeros = torch.eye(8, dtype=torch.float64).expand(2, -1, -1), torch.zeros(2, 8, 8, dtype=torch.float64)
    for given_ in ((zeros, matrix), (matrix, zeros), (zeros, zeros)):
        assert all(torch.equal(found, matrix) for found in balance(*given_))
    model = make_model("Mistral")
    before = weights(model)
    balance_values(model, **TEXT, residual_length=11)
    assert all(torch.equal(now, was) for now, was in zip(model.parameters(), before, strict=True))


class Packed(torch.nn.Linear):
    """As a package of quantized weights has them."""


def packed() -> PreTrainedModel:
    model = make_model("Llama")
    model.model.layers[1].self_attn.o_proj.__class__ = Packed
    return model


def shared() -> PreTrainedModel:
    model = make_model("Llama")
    first, second = (layer.self_attn for layer in model.model.layers)
    second.v_proj.weight = first.v_proj.weight
    return model


IDS = TEXT["input_ids"]
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (lambda: make_model(GATED), {}, "model: got layer 1 with results of attention that are not what their projection takes"),
    (lambda: make_model("Olmo", clip_qkv=0.5), {}, "model: got layer 0 with values that are not what their projection makes"),
    (shared, {}, "model: got LlamaForCausalLM, of which layers share projections"),
    (packed, {}, "model: got LlamaForCausalLM, layer 1, with a Packed for a projection"),
    (lambda: make_model("GPTNeoX"), {}, "model: got GPTNeoXForCausalLM, layer 0, with 0 modules whose projections are known"),
    (
        lambda: make_model("Llama"),
        {"input_ids": IDS[:, :16]},
        "input_ids: got rows of up to 16 tokens, need more than residual_length=16 and",
    ),
    (lambda: make_model("Llama"), {"input_ids": IDS.float()}, "input_ids: got shape"),
    (lambda: make_model("Llama"), {"attention_mask": IDS[:, :3]}, "attention_mask: got shape"),
    (lambda: make_model("Llama"), {"residual_length": -1}, "residual_length: got -1"),
    (lambda: make_model("Llama"), {"sink_tokens": 0.5}, "sink_tokens: got 0.5"),
    (lambda: make_model("Llama"), {"chunk": 0}, "chunk: got 0"),
    (lambda: None, {}, "model: got NoneType"),
]


@pytest.mark.parametrize(("make", "options", "message"), REFUSED)
def test_what_cannot_be_balanced_is_left_as_it_was(make: Any, options: dict[str, Any], message: str) -> None:
    model = make()
    before = [] if model is None else weights(model)
    with pytest.raises(ArgumentError, match=f"^{message}"):
        balance_values(model, **({"input_ids": IDS, "residual_length": 16} | options))
    assert model is None or all(torch.equal(now, was) for now, was in zip(model.parameters(), before, strict=True))
    assert model is None or model.config._attn_implementation != "kvq"
