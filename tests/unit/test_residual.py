"""Residual windows: which keys are read exact, through every change of a cache, and that attention is over just those."""

import copy
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cache_checks import attention, stored
from kvq_core import ArgumentError, OutOfBlocksError, PagedKVCache, UnknownModeError, get_backend
from kvq_core.cache.sequences import SequenceTable
from kvq_core.cache.step import Step
from kvq_core.call import ops
from kvq_core.launch.replay import LaunchRecord
from kvq_core.residual import ResidualWindow
from kvq_core.residual.table import ExactTable
from kvq_core.testing import places
from kvq_core.testing.launches import noted_launches
from kvq_core.testing.places import Place

HEADS, SIZE, GROUP, LAYERS = 2, 32, 2, 2
WINDOWS: tuple[dict[str, Any], ...] = (
    {"residual_length": 16},
    {"residual_length": 40, "sink_tokens": 4},
    {"sink_tokens": 20},
    {"residual_length": 8, "sink_tokens": 16},
    {"residual_length": 40, "sink_tokens": 4, "residual_mode": "int8"},
)
TOLERANCE = {"eager": 1e-5, "interpret": 8e-3, "gpu": 8e-3}
"""The kernels of packed rows round queries and weights to float16. A key read exact that should be packed moves results by .05 and more."""


class Model:
    """A cache beside the rows that it was given, as its window holds them: attention over these and over its pages, in float64."""

    def __init__(self, place: Place, seed: int = 0, **options: Any) -> None:
        self.device, self.tolerance = place.device, TOLERANCE[place.name]
        shape = {"num_kv_heads": HEADS, "head_size": SIZE, "num_layers": LAYERS, "dtype": torch.float32, "device": place.device}
        self.cache = PagedKVCache("int4", num_blocks=300, **shape, **options)
        assert self.cache.residual_window is not None
        self.window: ResidualWindow = self.cache.residual_window
        self.texts: dict[int, torch.Tensor] = {}  # [K and V of each layer, tokens, heads, size] of each sequence
        self.generator = torch.Generator().manual_seed(seed)

    def start(self) -> int:
        seq = self.cache.allocate_sequence()
        self.texts[seq] = torch.zeros(2 * LAYERS, 0, HEADS, SIZE, device=self.device)
        return seq

    def length(self, seq: int) -> int:
        return self.texts[seq].shape[1]

    def cut(self, seq: int, length: int) -> None:
        self.cache.truncate(seq, length)
        self.texts[seq] = self.texts[seq][:, :length]

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device)

    def append(self, counts: dict[int, int], **options: Any) -> Step:
        """Append random rows in every layer and check attention over them."""
        step, mode, sizes = self.cache.append(counts), get_backend(self.window.mode), list(counts.values())
        rows = self.draw(2 * LAYERS, step.num_tokens, HEADS, SIZE)
        for seq, new in zip(counts, mode.decode(*mode.encode(rows)).split(sizes, dim=1), strict=True):
            self.texts[seq] = torch.cat((self.texts[seq], new), 1)
        for layer in range(LAYERS):
            self.cache.write(layer, rows[2 * layer], rows[2 * layer + 1], step)
            q = self.draw(step.num_tokens, HEADS * GROUP, SIZE)
            found = self.cache.attend(layer, q, step, **options).split(sizes)
            for seq, mine, result in zip(counts, q.split(sizes), found, strict=True):
                j = torch.arange(self.length(seq), device=self.device)
                exact = (j >= self.first(step, seq)) | (j < self.window.sinks)
                halves = zip(self.texts[seq][2 * layer :], stored(self.cache, seq)[2 * layer :][:2], strict=False)
                wanted = attention(mine, *(torch.where(exact[:, None, None], *half) for half in halves), **options)
                error = (result.double() - wanted).abs().max()
                assert error < self.tolerance, f"sequence {seq}, {self.length(seq)} tokens: off by {error:.1e}"
        return step

    def first(self, step: Step, seq: int) -> int:
        """The first key behind the sinks that the call reads exact."""
        residual, at = step.residual, step.sequences.index(seq)
        assert residual is not None
        stop = int(residual.key_stops[at])
        if residual.packed is None or not stop:
            return 0
        return stop + self.length(seq) - int(residual.packed.seqused_k[at])


