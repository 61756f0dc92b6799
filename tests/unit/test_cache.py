"""PagedKVCache: what is written is what is attended to, in every mode and layout, whatever happens to the blocks in between.

Growth, sharing and reuse of blocks under any order of operations: test_any_order.py.
"""

import pytest
import torch

from cache_checks import MODES, attention, run, stored
from kvq_core import ArgumentError, OutOfBlocksError, PagedKVCache, UnknownModeError, get_backend
from kvq_core.cache.layout import LAYOUTS
from kvq_core.scales import TensorRange
from kvq_core.testing import places

HEADS, QUERY_HEADS, SIZE, SIZE_V, LAYERS, BLOCK = 2, 4, 48, 32, 2, 8


def make(mode="int4", *, num_blocks=16, **options):
    options = {"num_kv_heads": HEADS, "head_size": SIZE, "head_size_v": SIZE_V, "num_layers": LAYERS, "block_size": BLOCK} | options
    if mode == "fp8_per_tensor":
        options = {"k_scale": [0.02, 0.03], "v_scale": torch.tensor([0.01])} | options
    return PagedKVCache(mode, num_blocks=num_blocks, **options)


def dense(cache, layer, step, q, **options):
    """Attention over the decoded pages, float64, one sequence at a time."""
    rows = zip(step.sequences, q.split(step.cu_seqlens_q.diff().tolist()), strict=True)
    return torch.cat([attention(x, *stored(cache, seq)[2 * layer :][:2], at, **options) for at, (seq, x) in enumerate(rows)])


