"""Whatever is passed for whichever argument of a public entry: kvq's own error, which names it, and not one byte written.

What the doors alone take, the conformance suite passes wrongly: ``test_bad_input``.
"""

import math
from collections.abc import Callable, Iterable
from decimal import Decimal
from fractions import Fraction
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvq_core.plan.invariance
from kvq_core import ArgumentError, KVQError, PagedKVCache, get_backend
from kvq_core.cache.layout import cell_views, page_views
from kvq_core.call import ops
from kvq_core.call.args import ReadArgs, WriteArgs
from kvq_core.call.memory import Extent, shares_bytes
from kvq_core.smoothing.calibration import KeySmoothing, KeyStatistics, ModelSmoothing
from kvq_core.testing import scene
from kvq_core.testing.cases import Case

pytestmark = [pytest.mark.filterwarnings("ignore:.*nested tensors.*", "ignore:.*quantize.*", "ignore:.*Sparse.*:UserWarning")]
CPU, BF16 = torch.device("cpu"), torch.bfloat16
VALUES: tuple[Any, ...] = (
    *(None, True, 0, 1, -1, 3, 130, 2**31, 2**70, -(2**70), 10**5000, 1.5, -0.5, math.nan, math.inf, -math.inf, 1j, b"1", "", "1", "x\0y"),
    *("café", "meta", "cuda:99", [], [1.0], (), (1, 2), (1.5, 0), (True, 0), (-1, -1, -1), {}, {1: 2}, {0: 0}, {0: 1.5}, {1}, range(2)),
    *(object(), int, len, torch.float32, torch.int8, torch.device("cpu"), Fraction(1, 2), Decimal(1)),
    *(np.int64(3), np.float32(0.5), np.bool_(True), np.array(1), np.zeros((2, 3))),
    *(torch.tensor(1), torch.tensor(1.0), torch.tensor(True), torch.zeros(0), torch.zeros(3), torch.zeros(3, dtype=torch.int64)),
    *(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4, dtype=torch.complex64), torch.zeros(2, 3, 4, device="meta")),
    *(torch.zeros(2, 3, 4).to_sparse(), torch.zeros(2, 3, 4, dtype=torch.int32), torch.zeros(2, 3, 4, 5, dtype=torch.bool)),
    *(torch.zeros(1).expand(2, 3, 4), torch.zeros(2, 3, 4, dtype=torch.float64), torch._neg_view(torch.zeros(2, 3, 4))),
    *(torch.quantize_per_tensor(torch.zeros(2, 3, 4), 0.1, 0, torch.qint8), torch.nested.nested_tensor([torch.zeros(2, 3)])),
    # Nearly the keys, or the queries, of a step of two tokens.
    *(torch.zeros(shape, dtype=BF16) for shape in ((1, 2, 64), (2, 1, 64), (2, 3, 64), (2, 2, 32), (1, 4, 64), (2, 4, 32))),
    *(torch.zeros(2, heads, 64, dtype=BF16, device="meta") for heads in (2, 4)),
    *(torch.zeros(2, heads, 64, dtype=dtype) for heads in (2, 4) for dtype in (torch.float32, torch.int32)),
)
Allowed = Callable[[Any], bool]


def kind(*types: type) -> Allowed:
    return lambda x: isinstance(x, types)


def integer(least: int = 0, most: int = 2**31 - 1) -> Allowed:
    return lambda x: isinstance(x, Integral) and not isinstance(x, bool) and least <= x <= most


def number(least: float, strict: bool = False) -> Allowed:
    real = lambda x: isinstance(x, Real) and not isinstance(x, bool) and abs(x) < 2**1000 and math.isfinite(x)  # noqa: E731
    return lambda x: real(x) and (x > least or (x == least and not strict))


def window(x: Any) -> bool:
    return x is None or (isinstance(x, tuple | list | range) and tuple(x) in ((0, 0), (-1, -1)))


none, nothing, flag, text = kind(type(None)), kind(), kind(bool, np.bool_), kind(str)
SCORING: dict[str, Allowed] = {
    **dict.fromkeys(("sinks", "alibi_slopes", "qq_bias"), none),
    "softmax_scale": lambda x: x is None or number(0, strict=True)(x),
    "softcap": number(0),
    "window_size": window,
    "use_alibi_sqrt": flag,
}


