"""Several threads at the doors: on one stream they take turns at its workspace, first calls do not meet, and results are those of one.

And the workspaces: kept, grown, apart from each other, and apart from every CUDA graph's memory.
"""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from triton.runtime.jit import JITFunction

from cache_checks import MODES
from elsewhere import apart, in_threads
from kvq_core import get_backend, register_backend, unregister_backend
from kvq_core.launch import attention, replay, workspace
from kvq_core.none import NoneBackend
from kvq_core.testing import places, scene
from kvq_core.testing.cases import Case
from kvq_core.testing.dry_launch import Started, launching_for

CPU = torch.device("cpu")
Call = Callable[[], object]


def calls_of(mode: str, number: int) -> list[Call]:
    """Both doors over a few batches, most of which are split; tensors of this thread's own."""
    backend, calls = get_backend(mode), list[Call]()
    for lengths in ((600, 200), (1800, 10), (400, 300)):
        case = Case(query_lens=(1, 1 + number % 2), seq_lens=lengths, head_size=64, dtype=torch.bfloat16, num_kv_heads=1)
        made = scene.build(case, backend, CPU, seed=number)
        calls.append(partial(backend.reshape_and_cache, **made.write_arguments()))
        calls.append(partial(backend.unified_attention, out=made.fresh_out()["rows"], **made.read_arguments()))
    return calls * 3


class Starts(list[tuple[int, Started]]):
    """Launches, in order, each with its thread, which lets other threads go first."""

    def append(self, started: Started) -> None:  # type: ignore[override]
        time.sleep(0)
        super().append((threading.get_ident(), started))


def raced(every: list[list[Call]]) -> tuple[int, int, int]:
    """How many launches a thread made at least; how many used a workspace between another thread's launch into it and that one's combine
    kernel; how many began while Triton was choosing for another thread."""
    inside, overlaps, run = list[object](), list[object](), JITFunction.run

    def noted(kernel: Any, *arguments: Any, **options: Any) -> Any:
        overlaps.extend(inside[:1])
        inside.append(kernel)
        try:
            return run(kernel, *arguments, **options)
        finally:
            inside.pop()

    # A device of its own, so Triton chooses again.
    with launching_for("sm_90") as dry, patch.object(JITFunction, "run", noted):
        dry.started = starts = Starts()  # type: ignore[assignment]
        in_threads([lambda calls=calls: [call() for call in calls] for calls in every])  # type: ignore[misc]
    places = [range(x.data_ptr(), x.data_ptr() + x.nbytes) for kept in workspace._WORKSPACES._kept.values() for x in kept]
    interleaved, owner = 0, None
    for thread, started in starts:
        if any(isinstance(value, int) and any(value in place for place in places) for value in started.values):
            interleaved += owner not in (None, thread)
            owner = None if started.kernel == "combine_kernel" else thread
    return min(Counter(thread for thread, _ in starts).values()), interleaved, len(overlaps)


@apart
def test_threads_on_one_stream_take_turns() -> None:
    """No launch of another thread's comes between a split's launch and its combine, and Triton chooses for one at a time."""
    # As on a GPU, where threads start on one stream; on the CPU each would have a workspace of its own.
    workspace._place = lambda device, stream: (device, 0)
    every = [calls_of(mode, number) for number, mode in enumerate(("none", "int8", "fp8_per_tensor", "int4") * 2)]
    launches, *wrong = raced(every)
    assert launches > 20 and wrong == [0, 0], (launches, wrong)
    replay._CHOOSING = contextlib.nullcontext()  # type: ignore[assignment]
    replay.sole_use = attention.sole_use = lambda *place: contextlib.nullcontext()  # type: ignore[attr-defined]
    assert min(raced(every)[1:]) > 0, "without locks they would not"


@pytest.mark.quick
def test_first_calls_wait_for_the_ops(monkeypatch: pytest.MonkeyPatch, torch_path: None) -> None:
    """A thread that finds a mode's ops half defined waits for them."""
    backend: Any = type("Slow", (NoneBackend,), {"mode": "slowly_defined_test"})
    define = torch.library.Library.define

    def slowly(self: torch.library.Library, *arguments: Any, **options: Any) -> Any:
        time.sleep(0.05)
        return define(self, *arguments, **options)

    def written() -> torch.Tensor:
        made = scene.build(Case(query_lens=(1, 3), seq_lens=(40, 20), num_kv_heads=1), get_backend(backend.mode), CPU)
        made.write()
        return made.pages.raw

    monkeypatch.setattr(torch.library.Library, "define", slowly)
    register_backend(backend)
    try:
        first, *others = in_threads([written] * 4)
    finally:
        unregister_backend(backend.mode)
    assert all(torch.equal(first, other) for other in others)


LEAST = 1 << 16


@pytest.fixture
def workspaces(monkeypatch: pytest.MonkeyPatch) -> workspace._Workspaces:
    """Fresh ones, in place of the process's."""
    fresh = workspace._Workspaces()
    monkeypatch.setattr(workspace, "_WORKSPACES", fresh)
    return fresh