def relative(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def budget(dtype):
    """q, k', p, v' and the result are each rounded to ``dtype`` at most once, by eps / 2: five independent errors; scores count twice."""
    return torch.finfo(dtype).eps / 2 * 5**0.5 * 2


def poison(cache):
    """Every byte of codes 0xFF (NaN in fp8, fp16 and bf16), every scale NaN; scales that the caller gave stay."""
    for layer in range(LAYERS):
        caches = cache.layer(layer)
        for codes, scales in ((caches.key_cache, caches.k_scale_cache), (caches.value_cache, caches.v_scale_cache)):
            codes.view(torch.uint8).fill_(255)
            if cache.backend.needs_scale_caches:
                scales.fill_(torch.nan)


# -- write and attend ---------------------------------------------------------------------------------------------------


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
    cache = make(mode, layout=layout, dtype=dtype, device=place.device)
    poison(cache)
    a, b = cache.allocate_sequence(), cache.allocate_sequence()
    given = {seq: [] for seq in (a, b, 2)}
    for seed, counts in enumerate(({a: 9, b: 3}, {2: 2, a: 1, b: 9})):
        step, drawn, outs = run(cache, counts, seed)
        for layer, ((q, _, _), out) in enumerate(zip(drawn, outs, strict=True)):
            # The kernels' matrix products take float16 or tf32 at best; both have an eps of 2^-10.
            allowed = budget(torch.float16 if dtype == torch.float32 and place.kernels else dtype)
            assert relative(out, dense(cache, layer, step, q)) < allowed
        new = [x.split(list(counts.values())) for _, *halves in drawn for x in halves]
        for at, seq in enumerate(counts):
            given[seq].append([rows[at] for rows in new])
        if not seed:
            given[cache.fork(a)] = [*given[a]]
    for seq, parts in given.items():
        for kept, rows in zip(stored(cache, seq), zip(*parts, strict=True), strict=True):
            assert relative(kept, torch.cat(rows).double()) < 0.5, "rows of another token would be off by more than 1"


@pytest.mark.quick
def test_options_reach_the_door(device):
    """One call with everything on, against the oracle; each of them changes the result."""
    cache = make("int8", device=device)
    a, b = cache.allocate_sequence(), cache.allocate_sequence()
    run(cache, {a: 12, b: 3})
    step, drawn, _ = run(cache, {a: 5, b: 4}, 7)
    q, g = drawn[1][0], torch.Generator().manual_seed(1)
    options = {
        "softmax_scale": 0.3,
        "softcap": 15.0,
        "sinks": torch.randn(QUERY_HEADS, generator=g).to(device),
        "alibi_slopes": torch.rand(QUERY_HEADS, generator=g).to(device),
        "use_alibi_sqrt": True,
        "qq_bias": torch.randn(5, 5, generator=g).to(device),
        "mm_prefix_range": torch.tensor([[[2, 14]], [[4, 6]]], dtype=torch.int32, device=device),
    }
    mine = torch.full((9, QUERY_HEADS, SIZE_V), torch.nan, dtype=torch.float32, device=device)
    out = cache.attend(1, q, step, window_size=(6, 0), out=mine, **options)
    assert out is mine
    assert relative(out, dense(cache, 1, step, q, window_size=(6, 0), **options)) < budget(q.dtype)
    whole = {"window_size": (6, 0), **options}
    for name in whole:
        assert not torch.equal(out, cache.attend(1, q, step, **{key: value for key, value in whole.items() if key != name})), name

    scale = torch.tensor([0.5], device=device)
    scaled = cache.attend(1, q, step, output_scale=scale, **whole)
    assert scaled.dtype == torch.float8_e4m3fn
    # e4m3 rounds by at most 2^-4 of a value; the subnormals' step is 2^-9.
    assert bool(((scaled.float() * scale - out).abs() <= out.abs() * (2**-4 + 2**-7) + scale * 2**-9).all())


@pytest.mark.quick
def test_given_scales_are_used_per_layer(device):
    given = torch.tensor([0.02, 0.04])
    each = make("fp8_per_tensor", k_scale=given, v_scale=[torch.tensor(2.0), 3], device=device)
    given.fill_(9.0)
    assert [each.layer(i).k_scale_cache.item() for i in range(LAYERS)] == pytest.approx([0.02, 0.04])
    assert [each.layer(i).v_scale_cache.item() for i in range(LAYERS)] == [2.0, 3.0]
    zeros, size = TensorRange(), {"num_blocks": 1, "num_kv_heads": 1, "head_size": 16, "device": device}
    with pytest.raises(ArgumentError, match=r"^rows: got none so far"):
        zeros.scale()
    with pytest.raises(ArgumentError, match=r"^rows: got shape"):
        zeros.add(torch.zeros(3, 16))
    zeros.add(torch.zeros(3, 1, 16))
    default = PagedKVCache("fp8_per_tensor", **size, k_scale=zeros.scale())
    assert default.layer(0).k_scale_cache > 0 and default.layer(0).v_scale_cache.tolist() == [1.0]


# -- steps and sizes ------------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_stale_steps_are_refused(device):
    cache = make(device=device)
    a, b, c = (cache.allocate_sequence() for _ in range(3))
    for change in (lambda: cache.append({a: 1}), lambda: cache.truncate(a, 0), lambda: cache.fork(a), lambda: cache.free(a)):
        step, ((q, key, value), _), _ = run(cache, {a: 2, b: 1})
        cache.append({c: 1})
        cache.attend(0, q, step)
        change()
        for use in (lambda: cache.write(0, key, value, step), lambda: cache.attend(0, q, step)):  # noqa: B023
            with pytest.raises(ArgumentError, match="step: got one whose sequences were"):
                use()
    other = make(num_blocks=1, device=device)
    step = other.append({other.allocate_sequence(): 2})
    with pytest.raises(ArgumentError, match="step: got one of another cache"):
        cache.attend(0, q[:2], step)
    with pytest.raises(OutOfBlocksError, match="need 1 free blocks, have 0 of 1"):
        other.append({step.sequences[0]: 7})
    other.attend(0, q[:2], step)


@pytest.mark.quick
@pytest.mark.parametrize("num_blocks", [1, 15, 16, 17])
def test_tensors_of_a_step_stay_aligned(num_blocks, device):
    """A pointer or stride that stops being a multiple of 16 would make Triton compile the kernels again. Steps share no memory."""
    cache = make(num_blocks=60, device=device)
    sequences = [cache.allocate_sequence() for _ in range(3)]
    first = cache.append(dict.fromkeys(sequences, num_blocks * BLOCK - 1))
    kept = first.slot_mapping.clone()
    step = cache.append(dict.fromkeys(sequences, 1))
    tensors = (step.slot_mapping, step.block_table, step.cu_seqlens_q, step.seqused_k)
    assert all((tensor.data_ptr() - tensors[0].data_ptr()) % 16 == 0 for tensor in tensors) and step.block_table.stride(0) % 16 == 0
    assert torch.equal(first.slot_mapping, kept)


@pytest.mark.quick
@pytest.mark.parametrize(("mode", "bits"), [("none", 16), ("fp8", 8.25), ("fp8_per_tensor", 8), ("int2", 2.25)])
def test_sizes(mode, bits, device):
    for layout in LAYOUTS:
        cache = PagedKVCache(get_backend(mode), num_blocks=2, num_kv_heads=3, head_size=128, num_layers=4, layout=layout, device=device)
        assert cache.bytes_per_token == 4 * 3 * 2 * 128 * bits / 8 and cache.bits_per_element == bits
        assert cache.nbytes == 2 * 16 * cache.bytes_per_token
        heads = f"4 layers, 3 heads of 128/128, 2 of 2 blocks of 16 free, {layout}, {cache.device}"
        assert repr(cache) == f"PagedKVCache({get_backend(mode).mode!r}, {heads})"


# -- bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(
    ("mode", "options", "message"),
    [
        ("int4", {"block_size": 12}, "block_size: got 12, need a multiple of 8"),
        ("int4", {"head_size": 130}, "head_size: got head size 130, need a multiple of 4"),
        ("int2", {"head_size_v": 20}, "head_size_v: got head size 20, need a multiple of 8"),
        ("int4", {"dtype": torch.int8}, "dtype: got torch.int8"),
        ("int4", {"layout": "NHD"}, "layout: got 'NHD', need one of head_major, token_major, interleaved"),
        ("int4", {"device": "nonsense"}, "device: got 'nonsense'"),
        ("int4", {"device": "meta"}, "device: got 'meta'"),
        ("int4", {"device": "cuda:99"}, "device: got cuda:99"),
        ("int4", {"k_scale": 1.0}, "k_scale: got a scale, need None: mode int4_per_token_head takes no scale"),
        ("fp8_per_tensor", {"v_scale": [1.0, float("nan")]}, "v_scale: got nan for layer 1, need a positive"),
        ("fp8_per_tensor", {"v_scale": [1.0]}, "v_scale: got 1 scales, need one, or one for each of 2 layers"),
        ("fp8_per_tensor", {"v_scale": torch.ones(2, 2)}, "v_scale: got .* for layer 0"),
        *(("fp8_per_tensor", {"k_scale": scale}, "k_scale: got .* for layer 0") for scale in (0, -1.0, float("inf"), 1e-60)),
        ("int7", {}, "int7"),
    ],
)
def test_bad_construction(mode, options, message):
    with pytest.raises(UnknownModeError if mode == "int7" else ArgumentError, match=message):
        make(mode, **options)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("argument", "change", "message"),
    [
        ("layer", lambda _: 2, r"layer: got 2, need 0 \.\. 1"),
        ("key", lambda x: x[:-1], r"key: got shape \(4, 2, 48\), need \(5, 2, 48\)"),
        ("key", lambda x: x[:, :1], "key: got shape"),
        ("key", lambda x: x.float(), "key: got torch.float32, need torch.bfloat16"),
        ("key", lambda x: x.to("meta"), "key: got a tensor on meta"),
        ("value", lambda x: x[1:], "value: got shape"),
        ("value", lambda x: x.half(), "value: got torch.float16, need torch.bfloat16"),
        ("q", lambda x: x[..., :SIZE_V], "q: got shape"),
        ("q", lambda x: x[:4], "q: got shape"),
        ("q", lambda x: x[:, :3], "q: got 3 query heads, need a multiple of the 2 kv heads"),
        ("q", lambda x: x.int(), "q: got torch.int32"),
        ("out", lambda x: torch.zeros_like(x), r"out: got shape \(5, 4, 48\) on .*, need \(5, 4, 32\)"),
        ("new_tokens", lambda _: {}, "new_tokens: got no sequence"),
        ("new_tokens", lambda _: {0: 0}, r"new_tokens\[0\]: got 0, need a positive integer"),
        ("new_tokens", lambda _: {0: 1.5}, r"new_tokens\[0\]: got 1.5, need an integer"),
        ("new_tokens", lambda _: {0: 1, 7: 1}, "new_tokens: got sequence 7"),
        ("length", lambda _: 6, r"length: got 6, need 0 \.\. 5"),
    ],
)
def test_bad_calls(argument, change, message, device):
    """What a cache checks before the doors do, which the conformance suite tests. test_any_order.py: they change nothing."""
    cache = make("none", device=device)
    step, ((q, key, value), _), _ = run(cache, {cache.allocate_sequence(): 5})
    writing, reading = {"layer": 0, "key": key, "value": value, "step": step}, {"layer": 0, "q": q, "step": step, "out": None}
    doors = ((cache.append, {"new_tokens": {}}), (cache.truncate, {"seq": 0, "length": 0}), (cache.write, writing), (cache.attend, reading))
    call, given = next(door for door in doors if argument in door[1])
    with pytest.raises(ArgumentError, match=message):
        call(**given | {argument: change(q if argument == "out" else given[argument])})