def told(name: str, value: object, error: Exception) -> bool:
    """Whether ``error`` is kvq's own and says which argument it is about."""
    if name == "path" and isinstance(value, str):
        return isinstance(error, KVQError | OSError)
    if isinstance(error, ArgumentError):
        return name in str(error) and ": got " in str(error) and ", need " in str(error)
    return isinstance(error, KVQError)


def try_each(
    entries: Iterable[tuple[Callable[..., Any], dict[str, Any], dict[str, Allowed]]], poisoned: Iterable[torch.Tensor] = ()
) -> None:
    """Call each entry with its valid arguments but for one, which is each of the values in turn: a failure for each that is not refused
    as it should be, or, unless it is allowed, not refused; and if one that is refused has written to ``poisoned``."""
    for x in poisoned:
        x.fill_(0xAB)
    wrong = []
    for call, valid, kinds in entries:
        for name, allowed in kinds.items():
            for place, value in enumerate(VALUES):
                what = f"{call}, {name} = #{place} ({type(value).__name__})"
                try:
                    call(**valid | {name: value})
                except Exception as error:
                    if not told(name, value, error):
                        wrong.append(f"{what}: {type(error).__name__}: {str(error)[:120]}")
                else:
                    if not allowed(value):
                        wrong.append(f"{what}: accepted")
                    for x in poisoned:
                        x.fill_(0xAB)
            if not all(bool((x == 0xAB).all()) for x in poisoned):
                wrong.append(f"{call}, {name}: something was written")
    assert not wrong, "\n".join(wrong)


PLAIN = Case(query_lens=(3, 1), seq_lens=(20, 9), dtype=torch.float32)
WINDOW = {"residual_length": 8, "max_sequences": 1}
GEOMETRY = {"num_blocks": 4, "block_size": 8, "num_kv_heads": 2, "head_size": 64, "num_layers": 2}


def on_fresh(name: str) -> Callable[..., Any]:
    """A method of a new cache, whose one sequence, 0, has two tokens."""

    def call(**arguments: Any) -> Any:
        cache = PagedKVCache("int4", **GEOMETRY)
        cache.append({cache.allocate_sequence(): 2})
        return getattr(cache, name)(**arguments)

    return call


@pytest.mark.quick
@pytest.mark.parametrize(("length", "window"), [(0, {}), (0, WINDOW), (100, WINDOW)])
def test_writes_and_reads_of_a_cache(length: int, window: dict[str, int], device: torch.device) -> None:
    """Packed rows are read, exact ones, or both."""
    cache = PagedKVCache("int4", **GEOMETRY | {"num_blocks": 14}, **window, device=device)
    cache.append({cache.allocate_sequence(): 1 + length})
    step = cache.append({0: 2})
    q, key = (torch.ones(2, heads, 64, dtype=BF16, device=device) for heads in (4, 2))
    layer, given = integer(0, 1), {"layer": 0, "step": step}
    rows = lambda x: isinstance(x, torch.Tensor) and x.dtype == torch.float32 and x.shape in ((2, 2, 64), (2, 4, 64))  # noqa: E731
    writing = {"layer": layer, "step": nothing, "key": nothing, "value": nothing}
    reading = {"layer": layer, "step": nothing, "q": rows, "out": lambda x: x is None or rows(x), **SCORING}
    reading["output_scale"] = lambda x: x is None or (isinstance(x, torch.Tensor) and x.dtype == torch.float32 and x.numel() == 1)
    doors = ((cache.write, given | {"key": key, "value": key}, writing), (cache.attend, given | {"q": q}, reading))
    try_each(doors, poisoned := cache._pages.tensors.values())
    in_cache, scale = torch.zeros(0, dtype=BF16, device=device), torch.ones(1, device=device)
    in_cache.set_(cache.layer(0).value_cache.untyped_storage())
    outs = [q, q[:1].clone().expand(q.shape), q.clone().mT.contiguous().mT, q.clone().requires_grad_()]
    outs += [in_cache[: q.numel()].view_as(q)] if length or not window else []  # where packed rows are read
    wrong = [{"out": out} for out in outs] + [{"out": q.int(), "output_scale": scale}, {"output_scale": scale.clone().requires_grad_()}]
    for options in wrong:
        with pytest.raises(ArgumentError) as refused:
            cache.attend(q=q, **given, **options)
        assert refused.value.argument in options and all(bool((x == 0xAB).all()) for x in poisoned)


