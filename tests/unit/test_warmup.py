"""The warm-up knows every kernel that a mixed run launches, without a GPU: doors are asked what they would launch on one."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from kvq_core.launch import target, workspace
from kvq_core.launch.offline import planning_for
from kvq_core.launch.warmup import Call, _compile_in_processes, reserve_workspace, warm_up
from mixed_run import BLOCK_SIZE, H100, HEADS, demand
from programs import told_by


def test_nothing_is_left_to_compile_in_a_mixed_run() -> None:
    assert told_by("mixed_run") > 300


def test_other_processes_compile_what_this_one_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    wanted = demand("int4", max_num_seqs=1, max_num_tokens=1, max_seqlen_k=16)
    call = Call(wanted, 1)
    key, value, *_ = (place.tensor() for place in call.demand.places if place is not None)
    assert (key.stride(), value.storage_offset()) == ((8192, 32, 512, 1), BLOCK_SIZE * HEADS * 32)
    _compile_in_processes(H100, [(call, 0), (call, 1)], 1)
    assert list(tmp_path.rglob("*.cubin"))


def test_a_cpu_needs_neither() -> None:
    cpu = torch.device("cpu")
    assert warm_up([demand("int4")], cpu) == reserve_workspace([demand("int4")], cpu) == 0


def test_a_reserved_workspace_serves_every_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_WORKSPACES", workspace._Workspaces())
    cpu = torch.device("cpu")
    assert workspace.reserve(cpu, 1 << 17) == 4 << 17
    assert workspace.kept_buffer(cpu, 1 << 17, 1).data_ptr() == workspace.kept_buffer(cpu, 9, 2).data_ptr()
    assert workspace.kept_buffer(cpu, (1 << 17) + 1).data_ptr() != workspace.kept_buffer(cpu, 9).data_ptr()
    assert workspace.sole_use(cpu, 1) is workspace.sole_use(cpu, 2)
    assert workspace.kept_bytes(cpu) >= 8 << 17


def test_planning_leaves_other_threads_their_launches() -> None:
    """An engine may serve while it plans."""
    seen: list[bool] = []
    with planning_for(H100):
        other = threading.Thread(target=lambda: seen.append(target.current() is None))
        other.start()
        other.join()
        with planning_for(H100):
            pass
        assert target.current() is not None
    assert seen == [True] and target.current() is None


def test_kernels_are_found_on_disk_whatever_was_compiled_before() -> None:
    first, second = (told_by("kernel_keys", seed) for seed in ("1", "2"))
    assert first == second and len(first) > 50
