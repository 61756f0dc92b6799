"""The workspaces of split attention: kept, grown, apart from each other, and apart from every CUDA graph's memory."""

import pytest
import torch

from in_threads import in_threads
from kvq_core.launch import workspace as module
from kvq_core.testing import places

pytestmark = pytest.mark.quick
CPU = torch.device("cpu")
LEAST = 1 << 16


@pytest.fixture
def workspaces(monkeypatch: pytest.MonkeyPatch) -> module._Workspaces:
    """Fresh ones, in place of the process's."""
    fresh = module._Workspaces()
    monkeypatch.setattr(module, "_WORKSPACES", fresh)
    return fresh


def test_kept_and_grown_for_each_stream(workspaces: module._Workspaces) -> None:
    """On the CPU a thread is a stream."""
    first = workspaces.get(CPU, 10)
    (theirs,) = in_threads([lambda: workspaces.get(CPU, 10)])
    assert first.numel() == LEAST and workspaces.get(CPU, LEAST) is first and theirs.data_ptr() != first.data_ptr()
    larger = workspaces.get(CPU, LEAST + 1)
    assert larger is not first and larger.numel() == LEAST * 3 // 2
    assert workspaces.get(CPU, 10) is larger
    assert any(kept is first for buffers in workspaces._kept.values() for kept in buffers), "a graph may still use it"


@pytest.mark.parametrize("warm", [False, True])
def test_memory_of_a_capture_is_not_kept(workspaces: module._Workspaces, monkeypatch: pytest.MonkeyPatch, warm: bool) -> None:
    """Neither a later eager call nor a later capture may see it, and what was kept before stays."""
    size = 3 * LEAST
    before = workspaces.get(CPU, 10) if warm else None
    with monkeypatch.context() as capture:
        capture.setattr(module, "_capturing", lambda device: True)
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
def test_memory_is_its_streams_own(workspaces: module._Workspaces, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the default stream's, where freed memory may be in use still by what that stream has yet to run."""
    device, stream = places.enter("gpu", monkeypatch).device, torch.cuda.Stream()
    with torch.cuda.stream(stream):
        buffer = workspaces.get(device, 10 * LEAST)
    (segment,) = [found for found in torch.cuda.memory_snapshot() if 0 <= buffer.data_ptr() - found["address"] < found["total_size"]]
    assert segment["stream"] == stream.cuda_stream