@pytest.mark.quick
def test_other_methods_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    PagedKVCache("int4", **GEOMETRY).save(file := tmp_path / "saved")
    layer, seq = integer(0, 1), integer(0, 0)
    loading = {"path": text, "mode": none, "smoothing": none, "device": lambda x: x == CPU}
    try_each(
        (
            (PagedKVCache.load, {"path": file}, loading),
            (on_fresh("layer"), {}, {"layer": layer}),
            *((on_fresh(name), {}, {"seq": seq}) for name in ("length", "fork", "free")),
            (on_fresh("truncate"), {"seq": 0, "length": 1}, {"seq": seq, "length": integer(0, 2)}),
            (on_fresh("append"), {}, {"new_tokens": nothing}),
            (on_fresh("block_table"), {}, {"seqs": lambda x: isinstance(x, dict) and 0 in x}),
            (on_fresh("save"), {}, {"path": lambda x: text(x) and x and x.isprintable()}),
        )
    )


@pytest.mark.quick
def test_a_cache_s_making() -> None:
    kinds = dict.fromkeys(("num_blocks", "num_kv_heads", "num_layers"), integer(1, 130))
    kinds |= dict.fromkeys(("block_size", "head_size", "mode_or_backend", "layout"), nothing)
    kinds |= {"dtype": lambda x: x is torch.float32, "device": lambda x: x == CPU}
    kinds |= dict.fromkeys(("head_size_v", "k_scale", "smoothing"), none)
    window = {
        "residual_length": integer(1, 130),
        "sink_tokens": integer(0, 130),
        "max_sequences": integer(1, 130),
        "residual_mode": nothing,
    }
    making = {"mode_or_backend": "int4", **GEOMETRY}
    try_each(((PagedKVCache, making, kinds), (PagedKVCache, making | WINDOW, window)))
    for options, message in (
        ({"residual_length": 8}, "max_sequences: got None"),
        ({"max_sequences": 4}, "max_sequences: got 4, need None: without residual_length"),
        ({"residual_mode": "int8"}, "residual_mode: got int8_per_token_head, need none: without residual_length"),
        (WINDOW | {"residual_mode": "fp8_per_tensor"}, "residual_mode: got fp8_per_tensor"),
    ):
        with pytest.raises(ArgumentError, match=message):
            PagedKVCache(**making, **options)
    for num_blocks in (2**31 - 1, 2**30):
        with pytest.raises(ArgumentError, match=rf"num_blocks: got {num_blocks}, \d+ bytes of pages, need as many as memory holds"):
            PagedKVCache("none", **GEOMETRY | {"num_blocks": num_blocks, "num_kv_heads": 2**14})


@pytest.mark.parametrize("one", [2, np.float32(2), np.float64(2), np.int32(2), Fraction(2), torch.tensor(2), torch.tensor([[2.0]])])
def test_scales_of_any_kind_of_number(one: Any) -> None:
    """One for all layers, or one for each, which may change afterwards."""
    both = torch.tensor([2.0, 3.0])
    for scale, second in ((one, 2), ([one, 3], 3), ((one, 3.0), 3), (iter([one, 3]), 3), (both, 3)):
        cache = PagedKVCache("fp8_per_tensor", **GEOMETRY, k_scale=scale, v_scale=np.array([2.0, 3.0]))
        if scale is both:
            both.fill_(9.0)
        scales = [(caches.k_scale_cache, caches.v_scale_cache) for caches in map(cache.layer, range(2))]
        assert scales == [(2, 2), (second, 3)]


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_that_are_none(name: str) -> None:
    making = {"mode_or_backend": "fp8_per_tensor", **GEOMETRY}
    positive = lambda x: (number(0, strict=True)(x) and x < 2**127) or (isinstance(x, torch.Tensor) and x.numel() == 1)  # noqa: E731
    try_each([(PagedKVCache, making, {name: lambda x: x is None or positive(x) or x in ((1, 2),)})])
    numbers = 10**400, 1e-60, torch.tensor(1j), torch.tensor(True), np.array(2.0), torch.ones(2, 2)
    for scale in (*numbers, {0: 2.0, 1: 2.0}, {2.0, 3.0}, "22", [[1.0], [2.0]], [1.0, math.nan], [1.0, 1.0, 1.0]):
        with pytest.raises(ArgumentError, match=f"^{name}: got "):
            PagedKVCache(**making, **{name: scale})


