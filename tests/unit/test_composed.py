"""K in one mode and V in another. The conformance suite holds two such modes to it (test_backends.py), test_any_order.py saves one, and
test_registry.py has what does not compose."""

import copy
import pickle

import pytest
import torch

from command_line import kvq
from kvq_core import ArgumentError, get_backend, has_backend
from kvq_transformers import KVQCache
from transformers_families import logits_in_steps, make_model, prompts

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


@torch.no_grad()
def test_transformers(torch_path: None) -> None:
    """Between its halves: nearer to the model without a cache than V in both, as near as K in both lets it. Spelled in any way."""
    model, inputs = make_model("Llama"), prompts(2, 40, (0, 0))

    def logits(mode: object) -> torch.Tensor:
        return logits_in_steps(model, inputs, KVQCache(model.config, mode), [40]).double()

    exact, composed = logits("none"), logits("k8v4")
    for spelled in (("int8", "int4"), {"default": ("int8", "int4")}):
        assert torch.equal(logits(spelled), composed)
    error = [float((found - exact).square().mean()) for found in (logits("int8"), composed, logits("int2"))]
    assert error[0] < error[1] < error[2]


def test_the_command_line_takes_it(torch_path: None) -> None:
    listed = kvq("list", "--mode", "k8v4,int4/int2", "--check")
    assert listed.status == 0 and LONG in listed.out and "k4v2" in listed.out