@pytest.mark.quick
def test_kept_and_grown_for_each_stream(workspaces: workspace._Workspaces) -> None:
    """On the CPU a thread is a stream."""
    first = workspaces.get(CPU, 10)
    (theirs,) = in_threads([lambda: workspaces.get(CPU, 10)])
    assert first.numel() == LEAST and workspaces.get(CPU, LEAST) is first and theirs.data_ptr() != first.data_ptr()
    larger = workspaces.get(CPU, LEAST + 1)
    assert larger is not first and larger.numel() == LEAST * 3 // 2 and workspaces.get(CPU, 10) is larger
    assert any(kept is first for buffers in workspaces._kept.values() for kept in buffers), "a graph may still use it"


@pytest.mark.quick
def test_provided_buffers_are_their_threads_own(workspaces: workspace._Workspaces) -> None:
    """Whichever thread's block ends first, and nothing is left of it: suites on several threads provide buffers of their own."""
    inside, ended = threading.Barrier(2), threading.Event()

    def reading(first: bool) -> bool:
        own = torch.empty(1)
        with workspace.provided(lambda device, size: own):
            inside.wait()
            if not first:
                ended.wait(10)
            seen = workspace.kept_buffer(CPU, 1) is own
        ended.set()
        return seen and workspace.kept_buffer(CPU, 1) is workspaces.get(CPU, 1)

    assert in_threads([partial(reading, True), partial(reading, False)]) == [True, True]
    assert workspace.kept_buffer(CPU, 1) is workspaces.get(CPU, 1)


@pytest.mark.quick
@pytest.mark.parametrize("warm", [False, True])
def test_memory_of_a_capture_is_not_kept(workspaces: workspace._Workspaces, monkeypatch: pytest.MonkeyPatch, warm: bool) -> None:
    """Neither a later eager call nor a later capture may see it, and what was kept before stays, and serves what it is large enough for."""
    size, kept = 3 * LEAST, [workspaces.get(CPU, 10)] if warm else []
    with monkeypatch.context() as capture:
        capture.setattr(workspace, "_capturing", lambda device: True)
        assert all(workspaces.get(CPU, LEAST) is before for before in kept)
        captured = [workspaces.get(CPU, size) for _ in range(2)]
    assert all(workspaces.get(CPU, 10) is before for before in kept)
    outside = workspaces.get(CPU, size)
    assert captured[0].numel() == size and len({buffer.data_ptr() for buffer in (*captured, outside)}) == 3
    assert workspaces.get(CPU, size) is outside


@pytest.mark.gpu
def test_memory_is_its_streams_own(workspaces: workspace._Workspaces, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the default stream's, where freed memory may be in use still by what that stream has yet to run."""
    device, stream = places.enter("gpu", monkeypatch).device, torch.cuda.Stream()
    with torch.cuda.stream(stream):
        buffer = workspaces.get(device, 10 * LEAST)
    (segment,) = [found for found in torch.cuda.memory_snapshot() if 0 <= buffer.data_ptr() - found["address"] < found["total_size"]]
    assert segment["stream"] == stream.cuda_stream


HEADS: dict[str, Any] = {"num_kv_heads": 4, "queries_per_kv": 4, "head_size": 128, "dtype": torch.bfloat16}
GPU_CASES = (
    Case(query_lens=(1,) * 6, seq_lens=(9000, 700, 3000, 1, 40, 5000), **HEADS),
    Case(query_lens=(1,), seq_lens=(16000,), **HEADS),
    Case(query_lens=(300, 1, 4), seq_lens=(900, 2500, 1200), **HEADS),
)


@pytest.mark.gpu
@pytest.mark.parametrize("streams", ["one stream", "a stream each"])
def test_threads_with_different_modes(monkeypatch: pytest.MonkeyPatch, streams: str) -> None:
    """Every mode in two threads, from the first call on: each result has the bits that one thread on one stream gets alone."""
    device, jobs = places.enter("gpu", monkeypatch).device, []
    for number, mode in enumerate(MODES * 2):
        made = scene.build(GPU_CASES[number % 3], get_backend(mode), device, seed=number)
        jobs.append((made, made.write_arguments(), made.read_arguments(), [made.fresh_out()["rows"] for _ in range(41)]))
    torch.cuda.synchronize()

    def work(number: int, rounds: slice) -> None:
        made, writing, reading, outs = jobs[number]
        with torch.cuda.stream(torch.cuda.default_stream() if streams == "one stream" else torch.cuda.Stream()):
            for out in outs[rounds]:
                made.backend.reshape_and_cache(**writing)
                made.backend.unified_attention(out=out, **reading)

    in_threads([partial(work, number, slice(1, None)) for number in range(len(jobs))])
    torch.cuda.synchronize()
    for number, (made, _, _, outs) in enumerate(jobs):
        work(number, slice(1))
        torch.cuda.synchronize()
        rows = sum(made.case.query_lens)
        assert all(torch.equal(out[:rows], outs[0][:rows]) for out in outs), made.backend.mode