@pytest.fixture
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    return places.enter(request.param, monkeypatch)


@pytest.fixture(params=places.params("eager", "gpu"))
def fast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    return places.enter(request.param, monkeypatch)


@pytest.mark.parametrize(
    ("place", "options"),
    [
        *(pytest.param("eager", options, marks=pytest.mark.quick) for options in WINDOWS),
        pytest.param("interpret", WINDOWS[-1]),
        *(pytest.param("gpu", options, marks=pytest.mark.gpu) for options in WINDOWS),
    ],
    indirect=["place"],
    ids=str,
)
def test_a_sequence_is_read_through_its_window(options: dict[str, Any], place: Place) -> None:
    """A prompt in chunks, then single tokens and drafts: at every length, the newest tokens are exact, and no more than a block besides."""
    model = Model(place, **options, max_sequences=2)
    seq, window = model.start(), model.window
    for count in (5, 70, 1, 8) if place.name == "interpret" else (5, 70, 1, 1, 8, 33, *[1] * 17, 200, 1):
        length = model.length(seq)
        first = model.first(model.append({seq: count}), seq)
        assert first <= max(length - window.length, 0)
        assert first > length - window.length - 16 or first <= window.sinks + 16


def test_rolled_back_drafts_stay_exact_with_any_option(fast: Place) -> None:
    """What a rejected draft leaves is what would be there without it: the window before a call is never given up for its new tokens."""
    options: list[dict[str, Any]] = [
        {"softcap": 3.0},
        {"window_size": (50, 0)},
        {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4]).to(fast.device)},
        {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]).to(fast.device)},
    ]
    model = Model(fast, residual_length=32, max_sequences=1)
    seq = model.start()
    model.append({seq: 100}, **options[0])
    for kept, given_ in zip((1, 3, 8, 2), options, strict=True):
        model.append({seq: 8}, **given_)
        length = model.length(seq) - 8 + kept
        model.cut(seq, length)
        assert model.first(model.append({seq: 1}, **given_), seq) <= length - 32


