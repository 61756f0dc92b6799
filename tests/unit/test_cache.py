"""PagedKVCache: what is written is what is attended to, in every mode and layout, whatever happens to the blocks in between."""

import pytest
import torch

from cache_checks import MODES, stored
from kvq_core import ArgumentError, OutOfBlocksError, PagedKVCache, UnknownModeError, get_backend
from kvq_core.cache.layout import LAYOUTS
from kvq_core.call import reference, torch_path
from kvq_core.call.spec import Attention, Batch, Plane, Scoring

HEADS, QUERY_HEADS, SIZE, SIZE_V, LAYERS, BLOCK = 2, 6, 48, 32, 2, 8


def make(mode="int4", *, num_blocks=16, **options):
    options = {"num_kv_heads": HEADS, "head_size": SIZE, "head_size_v": SIZE_V, "num_layers": LAYERS, "block_size": BLOCK} | options
    if mode == "fp8_per_tensor":
        options = {"k_scale": [0.02, 0.03], "v_scale": torch.tensor([0.01])} | options
    return PagedKVCache(mode, num_blocks=num_blocks, **options)


def rows(cache, count, seed=0, heads=HEADS):
    """Random q, key and value for ``count`` tokens."""
    g, generator = cache.geometry, torch.Generator().manual_seed(seed)
    shapes = ((QUERY_HEADS, g.head_size), (g.num_kv_heads, g.head_size), (g.num_kv_heads, g.head_size_v))
    return [torch.randn(count, *shape, generator=generator).to(cache.device, g.dtype) for shape in shapes]


def run(cache, new_tokens, seed=0):
    """Append, write every layer and attend in every layer; q, key, value, and the output per layer."""
    step = cache.append(new_tokens)
    drawn = [rows(cache, step.num_tokens, seed * LAYERS + layer) for layer in range(cache.geometry.num_layers)]
    outs = []
    for layer, (q, key, value) in enumerate(drawn):
        cache.write(layer, key, value, step)
        outs.append(cache.attend(layer, q, step))
    return step, drawn, outs


