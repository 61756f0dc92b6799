"""The warm-up knows every kernel that a mixed run launches, without a GPU: doors are asked what they would launch on one."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from elsewhere import apart, in_threads
from kernel_keys import BLOCK_SIZE, H100, HEADS, demand, keys_met
from kvq_core import QuantKVBackend
from kvq_core.launch import target, warmup, workspace
from kvq_core.launch.attention import Read, launch_attention
from kvq_core.launch.offline import planning_for
from kvq_core.launch.warmup import Call, Demand

CPU = torch.device("cpu")


def launched(demands: list[Demand], launch: Callable[[int, int, int], object], most_rows: int = 2048) -> list[str]:
    """The kernels that 25 random batches launch, all of which the warm-up of ``demands`` knows.

    ``launch`` is given a batch's numbers of tokens and of sequences, and the bound of a sequence's rows, which are ``most_rows`` at most.
    """
    rng, wanted = random.Random(0), demands[0]
    with planning_for(H100) as planned:
        for call in dict.fromkeys(call for call, _ in warmup.distinct_launches(demands, H100)):
            call()
    known, reserved = set(map(warmup._identity, planned.launches)), warmup.workspace_elements(demands, H100)
    with planning_for(H100) as planned:
        for _ in range(25):
            num_seqs = rng.choice([count for count in (1, 1, 2, 3, 7, 20, 32) if count <= wanted.max_num_seqs])
            most = min(most_rows, wanted.max_num_tokens // num_seqs)
            rows = [rng.choice((1, 1, rng.randrange(1, 17), rng.randrange(1, most + 1))) for _ in range(num_seqs)]
            if rng.random() < 0.3:
                rows = [rng.choice(wanted.query_rows)] * num_seqs
            launch(sum(rows), num_seqs, warmup.rounded_query_len(max(rows), sum(rows), num_seqs, wanted.query_rows))
    assert max(planned.spaces) <= reserved, "a larger workspace"
    assert {warmup._identity(launch) for launch in planned.launches} <= known, wanted
    return [kernel.__name__ for kernel, _, _ in planned.launches]


def first_kernel(wanted: Demand) -> object:
    """That of a decode step of four sequences."""
    with planning_for(H100) as planned:
        Call(wanted, 4, 4, 1, wanted.longest_keys(1))()
    return warmup._identity(planned.launches[0])


@apart
def test_nothing_is_left_to_compile_in_a_mixed_run() -> None:
    # Engines load models, and warm up, with the model's dtype as torch's default.
    torch.set_default_dtype(torch.bfloat16)
    plain: dict[str, Any] = {"max_num_seqs": 32}
    drafts: dict[str, Any] = {"query_rows": (1, 5), "sinks": torch.bfloat16}
    smoothed: dict[str, Any] = {"window": 127, "softcap": 30.0, "smoothed": True, "balanced": True}
    ordered: dict[str, Any] = {"smoothed": True, "balanced": True, "ordered": True, "rotary_pairs": 16}
    packed: dict[str, Any] = {"joins": True, "key_stops": True, "first_block": 3}
    exact: dict[str, Any] = {"partial": True, "decodes": (16, 96)}
    both = (plain, drafts, smoothed)

    def launch(wanted: Demand, num_tokens: int, num_seqs: int, bound: int) -> None:
        Call(wanted, num_tokens)()
        Call(wanted, num_tokens, num_seqs, bound, wanted.longest_keys(bound))()

    for mode, options in (("none", (*both, exact)), ("int8", (plain,)), ("int4", (*both, packed)), ("int2", (ordered,))):
        for wanted in (demand(mode, **{"max_num_seqs": 8} | further) for further in options):
            assert len(launched([wanted], partial(launch, wanted))) > 50
    behind_sinks = [demand("int8", **packed | {"first_block": n}, smoothed=True, rotary_pairs=32) for n in (0, 4, 3)]
    # Without positions, with them, and with a block table that begins on no aligned address.
    assert len({first_kernel(wanted) for wanted in behind_sinks}) == 3, "reads behind sinks are warmed up with the kernels of others"


@apart
def test_the_two_reads_of_a_residual_window_are_known_as_one_call() -> None:
    limits = {"max_num_tokens": 512, "query_rows": (1, 5)}
    packed = demand("int4", joins=True, key_stops=True, first_block=3, **limits)
    exact = demand("none", partial=True, decodes=(16, 96), **limits)

    def launch(num_tokens: int, num_seqs: int, bound: int) -> None:
        with patch.object(QuantKVBackend, "read", autospec=True) as read:
            for wanted in (exact, packed):
                Call(wanted, num_tokens, num_seqs, bound, wanted.longest_keys(bound))()
        first, second = (call.args for call in read.call_args_list)
        launch_attention(second[0].kernels(), second[1], Read(first[0].kernels(), first[1]))

    assert launched([packed, exact], launch, most_rows=16) == ["attend", "attend", "combine_kernel"] * 25


def test_other_processes_compile_what_this_one_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    call = Call(demand("int4", max_num_seqs=1, max_num_tokens=1, max_seqlen_k=16), 1)
    key, value, *_ = (place.tensor() for place in call.demand.places if place is not None)
    assert (key.stride(), value.storage_offset()) == ((8192, 32, 512, 1), BLOCK_SIZE * HEADS * 32)
    warmup._compile_in_processes(H100, [(call, 0), (call, 1)], 1)
    assert list(tmp_path.rglob("*.cubin"))


def test_a_cpu_needs_neither() -> None:
    assert warmup.warm_up([demand("int4")], CPU) == warmup.reserve_workspace([demand("int4")], CPU) == 0


def test_a_reserved_workspace_serves_every_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_WORKSPACES", workspace._Workspaces())
    assert workspace.reserve(CPU, 1 << 17) == 4 << 17
    assert workspace.kept_buffer(CPU, 1 << 17, 1).data_ptr() == workspace.kept_buffer(CPU, 9, 2).data_ptr()
    assert workspace.kept_buffer(CPU, (1 << 17) + 1).data_ptr() != workspace.kept_buffer(CPU, 9).data_ptr()
    assert workspace.sole_use(CPU, 1) is workspace.sole_use(CPU, 2)
    assert workspace.kept_bytes(CPU) >= 8 << 17


def test_planning_leaves_other_threads_their_launches() -> None:
    """An engine may serve while it plans."""
    with planning_for(H100):
        assert in_threads([target.current]) == [None]
        with planning_for(H100):
            pass
        assert target.current() is not None
    assert target.current() is None


def test_kernels_are_found_on_disk_whatever_was_compiled_before() -> None:
    first, second = (keys_met(seed) for seed in (1, 2))
    assert first == second and len(first) > 50