def test_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows, int4 = torch.zeros(3, 2, 8), get_backend("int4")
    real = lambda x: isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim() > 0  # noqa: E731
    cells, heads = torch.zeros(2, 8, 130, 72, dtype=torch.uint8), {"head_size": 64, "head_size_v": 64, "dtype": BF16}
    pages = {"pages": cells.flatten(1), "block_size": 8, "num_kv_heads": 2}
    kinds: dict[str, Allowed] = {"head_size": nothing, "head_size_v": nothing, "dtype": lambda x: x is torch.float32}
    counts: dict[str, Allowed] = {"block_size": nothing, "num_kv_heads": integer(1, 130)}
    entries: tuple[tuple[Callable[..., Any], dict[str, Any], dict[str, Allowed]], ...] = (
        (kvq_core.get_backend, {}, {"mode": nothing}),
        (kvq_core.has_backend, {}, {"mode": text}),
        (partial(cell_views, int4), {"cells": cells, **heads}, {"cells": nothing, **kinds}),
        (partial(page_views, int4), {**pages, **heads}, {"pages": nothing, **kinds, **counts}),
        (kvq_core.register_backend, {"backend": type(get_backend("none"))}, {"backend": nothing, "replace": lambda x: x is True}),
        (kvq_core.unregister_backend, {}, {"mode": nothing}),
        (lambda on: kvq_core.batch_invariant(on).__enter__(), {}, {"on": flag}),
        (kvq_core.fast_hadamard_transform, {}, {"x": real}),
        (kvq_core.single_rht, {"x": rows}, {"x": real, "inverse": flag}),
        (int4.check_head_size, {"head_size": 64, "argument": "head_size"}, {"head_size": nothing}),
        (int4.packed_head_size, {}, {"head_size": nothing}),
        (KeySmoothing, {"mean": torch.ones(2, 8)}, {"mean": nothing, "balance": none}),
        (lambda **given: KeyStatistics().add(**given), {"keys": rows}, {"keys": real, "queries": none, "real": none}),
        (ModelSmoothing, {}, {"layers": lambda x: x == {}}),
        (ModelSmoothing.load, {}, {"path": nothing}),
        (ModelSmoothing({}).save, {}, {"path": lambda x: True}),
    )
    monkeypatch.setattr(kvq_core.plan.invariance._SWITCH, "value", None)  # put back at the end, whatever the calls make of it
    try_each(entries)
    kvq_core.unregister_backend("none")


