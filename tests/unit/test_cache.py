"""PagedKVCache: what is written is what is attended to, in every mode and layout, whatever happens to the blocks in between.

Growth, sharing and reuse of blocks under any order of operations: test_any_order.py. Sizes: test_capacity.py. What is refused:
test_arguments.py.
"""

import copy

import pytest
import torch

from cache_checks import MODES
from cache_model import Model, make
from kvq_core import ArgumentError, PagedKVCache
from kvq_core.cache.layout import LAYOUTS
from kvq_core.scales import TensorRange
from kvq_core.testing import places


@pytest.fixture
def place(request, monkeypatch):
    return places.enter(request.param, monkeypatch)


DRAWN = [(mode, layout, torch.bfloat16) for mode in MODES for layout in LAYOUTS]
DRAWN += [(mode, "head_major", dtype) for mode in ("none", "int4") for dtype in (torch.float16, torch.float32)]
# The interpreter is slow, and kernels see strides alone, which the suite varies.
INTERPRETED = [("fp8_per_tensor", "token_major", torch.bfloat16), ("int4", "interleaved", torch.bfloat16)]


@pytest.mark.parametrize(
    ("place", "mode", "layout", "dtype"),
    [
        *(pytest.param("eager", *drawn, marks=pytest.mark.quick) for drawn in DRAWN),
        *(pytest.param("interpret", *drawn) for drawn in INTERPRETED),
        *(pytest.param("gpu", *drawn, marks=pytest.mark.gpu) for drawn in DRAWN),
    ],
    indirect=["place"],
)
def test_prefill_then_decode_of_a_fork(mode, layout, dtype, place):
    """Over poisoned pages."""
    model = Model(place, sequences=2, mode=mode, layout=layout, dtype=dtype, block_size=8)
    model.append({0: 9, 1: 3})
    model.take_in(model.cache.fork(0), model.texts[0])
    model.append({2: 2, 0: 1, 1: 9})
    model.check()


@pytest.mark.quick
def test_options_reach_the_door(device):
    """One call with everything on, against the oracle; each of them changes the result."""
    model, g = Model(device, sequences=2, mode="int8", dtype=torch.bfloat16), torch.Generator().manual_seed(1)
    options = {
        "window_size": (6, 0),
        "softmax_scale": 0.3,
        "softcap": 15.0,
        "sinks": torch.randn(4, generator=g).to(device),
        "alibi_slopes": torch.rand(4, generator=g).to(device),
        "use_alibi_sqrt": True,
        "qq_bias": torch.randn(5, 5, generator=g).to(device),
        "mm_prefix_range": torch.tensor([[[2, 14]], [[4, 6]]], dtype=torch.int32, device=device),
    }
    model.append({0: 12, 1: 3})
    step = model.append({0: 5, 1: 4}, **options)
    q = model.draw(9, 4, 32).bfloat16()
    mine = torch.full(q.shape, torch.nan, dtype=torch.float32, device=device)
    out = model.cache.attend(1, q, step, out=mine, **options)
    assert out is mine
    for name in options:
        assert not torch.equal(out, model.cache.attend(1, q, step, **{key: x for key, x in options.items() if key != name})), name
    scale = torch.tensor([0.5], device=device)
    scaled = model.cache.attend(1, q, step, output_scale=scale, **options)
    assert scaled.dtype == torch.float8_e4m3fn
    # e4m3 rounds by at most 2^-4 of a value; the subnormals' step is 2^-9.
    assert bool(((scaled.float() * scale - out).abs() <= out.abs() * (2**-4 + 2**-7) + scale * 2**-9).all())


