"""Prefill by warp groups: which calls take it, and that it answers as the portable kernels do where the shared suite does not look.

kvq's table for sm_90 plans it from 256 query rows (tokens x heads of a group); tests of fewer ask for it. The suite's large cases hold it
against float64 attention; besides there are the calls that must not take it, pages with holes, and codes that are no numbers.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from exact_reads import SUITES
from kvq_core import get_backend
from kvq_core.call import ops
from kvq_core.call.spec import Attention
from kvq_core.launch import dispatch
from kvq_core.launch.device import DeviceFacts
from kvq_core.plan import Entry, Groups, Table
from kvq_core.plan.lookup import listening
from kvq_core.plan.planner import batch_invariant
from kvq_core.registry import FIRST_PARTY
from kvq_core.testing import places, scene
from kvq_core.testing.cases import LARGE, Case
from kvq_core.testing.scene import Scene
from sm90_cases import (
    H200,
    Where,
    assert_alike,
    entered,
    kinds_asked,
    refused,
    spoil_unseen,
    table_with_holes,
    use_kvq_s_tables_and_a_known_triton,
)

MODES = sorted(FIRST_PARTY)
PLAIN = Case(query_lens=(70, 129), seq_lens=(1100, 400), head_size=128, queries_per_kv=4, dtype=torch.bfloat16)
WITH, WITHOUT = (Table("sm_90", {"groups": (Entry({}, Groups(groups, 2, 184)),)}) for groups in (2, 0))
TAKEN = tuple(case for case in LARGE if case.head_size == 128 and max(case.query_lens) > 16 and not case.softcap)


@pytest.fixture(autouse=True)
def kvq_s_tables_and_a_known_triton(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use_kvq_s_tables_and_a_known_triton(request, monkeypatch)


@pytest.mark.quick
@pytest.mark.parametrize("mode", MODES)
def test_long_plain_prefill_is_taken(mode: str) -> None:
    for case in (PLAIN, replace(PLAIN, sinks=True), replace(PLAIN, smoothing="balanced"), replace(PLAIN, queries_per_kv=7, block_size=32)):
        kinds = kinds_asked(mode, case, WITH)
        assert "groups" in kinds and "prefill" not in kinds, case
    # With rows of queries of other dtypes, too, where the pages are not of the same.
    assert ("prefill" not in kinds_asked(mode, replace(PLAIN, dtype=torch.float32), WITH)) == (mode != "none")


@pytest.mark.parametrize("mode", MODES)
def test_kvq_s_own_table_takes_many_rows(mode: str) -> None:
    nobody_s = Table("sm_90", {})
    assert "prefill" not in kinds_asked(mode, PLAIN, nobody_s)
    few = replace(PLAIN, query_lens=(63, 20))
    assert {"groups", "prefill"} <= kinds_asked(mode, few, nobody_s)


REFUSED = refused(PLAIN)


@pytest.mark.parametrize("why", REFUSED)
@pytest.mark.parametrize("mode", MODES)
def test_what_it_cannot_do_is_not_asked_of_it(mode: str, why: str) -> None:
    kinds = kinds_asked(mode, REFUSED[why], WITH)
    assert "groups" not in kinds and "prefill" in kinds


def test_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "groups" not in kinds_asked("int4_per_token_head", PLAIN, WITH, replace(H200, arch="sm_100"))
    # vLLM's cells with scales: rows start at multiples of 4 bytes.
    assert "groups" not in kinds_asked("int8_per_token_head", replace(PLAIN, layout="interleaved"), WITH)
    with batch_invariant():
        assert "groups" not in kinds_asked("int4_per_token_head", PLAIN, WITH)
    monkeypatch.setattr("kvq_core.launch.dispatch.triton_is_known", lambda: False)
    assert "groups" not in kinds_asked("int4_per_token_head", PLAIN, WITH)


def test_interpreters_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    device = DeviceFacts(132, True, "sm_90")
    monkeypatch.setattr("kvq_core.launch.device.installed_facts", lambda _: device)
    built = scene.build(PLAIN, get_backend("int4"), torch.device("cpu"))
    seen: list[Attention] = []
    monkeypatch.setattr(type(built.backend), "read", lambda backend, attention: seen.append(attention))
    monkeypatch.setattr(ops, "kernels_run_on", lambda device: True)
    built.backend.unified_attention(out=built.fresh_out()["rows"], **built.read_arguments())
    for interpreting in (True, False):
        monkeypatch.setattr(dispatch, "interpreting", lambda answer=interpreting: answer)
        assert dispatch.sm90_fits(seen[0], get_backend("int4").kernels().format) != interpreting


KERNELS = ("kvq_core.kernels.sm90.plain", *(f"kvq_{package}.prefill" for package in ("int8fp8", "int4", "int2")))
SMALL = replace(PLAIN, num_kv_heads=1)
INTERPRETED = (
    SMALL,
    replace(SMALL, block_size=64, dtype=torch.float16, queries_per_kv=5, sinks=True),
    replace(SMALL, layout="paired", rows="transposed", smoothing="balanced"),
)


@pytest.fixture
def where(monkeypatch: pytest.MonkeyPatch) -> Iterator[Where]:
    """The interpreter: with all groups of a program, and nothing of what makes them fast."""
    with entered("interpret", monkeypatch, WITH, Groups(2, 2, 184), *KERNELS) as where:
        yield where


@pytest.mark.parametrize("case", INTERPRETED, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_attention_interpreted(mode: str, case: Case, where: Where) -> None:
    """Within the suite's own error budgets. Tiles are as many as fill each place in shared memory twice."""
    built = where.build(mode, case, most=500)
    with ops.planning_with(where.taking), listening() as questions:
        out = built.read()
    assert "prefill" not in {kind for kind, _ in questions}
    SUITES[mode]().assert_exact(built.backend, built, where.place, out)


