"""kvq has no backward pass: in grad mode both doors refuse what requires grad, and a cache never holds a graph."""

import pytest
import torch

from cache_checks import assert_consistent, forward
from kvq_core import ArgumentError, PagedKVCache, get_backend
from kvq_core.testing import scene
from kvq_core.testing.cases import Case

CASE = Case(query_lens=(1, 3), seq_lens=(5, 4), dtype=torch.float32, sinks=True, alibi=True, qq_bias=3)
SIZES = {"num_kv_heads": 2, "head_size": 32}
REFUSED = r": got a tensor that requires grad.*need torch.no_grad\(\)"
OPTIONS = {"int4": {"smoothing": "first_prefill"}, "fp8_per_tensor": {"k_scale": torch.nn.Parameter(torch.ones(1))}}


def bits(arguments):
    tensors = [x.detach() for x in arguments.values() if torch.is_tensor(x)]
    return [x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for x in tensors]


@pytest.mark.parametrize("mode", OPTIONS)
def test_what_requires_grad_is_refused_in_grad_mode(mode, device):
    """At both doors, each float argument in turn."""
    built, drawn = scene.build(CASE, get_backend(mode), device).fill(), 0
    reading = built.read_arguments() | built.scratch(2) | {"out": built.fresh_out()["rows"], "output_scale": torch.ones(1, device=device)}
    for door, arguments in ((built.backend.reshape_and_cache, built.write_arguments()), (built.backend.unified_attention, reading)):
        for name, x in arguments.items():
            if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype.itemsize > 1:
                given, drawn = arguments | {name: x.clone().requires_grad_()}, drawn + 1
                before = bits(given)
                with pytest.raises(ArgumentError, match=f"^{name}{REFUSED}"):
                    door(**given)
                assert all(map(torch.equal, before, bits(given)))
                for mode_off in (torch.no_grad(), torch.inference_mode()):
                    with mode_off:
                        door(**given)
    assert drawn >= 10


def test_compiled_code_refuses_them_too(torch_path):
    cache = PagedKVCache("int4", num_blocks=2, dtype=torch.float32, **SIZES)
    caches = vars(cache.layer(0))

    @torch.compile(backend="eager")
    def write(key):
        cache.backend.reshape_and_cache(key, key, slot_mapping=torch.arange(3), **caches)

    write(torch.ones(3, 2, 32))
    with pytest.raises(ArgumentError, match=f"^key{REFUSED}"):
        write(torch.ones(3, 2, 32, requires_grad=True))


@pytest.mark.parametrize("mode", OPTIONS)
def test_a_cache_never_holds_a_graph(mode, device):
    """Made in inference mode, and used in and outside of it; whatever scales have gradients."""
    with torch.inference_mode():
        cache = PagedKVCache(mode, num_blocks=4, device=device, **SIZES, **OPTIONS[mode])
        seq, size = cache.allocate_sequence(), cache.nbytes
        forward(cache, {seq: 5})
        cache.fork(seq)
    assert not any(out.requires_grad for token in range(3) for out in forward(cache, {seq: 1}, token))
    with torch.no_grad():
        forward(cache, {seq: 1})
    assert cache.nbytes == size
    assert_consistent(cache)
