"""Several threads at the doors: on one stream they take turns at its workspace, first calls do not meet, and results are those of one.

And the workspaces: kept, grown, apart from each other, and apart from every CUDA graph's memory.
"""

import functools
import threading
import time
from typing import Any

import pytest
import torch

from cache_checks import MODES
from in_threads import in_threads
from kvq_core import get_backend, register_backend, unregister_backend
from kvq_core.launch import workspace
from kvq_core.none import NoneBackend
from kvq_core.testing import places, scene
from kvq_core.testing.cases import Case
from programs import told_by

CPU = torch.device("cpu")


def test_threads_on_one_stream_take_turns() -> None:
    """No launch of another thread's comes between a split's launch and its combine, and Triton chooses for one at a time."""
    seen = told_by("dry_threads")
    locked, unlocked = seen["locked"], seen["unlocked"]
    assert locked.pop("launches") > 20 and not any(locked.values()), locked
    assert unlocked["interleaved"] > 0 and unlocked["overlaps"] > 0, "without locks they would not"


@pytest.mark.quick
def test_first_calls_wait_for_the_ops(monkeypatch: pytest.MonkeyPatch, torch_path: None) -> None:
    """A thread that finds a mode's ops half defined waits for them."""

    class Slow(NoneBackend):
        mode = "slowly_defined_test"

    define = torch.library.Library.define

    def slowly(self: torch.library.Library, *arguments: Any, **options: Any) -> Any:
        time.sleep(0.05)
        return define(self, *arguments, **options)

    def written() -> torch.Tensor:
        made = scene.build(Case(query_lens=(1, 3), seq_lens=(40, 20), num_kv_heads=1), get_backend(Slow.mode), CPU)
        made.write()
        return made.pages.raw

    monkeypatch.setattr(torch.library.Library, "define", slowly)
    register_backend(Slow)
    try:
        first, *others = in_threads([written] * 4)
    finally:
        unregister_backend(Slow.mode)
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
    assert larger is not first and larger.numel() == LEAST * 3 // 2
    assert workspaces.get(CPU, 10) is larger
    assert any(kept is first for buffers in workspaces._kept.values() for kept in buffers), "a graph may still use it"


@pytest.mark.quick
def test_provided_buffers_are_their_threads_own(workspaces: workspace._Workspaces) -> None:
    """Whichever thread's block ends first, and nothing is left of it: suites on several threads provide buffers of their own."""
    inside = threading.Barrier(2)
    ended = threading.Event()

    def reading(first: bool) -> bool:
        own = torch.empty(1)
        with workspace.provided(lambda device, size: own):
            inside.wait()
            if not first:
                ended.wait(10)
            seen = workspace.kept_buffer(CPU, 1) is own
        ended.set()
        return seen and workspace.kept_buffer(CPU, 1) is workspaces.get(CPU, 1)

    assert in_threads([functools.partial(reading, True), functools.partial(reading, False)]) == [True, True]
    assert workspace.kept_buffer(CPU, 1) is workspaces.get(CPU, 1)


@pytest.mark.quick
@pytest.mark.parametrize("warm", [False, True])
def test_memory_of_a_capture_is_not_kept(workspaces: workspace._Workspaces, monkeypatch: pytest.MonkeyPatch, warm: bool) -> None:
    """Neither a later eager call nor a later capture may see it, and what was kept before stays."""
    size = 3 * LEAST
    before = workspaces.get(CPU, 10) if warm else None
    with monkeypatch.context() as capture:
        capture.setattr(workspace, "_capturing", lambda device: True)
        assert before is None or workspaces.get(CPU, LEAST) is before, "warm memory that is large enough serves a capture"
        inside = workspaces.get(CPU, size)
        again = workspaces.get(CPU, size)
    assert inside.numel() == size and inside.data_ptr() != again.data_ptr()
    if before is not None:
        assert workspaces.get(CPU, 10) is before
    outside = workspaces.get(CPU, size)
    assert outside.data_ptr() not in {inside.data_ptr(), again.data_ptr()}
    assert workspaces.get(CPU, size) is outside


@pytest.mark.gpu
def test_memory_is_its_streams_own(workspaces: workspace._Workspaces, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the default stream's, where freed memory may be in use still by what that stream has yet to run."""
    device, stream = places.enter("gpu", monkeypatch).device, torch.cuda.Stream()
    with torch.cuda.stream(stream):
        buffer = workspaces.get(device, 10 * LEAST)
    (segment,) = [found for found in torch.cuda.memory_snapshot() if 0 <= buffer.data_ptr() - found["address"] < found["total_size"]]
    assert segment["stream"] == stream.cuda_stream


# -- on a GPU -------------------------------------------------------------------------------------------------------------


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
        case = GPU_CASES[number % 3]
        made = scene.build(case, get_backend(mode), device, seed=number)
        outs = [made.fresh_out()["rows"] for _ in range(41)]
        jobs.append((get_backend(mode), made.write_arguments(), made.read_arguments(), outs, sum(case.query_lens)))
    torch.cuda.synchronize()

    def work(number: int, rounds: slice) -> None:
        backend, writing, reading, outs, _ = jobs[number]
        with torch.cuda.stream(torch.cuda.default_stream() if streams == "one stream" else torch.cuda.Stream()):
            for out in outs[rounds]:
                backend.reshape_and_cache(**writing)
                backend.unified_attention(out=out, **reading)

    in_threads([functools.partial(work, number, slice(1, None)) for number in range(len(jobs))])
    torch.cuda.synchronize()
    for number, (backend, _, _, outs, rows) in enumerate(jobs):
        work(number, slice(1))
        torch.cuda.synchronize()
        assert all(torch.equal(out[:rows], outs[0][:rows]) for out in outs), backend.mode
