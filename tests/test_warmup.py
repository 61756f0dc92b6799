"""The warm-up knows every kernel that a mixed run launches, without a GPU: doors are asked what they would launch on one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from kvq_core import get_backend, workspace
from kvq_core.layout import page_views
from kvq_core.offline import Device, planning_for
from kvq_core.warmup import (
    Call,
    Demand,
    _compile_in_processes,
    _identity,
    distinct_calls,
    places_of,
    reserve_workspace,
    rounded_query_len,
    warm_up,
    workspace_elements,
)

H100 = Device("cuda", 90, 32, 132, "sm_90", overlaps=True)
HEADS, SIZE, BLOCKS, BLOCK_SIZE = 2, 64, 512, 16


def demand(mode: str, **further: object) -> Demand:
    backend = get_backend(mode)
    pages = torch.empty(BLOCKS, BLOCK_SIZE * HEADS * 4 * SIZE, dtype=torch.uint8, device="meta")
    caches = page_views(backend, pages, BLOCK_SIZE, HEADS, SIZE, SIZE, torch.bfloat16)
    limits: dict[str, object] = {"max_num_seqs": 32, "max_num_tokens": 2048, "max_seqlen_k": 8192}
    return Demand(mode, 8, SIZE, SIZE, torch.bfloat16, places_of(caches), **(limits | further))  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["none", "int8", "int4", "int2"])
@pytest.mark.parametrize("further", [{}, {"window": 127, "softcap": 30.0}, {"query_rows": (1, 5), "sinks": torch.bfloat16}])
def test_nothing_is_left_to_compile_in_a_mixed_run(mode: str, further: dict[str, object]) -> None:
    """Random batches as an engine makes them launch only kernels that the warm-up launched, in its workspace."""
    wanted, rng = demand(mode, **further), random.Random(0)
    known: set[object] = set()
    with planning_for(H100) as planned:
        for call in distinct_calls([wanted], H100):
            call()
        known.update(map(_identity, planned.launches))
    reserved = workspace_elements([wanted], H100)
    with planning_for(H100) as planned:
        for _ in range(150):
            num_seqs = rng.choice((1, 1, 2, 3, 7, 20, 32))
            rows = [rng.choice((1, 1, rng.randrange(1, 17), rng.randrange(1, 2048 // num_seqs + 1))) for _ in range(num_seqs)]
            if rng.random() < 0.3:
                rows = [rng.choice(wanted.query_rows)] * num_seqs
            bound = rounded_query_len(max(rows), sum(rows), num_seqs, wanted.query_rows)
            Call(wanted, sum(rows))()
            Call(wanted, sum(rows), num_seqs, bound, rng.randrange(max(rows), 8193))()
        missing = [launch for launch in planned.launches if _identity(launch) not in known]
    assert not missing, (len(missing), missing[0][2], missing[0][1])
    assert max(planned.spaces) <= reserved


def test_other_processes_compile_what_this_one_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    wanted = demand("int4", max_num_seqs=1, max_num_tokens=1, max_seqlen_k=16)
    calls = distinct_calls([wanted], H100)[:1]
    key, value, *_ = (place.tensor() for place in calls[0].demand.places if place is not None)
    assert (key.stride(), value.storage_offset()) == ((8192, 32, 512, 1), BLOCK_SIZE * HEADS * 32)
    _compile_in_processes(H100, calls, 1)
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