@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.gpu
def test_a_window_takes_one_launch_more(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where keys are split the exact read is launched between the two kernels of the packed one, also repeated and in a CUDA graph."""
    model = Model(places.enter("gpu", monkeypatch), residual_length=64, max_sequences=3)
    counts = {model.start(): count for count in (1500, 700, 33)}
    model.append(counts)
    grown = dict.fromkeys(counts, rows)
    with noted_launches() as names:
        step = model.append(grown)
    assert [name for name in names if "attend" in name or "combine" in name] == ["attend", "attend", "combine_kernel"]
    q = model.draw(step.num_tokens, HEADS * GROUP, SIZE)
    wanted, graph = model.cache.attend(0, q, step), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = model.cache.attend(0, q, step)
    for _ in range(20):
        found.fill_(torch.nan)
        graph.replay()
        assert torch.equal(found, wanted)
        assert torch.equal(model.cache.attend(0, q, step), wanted)
    for _ in range(20):
        model.append(grown)


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, overlapping: bool) -> Place:
    """Calls of two reads are one call, with launches in a GPU's order if ``overlapping``; one launch ends before the next begins."""
    place = places.enter("interpret", monkeypatch)
    monkeypatch.setattr(ops, "replays_on", lambda device: True)
    monkeypatch.setattr(LaunchRecord, "repeat", lambda *arguments: None)
    if overlapping:
        monkeypatch.setattr("kvq_core.launch.attention.overlaps", lambda device: True)
        for module in ("scheduler.gdc_launch_dependents", "epilogue.gdc_launch_dependents", "combine.gdc_wait", "attention.gdc_wait"):
            monkeypatch.setattr(f"kvq_core.kernels.{module}", lambda: None)
    return place


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("lengths", [(300, 70, 5), (300,), (140,)])
def test_an_exact_read_between_two_kernels(lengths: tuple[int, ...], rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that the packed read's first kernel finishes may need it: of rows in one split, in several, without keys, on their own."""
    model = Model(as_on_a_gpu(monkeypatch, overlapping=True), residual_length=16, max_sequences=3)
    counts = {model.start(): count for count in lengths}
    model.append(counts)
    with noted_launches() as names:
        model.append(dict.fromkeys(counts, rows))
    read = ["attend", "attend", "combine_kernel"]
    assert [name for name in names if name in read] == read * LAYERS


def test_two_reads_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in either is raised before anything is written."""
    model = Model(as_on_a_gpu(monkeypatch, overlapping=False), residual_length=16, max_sequences=1)
    seq = model.start()
    model.append({seq: 70})
    with noted_launches() as names:
        step = model.append({seq: 1})
    assert names.count("attend") == 2 * LAYERS
    q = model.draw(1, HEADS * GROUP, SIZE)
    out = torch.full_like(q, torch.nan)
    with pytest.raises(ArgumentError, match="softcap"):
        model.cache.attend(0, q, step, out=out, softcap=-1.0)
    with pytest.raises(ArgumentError, match="memory of its own"):
        model.cache.attend(0, out, step, out=out)
    assert bool(out.isnan().all())


CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60)), min_size=1, max_size=3)),
        st.tuples(st.just("append to all"), st.integers(1, 20)),
        st.tuples(st.just("truncate"), st.integers(0, 5), st.integers(0, 100)),
        st.tuples(st.sampled_from(["fork", "free", "copy", "save", "interrupt"]), st.integers(0, 5)),
    ),
    max_size=12,
)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(CHANGES, st.sampled_from(WINDOWS), st.integers(0, 99))
@example([("append to all", 20), ("interrupt", 0), ("append to all", 1), ("interrupt", 0), ("save", 0)], WINDOWS[0], 0)
def test_any_history(fast: Place, tmp_path: Path, changes: list[Any], options: dict[str, Any], seed: int) -> None:
    """Whatever sequences have been through, attention is over exact rows where the call says so, and packed ones elsewhere."""
    model = Model(fast, seed, **options, max_sequences=4)
    model.start()
    for change, *given_ in changes:
        live = list(model.texts)
        if change == "append":
            counts = {live[index % len(live)]: count for index, count in given_[0]}
            model.append(counts)
            continue
        if change == "append to all":
            model.append(dict.fromkeys(live, given_[0]))
            continue
        seq = live[given_[0] % len(live)]
        if change == "truncate":
            model.cut(seq, model.length(seq) * given_[1] // 100)
        elif change == "interrupt":
            for table in (SequenceTable, ExactTable):
                with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
                    patch.setattr(table, "commit", Mock(side_effect=KeyboardInterrupt))
                    model.cache.append({seq: 30})
                model.cut(seq, model.length(seq))
        elif change == "fork" and len(live) < 4:
            model.texts[model.cache.fork(seq)] = model.texts[seq]
        elif change == "free" and len(live) > 1:
            model.cache.free(seq)
            del model.texts[seq]
        elif change == "copy":
            model.cache = copy.deepcopy(model.cache)
        elif change == "save":
            model.cache.save(tmp_path / "cache")
            model.cache = PagedKVCache.load(tmp_path / "cache", device=fast.device)
    model.append(dict.fromkeys(model.texts, 1))


def make(**options: Any) -> PagedKVCache:
    return PagedKVCache("int4", num_blocks=20, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.float32, **options)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"residual_length": 8}, "max_sequences"),
        ({"residual_length": -1, "max_sequences": 1}, "residual_length"),
        ({"sink_tokens": 1.5, "max_sequences": 1}, "sink_tokens"),
        ({"max_sequences": 4}, "max_sequences"),
        ({"residual_length": 8, "max_sequences": 1, "residual_mode": "fp8_per_tensor"}, "residual_mode: got fp8_per_tensor"),
        ({"residual_mode": "int8"}, "residual_mode: got int8_per_token_head, need none: without residual_length"),
        ({"residual_length": 8, "max_sequences": 1, "residual_mode": 8}, "residual_mode: got 8"),
        ({"residual_length": 8, "max_sequences": 1, "residual_mode": "int9"}, "int9"),
    ],
)
def test_bad_windows(options: dict[str, Any], message: str) -> None:
    with pytest.raises((UnknownModeError, ArgumentError), match=message):
        make(**options)


@pytest.mark.quick
def test_bad_calls() -> None:
    cache = make(residual_length=8, sink_tokens=4, max_sequences=1, num_layers=2)
    seq = cache.allocate_sequence()
    for one_more in (cache.allocate_sequence, lambda: cache.fork(seq)):
        with pytest.raises(OutOfBlocksError, match="max_sequences=1"):
            one_more()
    # More new tokens than a window holds are exact in the layer that was written last.
    step, rows = cache.append({seq: 40}), torch.randn(40, HEADS, SIZE)
    with pytest.raises(ArgumentError, match="key"):
        cache.write(0, rows.bfloat16(), rows.bfloat16(), step)
    for layer in range(2):
        cache.write(layer, rows, rows, step)
    wrong = {"window_size": (5, 0), "alibi_slopes": torch.ones(HEADS), "mm_prefix_range": torch.zeros(1, 1, 2).int(), "layer": 0}
    for argument, value in wrong.items():
        with pytest.raises(ArgumentError, match=argument):
            cache.attend(**{"layer": 1, "q": rows, "step": step} | {argument: value})


@pytest.mark.quick
@pytest.mark.parametrize("window", [{}, {"residual_length": 8, "max_sequences": 1}, WINDOWS[1] | {"max_sequences": 1}], ids=str)
@pytest.mark.parametrize("length", [5, 100])
def test_what_attention_is_given_is_checked_alike_with_a_window_and_without(window: dict[str, Any], length: int) -> None:
    """Whether or not packed rows are read. Nothing is written."""
    cache = make(**window)
    seq = cache.allocate_sequence()
    for count in (length, 3):
        step, rows = cache.append({seq: count}), torch.randn(count, HEADS, SIZE)
        cache.write(0, rows, rows, step)
    scale, expanded = torch.ones(1), torch.zeros(1, 1, SIZE).expand(3, HEADS, SIZE)
    in_cache = torch.zeros(0).set_(cache.layer(0).value_cache.untyped_storage())[: rows.numel()].view_as(rows)
    cases: list[tuple[str, dict[str, Any]]] = [
        *(("out", {"out": torch.zeros(3, HEADS, SIZE).to(dtype)}) for dtype in (torch.int32, torch.float64, torch.float8_e4m3fn)),
        ("out", {"out": torch.zeros(3, HEADS, SIZE, dtype=torch.int32), "output_scale": scale}),
        *(("out", {"out": out}) for out in (expanded, expanded.clone().mT.contiguous().mT, rows, rows.clone().requires_grad_())),
        *[("out", {"out": in_cache})] * (length == 100),  # where packed rows are read
        *(("output_scale", {"output_scale": given_}) for given_ in (torch.ones(2), 1.0, scale.double(), scale.clone().requires_grad_())),
        *(("window_size", {"window_size": given_}) for given_ in (5, "ab", (1, 2), (-2, 0), (1.5, 0))),
    ]
    for argument, options in cases:
        before = str(options)
        with pytest.raises(ArgumentError) as refused:
            cache.attend(0, rows, step, **options)
        assert refused.value.argument == argument and str(options) == before
    assert torch.equal(cache.attend(0, rows, step, window_size=None), cache.attend(0, rows, step))  # type: ignore[arg-type]
