"""Residual windows: which keys are read exact, through every change of a cache, and that attention is over just those."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cache_model import GROUP, HEADS, LAYERS, SIZE, Model, make
from kvq_core import ArgumentError, OutOfBlocksError
from kvq_core.cache.sequences import SequenceTable
from kvq_core.call import ops
from kvq_core.kernels.formats import Format
from kvq_core.launch.replay import LaunchRecord
from kvq_core.plan.planner import KernelFamily, Launch
from kvq_core.testing import places
from kvq_core.testing.launches import noted_constants, noted_launches
from kvq_core.testing.places import Place

WINDOWS: tuple[dict[str, Any], ...] = (
    {"residual_length": 16},
    {"residual_length": 40, "sink_tokens": 4},
    {"sink_tokens": 20},
    {"residual_length": 8, "sink_tokens": 16},
    {"residual_length": 40, "sink_tokens": 4, "residual_mode": "int8"},
)


@pytest.fixture
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
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
    """A prompt in chunks, then single tokens and drafts, some of which are rejected, read with any option: at every length, the newest
    tokens are exact, and no more than a block besides."""
    model, heads = Model(place, **options), torch.tensor([0.1, 0.2, -0.3, 0.4], device=place.device)
    reads: list[dict[str, Any]] = [{}, {"softcap": 3.0}, {"sinks": heads}]
    reads += [{"window_size": (50, 0)}, {"alibi_slopes": heads.abs()}] if "sink_tokens" not in options else []
    for number, count in enumerate((5, 70, 1, 8) if place.name == "interpret" else (5, 70, 1, 8, 1, 33, *[8, 1] * 8, 200, 8, 1)):
        length, window = model.length(0), model.cache.residual_window
        assert window is not None
        first = model.first(model.append({0: count}, **reads[number % len(reads)]), 0)
        assert first <= max(length - window.length, 0)
        assert first > length - window.length - 16 or first <= window.sinks + 16
        if count == 8:
            model.cut(0, length + number % 9)


@pytest.mark.parametrize("interrupts", [False, True])
def test_a_live_step_keeps_its_rows(interrupts: bool, torch_path: None) -> None:
    """From a fork that has its last block alone now; from an append of its own sequence that did not happen."""
    model = Model(torch.device("cpu"), sequences=3, residual_length=16)
    model.append({0: 40, 2: 5})
    model.take_in(fork := model.cache.fork(0), model.texts[0])
    model.cut(fork, 37)
    call = model.grow({0: 3, 2: 30})
    if interrupts:
        model.interrupted_append({0: 70, 2: 70}, SequenceTable)
    for count in (3, 60):
        model.append({fork: count, 1: 60})
    model.finish(call)


@pytest.fixture(params=["before", "between"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The exact read goes before the packed one's two kernels, where that can be, or between them."""

    def other_goes_first(form: Format, launch: Launch) -> bool:
        return request.param == "before" and launch.tile.family is KernelFamily.TRITON

    monkeypatch.setattr("kvq_core.launch.attention._other_goes_first", other_goes_first)
    # A call like an earlier one would repeat its launches, in their order.
    ops.forget_repeats()
    yield request.param
    ops.forget_repeats()


@pytest.mark.usefixtures("order")
@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.gpu
def test_a_window_takes_one_launch_more(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where keys are split the exact read is launched beside the two kernels of the packed one, also repeated and in a CUDA graph."""
    model = Model(places.enter("gpu", monkeypatch), sequences=3, residual_length=64)
    model.append({0: 1500, 1: 700, 2: 33})
    grown = dict.fromkeys(range(3), rows)
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


@pytest.mark.parametrize(("lengths", "rows"), [((300, 70, 5), 1), ((300,), 3), ((140,), 1)])
def test_an_exact_read_beside_two_kernels(lengths: tuple[int, ...], rows: int, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that the packed read's first kernel finishes may need it: of rows in one split, in several, without keys, on their own."""
    model = Model(as_on_a_gpu(monkeypatch, overlapping=True), sequences=len(lengths), residual_length=16)
    model.append(dict(enumerate(lengths)))
    with noted_launches() as names, noted_constants() as constants:
        model.append(dict.fromkeys(range(len(lengths)), rows))
    read = ["attend", "attend", "combine_kernel"]
    assert [name for name in names if name in read] == read * LAYERS
    packed = [launch["C"].format.packed for name, launch in zip(names, constants, strict=True) if name == "attend"]
    assert packed == ([False, True] if order == "before" else [True, False]) * LAYERS


def test_two_reads_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in either is raised before anything is written."""
    model = Model(as_on_a_gpu(monkeypatch, overlapping=False), residual_length=16)
    model.append({0: 70})
    with noted_launches() as names:
        step = model.append({0: 1})
    assert names.count("attend") == 2 * LAYERS
    q = model.draw(1, HEADS * GROUP, SIZE)
    out = torch.full_like(q, torch.nan)
    with pytest.raises(ArgumentError, match="softcap"):
        model.cache.attend(0, q, step, out=out, softcap=-1.0)
    with pytest.raises(ArgumentError, match="memory of its own"):
        model.cache.attend(0, out, step, out=out)
    assert bool(out.isnan().all())


@pytest.mark.quick
def test_bad_calls() -> None:
    cache = make(residual_length=8, sink_tokens=4, max_sequences=1)
    seq = cache.allocate_sequence()
    for one_more in (cache.allocate_sequence, lambda: cache.fork(seq)):
        with pytest.raises(OutOfBlocksError, match=r"^max_sequences: got sequence number 2, need at most 1, of which .*: free one first$"):
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