def test_written_memory_is_its_own() -> None:
    built = scene.build(PLAIN, get_backend("int4"), CPU).fill()
    writing, reading = built.write_arguments(), built.read_arguments()
    cache, q = writing["key_cache"], reading["q"]
    longer = torch.zeros(cache.shape[0] + 1, *cache.shape[1:], dtype=cache.dtype)
    for twice in (
        {"value_cache": cache},
        {"key_cache": longer[:-1], "value_cache": longer[1:]},
        {"value_cache": cache[:1].clone().expand(cache.shape)},
        {"v_scale_cache": writing["k_scale_cache"]},
    ):
        with pytest.raises(ArgumentError, match=r"^v(alue_cache|_scale_cache): got (memory that|shape)"):
            built.backend.reshape_and_cache(**writing | twice)
    for out in (q, q[:1].clone().expand(q.shape)):
        with pytest.raises(ArgumentError, match=r"^out: got"):
            built.backend.unified_attention(out=out, **reading)
    assert not built.pages.changed()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("mode", "door", "wrong", "message"),
    [
        ("fp8_per_tensor", "write", {"k_scale_cache": None}, "k_scale_cache: got None, need a float32 tensor of one element, the scale of"),
        ("fp8_per_tensor", "read", {"v_scale_cache": None}, "need a float32 tensor of one element, the scale of the layer's values, which"),
        ("int4", "read", {"k_scale_cache": None}, "need the scale cache that mode int4_per_token_head stores its scales in$"),
        ("int4", "read", {"out": torch.zeros(4, 4, 64, dtype=torch.float8_e5m2)}, "torch.float32, or an output_scale beside it"),
    ],
)
def test_what_would_be_right_is_told(mode: str, door: str, wrong: dict[str, Any], message: str) -> None:
    built = scene.build(PLAIN, get_backend(mode), CPU)
    writing, reading = built.write_arguments(), built.read_arguments() | {"out": built.fresh_out()["rows"]}
    with pytest.raises(ArgumentError, match=message):
        built.backend.reshape_and_cache(**writing | wrong) if door == "write" else built.backend.unified_attention(**reading | wrong)


@pytest.mark.parametrize(("mode", "taken"), [("int4", "torch.bfloat16 or torch.float16 or torch.float32"), ("none", "torch.bfloat16")])
def test_rows_that_a_cache_stores_are_named(mode: str, taken: str) -> None:
    cache = PagedKVCache(mode, **GEOMETRY)
    step, rows = cache.append({cache.allocate_sequence(): 2}), torch.zeros(2, 2, 64, dtype=torch.float64)
    with pytest.raises(ArgumentError, match=f"^key: got torch.float64, need {taken}, as rows in mode {cache.mode} are stored here$"):
        cache.write(0, rows, rows, step)


def test_a_read_s_defaults_are_plain_causal_attention() -> None:
    built = scene.build(PLAIN, get_backend("none"), CPU).fill()
    spelled, outs = built.read_arguments(), [built.fresh_out()["rows"] for _ in range(2)]
    plain = {"window_size": (-1, -1), "softcap": 0.0, "use_alibi_sqrt": False}
    plain |= dict.fromkeys(("sinks", "alibi_slopes", "qq_bias", "output_scale", "mm_prefix_range"))
    assert {name: spelled[name] for name in plain} == plain
    built.backend.unified_attention(out=outs[0], **spelled)
    built.backend.unified_attention(out=outs[1], **{name: given for name, given in spelled.items() if name not in plain})
    assert torch.equal(outs[0][:4], outs[1][:4]) and bool(outs[0][:4].isfinite().all())


@pytest.mark.parametrize("mode", ["int4", "fp8_per_tensor"])
def test_schemas_tell_what_a_call_writes(mode: str) -> None:
    """``torch.compile`` relies on them; given scales are read only."""
    backend = get_backend(mode)
    changed = {"key_cache", "value_cache"} | ({"k_scale_cache", "v_scale_cache"} if mode == "int4" else set())
    results = {"out", "softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum", "lse"}
    for op, args, names in ((ops.op(backend, "write"), WriteArgs, changed), (ops.op(backend, "read"), ReadArgs, results)):
        declared = op._schema.arguments  # type: ignore[attr-defined]
        assert [argument.name for argument in declared] == list(args._fields)
        assert {argument.name for argument in declared if argument.is_write} == names


strided = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=3)


@given(a=strided, b=strided, offset=st.integers(-20, 20), wide=st.booleans())
@settings(max_examples=200)
def test_shared_bytes_are_those_that_both_have(a: Any, b: Any, offset: int, wide: bool) -> None:
    memory = torch.arange(256, dtype=torch.int16 if wide else torch.uint8)
    size = memory.element_size()
    views = [memory.as_strided([n for n, _ in dims], [step for _, step in dims], 64 + at) for dims, at in ((a, 0), (b, offset))]
    covered = [[size * int(x) + i for x in view.flatten() for i in range(size)] for view in views]
    extents = [Extent.of(view) for view in views]
    assert shares_bytes(*extents, offset * size) == bool({*covered[0]} & {*covered[1]})
    assert not extents[0].nested or len(set(covered[0])) == len(covered[0])