@pytest.mark.quick
def test_layers_that_a_step_was_not_written_to_are_not_read(device):
    """What their blocks hold is of freed sequences. Whoever has a layer's views may have written through them."""
    cache = make(device=device)
    step, rows = cache.append({cache.allocate_sequence(): 3}), torch.ones(3, 2, 32, device=device)
    with pytest.raises(ArgumentError, match=r"^layer: got 0, need one written with this step: write\(\) comes first$"):
        cache.attend(0, rows, step)
    cache.write(0, rows, rows, step)
    first = cache.attend(0, rows, step)
    assert torch.equal(first, cache.attend(0, rows, step))
    with pytest.raises(ArgumentError, match=r"^layer: got 1, need one written"):
        cache.attend(1, rows, step)
    twin, same = copy.deepcopy((cache, step))
    assert torch.equal(first, twin.attend(0, rows, same))
    cache.backend.reshape_and_cache(rows, rows, slot_mapping=step.slot_mapping, **vars(cache.layer(1)))
    assert torch.equal(first, cache.attend(1, rows, step))


@pytest.mark.quick
def test_views_do_not_reach_exact_rows(device):
    """Of which the blocks of a layer that was not written hold those of freed sequences."""
    cache = make(device=device, residual_length=16, max_sequences=1)
    step, rows = cache.append({cache.allocate_sequence(): 3}), torch.ones(3, 2, 32, device=device)
    cache.backend.reshape_and_cache(rows, rows, slot_mapping=step.slot_mapping, **vars(cache.layer(0)))
    with pytest.raises(ArgumentError, match=r"^layer: got 0, need one written with this step"):
        cache.attend(0, rows, step)


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rows_fit_both_kinds_of_pages(dtype, device):
    """Exact rows in int8 take any dtype; those of mode none beside them, one."""
    cache = make("none", device=device, dtype=torch.float32, residual_length=16, residual_mode="int8", max_sequences=1)
    step, rows = cache.append({cache.allocate_sequence(): 3}), torch.ones(3, 2, 32, device=device, dtype=dtype)
    if dtype == torch.float32:
        cache.write(0, rows, rows, step)
        assert torch.equal(cache.attend(0, rows, step), rows.expand(3, 2, 32))
    else:
        with pytest.raises(ArgumentError, match=r"^key: got torch.float16, need torch.float32"):
            cache.write(0, rows, rows, step)


@pytest.mark.quick
def test_memory_that_exact_rows_would_take_is_named(device):
    for most in (2**26, 2**30):
        with pytest.raises(ArgumentError, match=rf"^max_sequences: got {most} with 3 blocks of 16 exact rows each: "):
            make(device=device, residual_length=16, max_sequences=most)


@pytest.mark.quick
def test_scales_of_ranges_seen(device):
    """TensorRange: none before it has seen rows, a positive one of zeros; and 1 if none is given."""
    zeros = TensorRange()
    for use, message in ((zeros.scale, r"^rows: got none so far"), (lambda: zeros.add(torch.zeros(3, 16)), r"^rows: got shape")):
        with pytest.raises(ArgumentError, match=message):
            use()
    for number in (torch.nan, torch.inf, -torch.inf):
        zeros.add(torch.full((3, 1, 16), number))
    with pytest.raises(ArgumentError, match=r"^rows: got none so far"):
        zeros.scale()
    zeros.add(torch.zeros(3, 1, 16))
    default = PagedKVCache("fp8_per_tensor", num_blocks=1, num_kv_heads=1, head_size=16, device=device, k_scale=zeros.scale())
    assert default.layer(0).k_scale_cache > 0 and default.layer(0).v_scale_cache.tolist() == [1.0]


@pytest.mark.quick
@pytest.mark.parametrize("num_blocks", [1, 15, 16, 17])
def test_tensors_of_a_step_stay_aligned(num_blocks, device):
    """A pointer or stride that stops being a multiple of 16 would make Triton compile the kernels again. Steps share no memory."""
    cache = make(device=device, block_size=8)
    sequences = [cache.allocate_sequence() for _ in range(3)]
    first = cache.append(dict.fromkeys(sequences, num_blocks * 8 - 1))
    kept = first.slot_mapping.clone()
    step = cache.append(dict.fromkeys(sequences, 1))
    tensors = (step.slot_mapping, step.block_table, step.cu_seqlens_q, step.seqused_k)
    assert all((tensor.data_ptr() - tensors[0].data_ptr()) % 16 == 0 for tensor in tensors) and step.block_table.stride(0) % 16 == 0
    assert torch.equal(first.slot_mapping, kept)