def dense(cache, layer, step, q):
    """Plain causal attention over the decoded pages, float64, one sequence at a time."""
    out, first = [], 0
    for seq, last in zip(step.sequences, step.cu_seqlens_q.tolist()[1:], strict=True):
        k, v = (x.repeat_interleave(QUERY_HEADS // HEADS, dim=1).double() for x in stored(cache, seq)[2 * layer : 2 * layer + 2])
        mine = q[first:last].double()
        scores = torch.einsum("ihd,jhd->hij", mine, k) * cache.geometry.head_size**-0.5
        ahead = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1 + len(k) - len(mine))
        out.append(torch.einsum("hij,jhd->ihd", scores.masked_fill(ahead, -torch.inf).softmax(-1), v))
        first = last
    return torch.cat(out)


def relative(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def budget(dtype):
    """q, k', p, v' and the result are each rounded to ``dtype`` at most once, by eps / 2: five independent errors; scores count twice."""
    return torch.finfo(dtype).eps / 2 * 5**0.5 * 2


def poison(cache):
    """Every byte of codes 0xFF (NaN in fp8, fp16 and bf16), every scale NaN; scales that the caller gave stay."""
    for layer in range(cache.geometry.num_layers):
        caches = cache.layer(layer)
        caches.key_cache.view(torch.uint8).fill_(255)
        caches.value_cache.view(torch.uint8).fill_(255)
        if cache.backend.needs_scale_caches:
            caches.k_scale_cache.fill_(torch.nan)
            caches.v_scale_cache.fill_(torch.nan)


# -- write and attend ---------------------------------------------------------------------------------------------------


def scales(cache, layer):
    caches = cache.layer(layer)
    return (None, None) if cache.backend.needs_scale_caches else (caches.k_scale_cache, caches.v_scale_cache)


def assert_as_good_as_the_codec(cache, layer, seq, given):
    """What a sequence's pages hold of the given K and V is no further from them than the mode's codec alone."""
    kept = stored(cache, seq)[2 * layer : 2 * layer + 2]
    encoders = (cache.backend.encode, cache.backend.encode_value)
    for rows_, got, scale, encode in zip(given, kept, scales(cache, layer), encoders, strict=True):
        codes = encode(rows_, scale=scale)
        ideal = cache.backend.decode(codes[0], scale if codes[1] is None else codes[1]).double()
        # A kernel may round a tie the other way, which costs next to nothing more than the codec's own error.
        assert relative(got[-len(rows_) :], rows_.double()) <= 1.01 * relative(ideal, rows_.double())


@pytest.mark.quick
@pytest.mark.parametrize(
    ("mode", "layout", "dtype"),
    [
        *((mode, layout, torch.bfloat16) for mode in MODES for layout in LAYOUTS),
        *((mode, "head_major", dtype) for mode in ("none", "int4") for dtype in (torch.float16, torch.float32)),
    ],
)
def test_prefill_then_decode_then_speculation(mode, layout, dtype, device):
    cache = make(mode, layout=layout, dtype=dtype, device=device)
    poison(cache)
    a, b = cache.allocate_sequence(), cache.allocate_sequence()
    written = {}
    for seed, counts in enumerate(({a: 21, b: 3}, {b: 1, a: 1}, {b: 9}, {a: 4, b: 2})):
        step, drawn, outs = run(cache, counts, seed)
        for layer, ((q, key, value), out) in enumerate(zip(drawn, outs, strict=True)):
            # The kernels' matrix products take float16 or tf32 at best; both have an eps of 2^-10.
            allowed = budget(torch.float16 if dtype == torch.float32 and device.type != "cpu" else dtype)
            assert relative(out, dense(cache, layer, step, q)) < allowed
            for seq, first, last in zip(step.sequences, step.cu_seqlens_q.tolist(), step.cu_seqlens_q.tolist()[1:], strict=False):
                written.setdefault((layer, seq), []).append((key[first:last], value[first:last]))
    for (layer, seq), parts in written.items():
        assert_as_good_as_the_codec(cache, layer, seq, [torch.cat(half) for half in zip(*parts, strict=True)])


def used(cache):
    """Rows of a sequence that is gone in every block."""
    seq = cache.allocate_sequence()
    run(cache, {seq: 16 * BLOCK}, 9)
    cache.free(seq)


@pytest.mark.quick
@pytest.mark.parametrize("mode", MODES)
def test_neither_unwritten_bytes_nor_the_layout_matter(mode, device):
    """The same bits over clean pages, poisoned ones and ones that served before, in every layout; a copied block among them."""
    outs = []
    for layout in LAYOUTS:
        for fill in (lambda cache: None, poison, used):
            cache = make(mode, layout=layout, device=device)
            fill(cache)
            a, b = cache.allocate_sequence(), cache.allocate_sequence()
            first = run(cache, {a: 5, b: 17})[2]
            fork = cache.fork(b)
            outs.append([*first, *run(cache, {b: 1, fork: 3, a: 4}, 1)[2]])
    assert all(bool(out.isfinite().all()) for out in outs[0])
    assert all(torch.equal(x, y) for other in outs[1:] for x, y in zip(outs[0], other, strict=True))


@pytest.mark.quick
def test_options_reach_the_door(device):
    """One call with everything on, against the reference in float64; qq_bias, sinks, window and ranges all change the result."""
    cache = make("int8", device=device)
    a, b = cache.allocate_sequence(), cache.allocate_sequence()
    run(cache, {a: 12, b: 3})
    step = cache.append({a: 5, b: 4})
    q, key, value = rows(cache, 9, 7)
    cache.write(1, key, value, step)
    g = torch.Generator().manual_seed(1)
    options = {
        "softmax_scale": 0.3,
        "softcap": 15.0,
        "sinks": torch.randn(QUERY_HEADS, generator=g).to(device),
        "alibi_slopes": torch.rand(QUERY_HEADS, generator=g).to(device),
        "use_alibi_sqrt": True,
        "qq_bias": torch.randn(5, 5, generator=g).to(device),
        "mm_prefix_range": torch.tensor([[[2, 14]], [[4, 6]]], dtype=torch.int32, device=device),
    }
    out = cache.attend(1, q, step, window_size=(6, 0), **options)
    caches = cache.layer(1)
    attention = Attention(
        q=q,
        out=out,
        keys=Plane(caches.key_cache, caches.k_scale_cache, SIZE),
        values=Plane(caches.value_cache, caches.v_scale_cache, SIZE_V),
        batch=Batch(step.cu_seqlens_q, step.seqused_k, step.block_table, step.max_seqlen_q, step.max_seqlen_k),
        scoring=Scoring(window_left=6, **options),
    )
    want = reference.attention(attention, lambda plane, blocks: torch_path.gather(cache.backend, plane, blocks), torch.float64)
    assert relative(out, want) < budget(out.dtype)
    for name in ("softmax_scale", "softcap", "sinks", "alibi_slopes", "qq_bias", "mm_prefix_range"):
        without = cache.attend(1, q, step, window_size=(6, 0), **{key: value for key, value in options.items() if key != name})
        assert not torch.equal(out, without), name


@pytest.mark.quick
def test_output_scale_gives_fp8(device):
    cache = make("fp8", device=device)
    seq = cache.allocate_sequence()
    step, drawn, (out, _) = run(cache, {seq: 9})
    scale = torch.tensor([0.5], device=device)
    scaled = cache.attend(0, drawn[0][0], step, output_scale=scale)
    assert scaled.dtype == torch.float8_e4m3fn
    # e4m3 rounds by at most 2^-4 of a value; the subnormals' step is 2^-9.
    difference = (scaled.float() * scale - out.float()).abs()
    assert bool((difference <= out.float().abs() * (2**-4 + 2**-7) + scale * 2**-9).all())


@pytest.mark.quick
def test_out_is_filled_and_returned(device):
    cache = make(device=device)
    step, drawn, outs = run(cache, {cache.allocate_sequence(): 3})
    mine = torch.full((3, QUERY_HEADS, SIZE_V), torch.nan, dtype=torch.float32, device=device)
    assert cache.attend(1, drawn[1][0], step, out=mine) is mine
    assert relative(outs[1], mine.double()) < torch.finfo(torch.bfloat16).eps / 2


@pytest.mark.quick
def test_given_scales_are_used_per_layer(device):
    one = make("fp8_per_tensor", k_scale=0.05, v_scale=1, device=device)
    assert [one.layer(i).k_scale_cache.tolist() for i in range(LAYERS)] == [[pytest.approx(0.05)]] * 2
    given = torch.tensor([0.02, 0.04])
    each = make("fp8_per_tensor", k_scale=given, v_scale=[torch.tensor(2.0), 3], device=device)
    given.fill_(9.0)
    assert [each.layer(i).k_scale_cache.item() for i in range(LAYERS)] == pytest.approx([0.02, 0.04])
    assert [each.layer(i).v_scale_cache.item() for i in range(LAYERS)] == [2.0, 3.0]
    default = PagedKVCache("fp8_per_tensor", num_blocks=1, num_kv_heads=1, head_size=16, device=device)
    assert default.layer(0).k_scale_cache.tolist() == default.layer(0).v_scale_cache.tolist() == [1.0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernels_take_every_layout(mode, layout, interpreted):
    """Strided views, a copied block and poison, through the kernels: a few tokens, since the interpreter is slow."""
    cache = make(mode, layout=layout, device=interpreted)
    poison(cache)
    a = cache.allocate_sequence()
    run(cache, {a: 9})
    b = cache.fork(a)
    step, drawn, outs = run(cache, {b: 2, a: 1}, 1)
    for layer, ((q, key, value), out) in enumerate(zip(drawn, outs, strict=True)):
        assert relative(out, dense(cache, layer, step, q)) < budget(out.dtype)
        assert_as_good_as_the_codec(cache, layer, a, (key[2:], value[2:]))


# -- steps and facts ------------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_stale_steps_are_refused(device):
    cache = make(device=device)
    a, b = cache.allocate_sequence(), cache.allocate_sequence()
    for change in (lambda: cache.append({a: 1}), lambda: cache.truncate(a, 0), lambda: cache.fork(a), lambda: cache.free(a)):
        step, ((q, key, value), _), _ = run(cache, {a: 2, b: 1})
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
@pytest.mark.parametrize(
    ("mode", "bytes_per_head", "bits"),
    [("none", 512, 16), ("int8", 264, 8.25), ("fp8", 264, 8.25), ("fp8_per_tensor", 256, 8), ("int4", 136, 4.25), ("int2", 72, 2.25)],
)
def test_sizes(mode, bytes_per_head, bits, device):
    for layout in LAYOUTS:
        cache = PagedKVCache(get_backend(mode), num_blocks=2, num_kv_heads=3, head_size=128, num_layers=4, layout=layout, device=device)
        assert cache.bytes_per_token == 4 * 3 * bytes_per_head
        assert cache.bits_per_element == bits
        assert cache.nbytes == 2 * 16 * cache.bytes_per_token
        assert cache.mode == get_backend(mode).mode and cache.backend is get_backend(mode)
        heads = f"4 layers, 3 heads of 128/128, 2 of 2 blocks of 16 free, {layout}, {cache.device}"
        assert repr(cache) == f"PagedKVCache({cache.mode!r}, {heads})"


# -- bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(
    ("mode", "options", "message"),
    [
        ("int4", {"block_size": 12}, "block_size: got 12, need a multiple of 8"),
        ("int4", {"head_size": 130}, "head_size: got head size 130, need a multiple of 4"),
        ("int2", {"head_size_v": 20}, "head_size_v: got head size 20, need a multiple of 8"),
        ("int4", {"dtype": torch.int8}, "dtype: got torch.int8"),
        ("int4", {"dtype": "bfloat16"}, "dtype: got 'bfloat16'"),
        ("int4", {"layout": "NHD"}, "layout: got 'NHD', need one of head_major, token_major, interleaved"),
        ("int2", {"layout": "interleaved", "head_size": 24}, "layout: got interleaved, cells of 6 key_cache"),
        ("int4", {"device": "nonsense"}, "device: got 'nonsense'"),
        ("int4", {"device": "meta"}, "device: got 'meta'"),
        ("int4", {"device": "cuda:99"}, "device: got cuda:99"),
        ("int4", {"k_scale": 1.0}, "k_scale: got a scale, need None: mode int4_per_token_head takes no scale"),
        ("fp8_per_tensor", {"k_scale": 0.0}, "k_scale: got 0.0 for layer 0, need a positive"),
        ("fp8_per_tensor", {"k_scale": 1e-60}, "k_scale: got 1e-60 for layer 0"),
        ("fp8_per_tensor", {"v_scale": [1.0, float("nan")]}, "v_scale: got nan for layer 1"),
        ("fp8_per_tensor", {"v_scale": [1.0]}, "v_scale: got 1 scales, need one, or one for each of 2 layers"),
        ("fp8_per_tensor", {"v_scale": "ab"}, "v_scale: got 'a' for layer 0"),
        ("fp8_per_tensor", {"v_scale": torch.ones(2, 2)}, "v_scale: got .* for layer 0"),
    ],
)
def test_bad_construction(mode, options, message):
    with pytest.raises(ArgumentError, match=message):
        make(mode, **options)
    with pytest.raises(UnknownModeError, match="int7"):
        make("int7", **options)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("argument", "change", "message"),
    [
        ("layer", lambda _: 2, r"layer: got 2, need 0 \.\. 1"),
        ("key", lambda x: x[:-1], r"key: got shape \(4, 2, 48\), need \(5, 2, 48\)"),
        ("key", lambda x: x[..., :24], "key: got shape"),
        ("key", lambda x: x[:, :1], "key: got shape"),
        ("key", lambda x: x.float(), "key: got torch.float32, need torch.bfloat16"),
        ("key", lambda x: x.to("meta"), "key: got a tensor on meta"),
        ("value", lambda x: x[1:], "value: got shape"),
        ("value", lambda x: x.half(), "value: got torch.float16, need torch.bfloat16"),
    ],
)
def test_bad_writes(argument, change, message, device):
    cache = make("none", device=device)
    step = cache.append({cache.allocate_sequence(): 5})
    _, key, value = rows(cache, 5)
    arguments = {"layer": 0, "key": key, "value": value, "step": step}
    with pytest.raises(ArgumentError, match=message):
        cache.write(**arguments | {argument: change(arguments[argument])})
    assert all(not bool(view.any()) for layer in range(LAYERS) for view in (cache.layer(layer).key_cache, cache.layer(layer).value_cache))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"q": torch.zeros(5, QUERY_HEADS, SIZE_V)}, "q: got shape"),
        ({"q": torch.zeros(4, QUERY_HEADS, SIZE)}, "q: got shape"),
        ({"q": torch.zeros(5, 5, SIZE)}, "q: got 5 query heads, need a multiple of the 2 kv heads"),
        ({"q": torch.zeros(5, QUERY_HEADS, SIZE, dtype=torch.int32)}, "q: got torch.int32"),
        ({"out": torch.zeros(5, QUERY_HEADS, SIZE)}, r"out: got shape \(5, 6, 48\) on .*, need \(5, 6, 32\)"),
        ({"out": torch.zeros(5, QUERY_HEADS, SIZE_V, dtype=torch.int32)}, "out: got torch.int32"),
        ({"window_size": (3, 4)}, r"window_size: got \(3, 4\)"),
        ({"softcap": -1.0}, "softcap: got -1.0"),
        ({"softmax_scale": float("nan")}, "softmax_scale: got nan"),
        ({"sinks": torch.zeros(3)}, "sinks: got length 3"),
        ({"mm_prefix_range": torch.zeros(2, 1, 2, dtype=torch.int32)}, "mm_prefix_range: got shape"),
    ],
)
def test_bad_reads(options, message, device):
    cache = make("int4", device=device)
    step, drawn, _ = run(cache, {cache.allocate_sequence(): 5})
    options = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in options.items()}
    with pytest.raises(ArgumentError, match=message):
        cache.attend(**{"layer": 0, "q": drawn[0][0], "step": step} | options)
