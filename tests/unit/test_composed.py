"""K in one mode and V in another. The conformance suite holds two such modes to it (test_backends.py), test_snapshot.py saves one."""

from __future__ import annotations

import copy
import pickle

import click.testing
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvq_core import ArgumentError, UnknownModeError, get_backend, has_backend
from kvq_core.cli.app import app
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
    assert composed.head_size_multiple == 4 and composed.max_head_size == 256
    with pytest.raises(ArgumentError, match="key_half or its value_half"):
        composed.packed_head_size(64)


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
    assert not has_backend(name)


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


def test_the_command_line_takes_it(torch_path: None) -> None:
    listed = click.testing.CliRunner().invoke(app, ["list", "--mode", "k8v4,int4/int2", "--check"])
    assert listed.exit_code == 0 and LONG in listed.output and "k4v2" in listed.output, listed.output
