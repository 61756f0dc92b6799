"""kvq has no backward pass: in grad mode both doors refuse what requires grad, and a cache never holds a graph."""

import pytest
import torch

from cache_checks import assert_consistent, forward
from kvq_core import ArgumentError, PagedKVCache, get_backend
from kvq_core.testing import scene
from kvq_core.testing.cases import Case

CASE = Case(query_lens=(1, 3), seq_lens=(5, 4), dtype=torch.float32, sinks=True, alibi=True, qq_bias=3)


def calls(mode, device):
    """Both doors with each float argument requiring grad in turn: door, arguments, and the name of that one."""
    built = scene.build(CASE, get_backend(mode), device).fill()
    reading = built.read_arguments() | built.scratch(2) | {"out": built.fresh_out()["rows"], "output_scale": torch.ones(1, device=device)}
    for door, arguments in ((built.backend.reshape_and_cache, built.write_arguments()), (built.backend.unified_attention, reading)):
        for name, given in arguments.items():
            if isinstance(given, torch.Tensor) and given.is_floating_point() and given.dtype.itemsize > 1:
                yield door, arguments | {name: given.clone().requires_grad_()}, name


def bits(arguments):
    tensors = [x.detach() for x in arguments.values() if torch.is_tensor(x)]
    return [x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for x in tensors]


@pytest.mark.parametrize("mode", ["fp8_per_tensor", "int4"])
def test_what_requires_grad_is_refused_in_grad_mode(mode, device):
    drawn = 0
    for door, arguments, name in calls(mode, device):
        before = bits(arguments)
        with pytest.raises(ArgumentError, match=rf"^{name}: got a tensor that requires grad.*need torch.no_grad\(\)"):
            door(**arguments)
        assert all(torch.equal(x, y) for x, y in zip(before, bits(arguments), strict=True))
        for mode_off in (torch.no_grad(), torch.inference_mode()):
            with mode_off:
                door(**arguments)
        drawn += 1
    assert drawn >= 10


def test_a_cache_takes_no_mean_from_them(device):
    cache = PagedKVCache("int4", num_blocks=2, num_kv_heads=2, head_size=32, device=device, smoothing="first_prefill")
    step = cache.append({cache.allocate_sequence(): 3})
    key = torch.ones(3, 2, 32, dtype=torch.bfloat16, device=device)
    with pytest.raises(ArgumentError, match="key: got a tensor that requires grad"):
        cache.write(0, key.clone().requires_grad_(), key, step)
    assert cache.smoothing is None
    cache.write(0, key, key, step)
    assert cache.smoothing is not None
    assert_consistent(cache)


def test_compiled_code_refuses_them_too(torch_path):
    cache = PagedKVCache("int4", num_blocks=2, num_kv_heads=2, head_size=32, dtype=torch.float32)
    caches, slots = cache.layer(0), torch.arange(3)
    scales = {"k_scale_cache": caches.k_scale_cache, "v_scale_cache": caches.v_scale_cache}

    @torch.compile(backend="eager")
    def write(key):
        cache.backend.reshape_and_cache(key, key, caches.key_cache, caches.value_cache, slots, **scales)

    write(torch.ones(3, 2, 32))
    with pytest.raises(ArgumentError, match="key: got a tensor that requires grad"):
        write(torch.ones(3, 2, 32, requires_grad=True))


@pytest.mark.parametrize("mode", ["int4", "fp8_per_tensor"])
def test_a_cache_never_holds_a_graph(mode, device):
    """Made in inference mode, and used in and outside of it; whatever scales have gradients."""
    options = {"k_scale": torch.nn.Parameter(torch.ones(1))} if mode == "fp8_per_tensor" else {"smoothing": "first_prefill"}
    with torch.inference_mode():
        cache = PagedKVCache(mode, num_blocks=4, num_kv_heads=2, head_size=32, device=device, **options)
        seq, size = cache.allocate_sequence(), cache.nbytes
        forward(cache, {seq: 5})
        cache.fork(seq)
    for token in range(3):
        (out,) = forward(cache, {seq: 1}, token)
        assert not out.requires_grad
    with torch.no_grad():
        forward(cache, {seq: 1})
    assert cache.nbytes == size
    assert_consistent(cache)