@pytest.mark.parametrize("mode", MODES)
def test_lse_interpreted(mode: str, where: Where) -> None:
    built = where.build(mode, replace(SMALL, sinks=mode != "none"))
    with ops.planning_with(where.taking):
        SUITES[mode]().assert_lse(built.backend, built, where.place)


@pytest.mark.parametrize("mode", MODES)
def test_missing_blocks_interpreted(mode: str, where: Where) -> None:
    """As the portable kernel has them, which the suite knows."""
    built = where.build(mode, SMALL)
    table = built.block_table.clone()
    table[0, 1], table[1, 0] = -1, built.num_blocks
    with ops.planning_with(where.taking):
        out, holes = built.read(), built.read(block_table=table)
    with ops.planning_with(where.without):
        assert_alike(holes, built.read(block_table=table))
    assert not torch.equal(holes, out)


def read_by(table: Table, built: Scene, **overrides: Any) -> torch.Tensor:
    with ops.planning_with(table), listening() as questions:
        out = built.read(**overrides)
    # Where warp groups take the rows, no tile is looked up for them.
    assert ("prefill" in {kind for kind, _ in questions}) == (table is WITHOUT)
    return out


def both_ways(built: Scene, **overrides: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What warp groups and the portable kernel answer: for unquantized pages the same to the last bit (seen on sm_90)."""
    return read_by(WITH, built, **overrides), read_by(WITHOUT, built, **overrides)


@pytest.mark.gpu
@pytest.mark.parametrize("case", TAKEN, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_attention(mode: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the suite's own error budgets."""
    place = places.enter("gpu", monkeypatch)
    built = scene.build(case, get_backend(mode), place.device).fill()
    with ops.planning_with(WITH):
        SUITES[mode]().assert_read(built.backend, built, place)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", [PLAIN, replace(PLAIN, block_size=64, dtype=torch.float16, queries_per_kv=5)], ids=str)
def test_missing_blocks_and_lengths_beyond_the_table(mode: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that are not there are seen by nobody, whatever lies in the block that stands for theirs."""
    place = places.enter("gpu", monkeypatch)
    built = scene.build(case, get_backend(mode), place.device).fill()
    assert_alike(*both_ways(built))
    table = table_with_holes(built)
    holes = both_ways(built, block_table=table)
    assert_alike(*holes)
    assert not torch.equal(holes[0], built.read())
    assert_alike(*both_ways(built, block_table=built.block_table[:, :9].contiguous()))
    # No key at all: zeros.
    table[0] = -1
    assert not both_ways(built, block_table=table)[0][: case.query_lens[0]].any()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["fp8_per_token_head", "fp8_per_tensor"])
def test_codes_that_are_no_numbers_and_not_to_be_seen(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight of 0 takes out all but NaN."""
    place = places.enter("gpu", monkeypatch)
    built = scene.build(replace(PLAIN, seq_lens=(1101, 403)), get_backend(mode), place.device).fill()
    before = read_by(WITH, built)
    spoil_unseen(built)
    assert torch.isfinite(before).all() and torch.equal(read_by(WITH, built), before)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_results_do_not_move(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that overtake each other would show here."""
    place = places.enter("gpu", monkeypatch)
    built = scene.build(replace(PLAIN, query_lens=(1024,), seq_lens=(4096,), num_kv_heads=4), get_backend(mode), place.device).fill()
    first = read_by(WITH, built)
    with ops.planning_with(WITH):
        assert all(torch.equal(built.read(), first) for _ in range(20))
