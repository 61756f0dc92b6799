"""Launch plans are values: what every plan must hold to, over all kinds of problems, and the decisions that were measured."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import record_plans
from kvq_core.call import ops
from kvq_core.plan import Decode, Entry, Table, Write, lookup, planner
from kvq_core.plan.planner import (
    DECODE_QUERY_LEN,
    Problem,
    batch_invariant,
    combine_tile,
    is_batch_invariant,
    plan,
    power_of_two,
    write_tile,
)

A = Problem(
    num_seqs=64,
    max_seqlen_q=1,
    max_seqlen_k=8192,
    max_keys=8192,
    uniform=True,
    group=4,
    num_kv_heads=8,
    lane_bytes=2,
    lanes=32,
    ways=4,
    num_sms=132,
)
"""int4 at batch 64, context 8192, 32/8 heads of 128 on an H200."""


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    streams = draw(st.sampled_from([1, 2, 4, 8]))
    return Problem(
        num_seqs=draw(st.integers(1, 2048)),
        max_seqlen_q=draw(st.integers(1, 9000)),
        max_seqlen_k=2 ** draw(st.integers(0, 20)),
        max_keys=draw(st.integers(1, 2**20)),
        uniform=draw(st.booleans()),
        group=draw(st.integers(1, 64)),
        num_kv_heads=draw(st.integers(1, 32)),
        lane_bytes=draw(st.sampled_from([1, 2, 4])),
        lanes=draw(st.sampled_from([16, 32, 64, 128, 256])),
        ways=streams,
        num_sms=draw(st.sampled_from([4, 84, 132])),
        engine_segments=draw(st.sampled_from([0, 0, 1, 16])),
        scaled=draw(st.booleans()),
        may_split=draw(st.booleans()),
        batch_invariant=draw(st.booleans()),
        arch=draw(st.sampled_from(record_plans.ARCHITECTURES)),
        head_lanes=draw(st.sampled_from([4, 8, 12, 16, 24, 32, 64])),
        foldable=draw(st.booleans()),
        in_chunks=draw(st.booleans()),
        sm90_fits=draw(st.booleans()),
        multirow_fits=draw(st.booleans()),
    )


def looked_up(problem: Problem) -> list[lookup.Asked]:
    """What the tables are asked for ``problem``'s tiles."""
    with lookup.listening() as asked:
        plan.__wrapped__(problem)
    return asked


@given(problems())
def test_every_query_length_is_served_once(problem: Problem) -> None:
    launches = plan(problem)
    for length in {1, 2, DECODE_QUERY_LEN, DECODE_QUERY_LEN + 1, problem.max_seqlen_q}:
        # A uniform batch has one length only.
        if length > problem.max_seqlen_q or (problem.uniform and length != problem.max_seqlen_q):
            continue
        assert sum(launch.min_query_len <= length <= launch.max_query_len for launch in launches) == 1


@given(problems())
def test_tiles_hold_their_rows(problem: Problem) -> None:
    for launch in plan(problem):
        tokens = launch.tile.query_rows // problem.group
        longest = min(launch.max_query_len, problem.max_seqlen_q)
        assert tokens >= 1
        assert launch.max_row_blocks * tokens >= longest
        assert launch.tile.rows == power_of_two(launch.tile.rows) >= 8


@given(problems())
def test_pieces_have_room(problem: Problem) -> None:
    """A piece's number is that of its program, or of its unit, plus that of its row block: all must be below ``max_items``."""
    for launch in plan(problem):
        if launch.split in ("equal", "chunks"):
            assert launch.max_items >= launch.programs + problem.num_seqs * launch.max_row_blocks
        if launch.split == "chunks":
            assert launch.programs * launch.chunk >= problem.max_keys


@given(problems(), st.integers(1, 2048))
def test_batch_invariance_ignores_the_rest_of_the_batch(problem: Problem, num_seqs: int) -> None:
    """What decides how a sequence is computed is the same whatever else is in the batch."""
    alone = replace(problem, batch_invariant=True, engine_segments=0)
    others = replace(alone, num_seqs=num_seqs, uniform=not alone.uniform, max_seqlen_k=2 * alone.max_seqlen_k)
    # Whatever tables there are: they are asked the same.
    assert looked_up(alone) == looked_up(others)
    for one, other in zip(plan(alone), plan(others), strict=True):
        assert (one.tile, one.split, one.chunk, one.min_query_len, one.max_query_len) == (
            other.tile,
            other.split,
            other.chunk,
            other.min_query_len,
            other.max_query_len,
        )


@pytest.mark.parametrize("num_seqs", [2, 3, 8, 64, 500])
def test_batch_invariant_sums_have_one_order(num_seqs: int) -> None:
    """Of a combine kernel and of a write."""
    alone = replace(A, num_seqs=1, max_keys=70000, num_kv_heads=1, batch_invariant=True)
    merges = []
    for problem in (alone, replace(alone, num_seqs=num_seqs)):
        (launch,) = plan(problem)
        assert launch.split == "chunks"
        merges.append(combine_tile(problem, launch, problem.num_seqs * launch.max_row_blocks))
    assert len(set(merges)) == 1
    few, many = (write_tile("sm_90", "int4", 4, 128, rows, batch_invariant=True) for rows in (num_seqs, 10_000 * num_seqs))
    assert few == many


def test_decode_takes_one_wave() -> None:
    """As many programs as are resident at once, none of which waits for another: each takes an equal share."""
    (launch,) = plan(A)
    assert launch.split == "equal"
    assert launch.programs * A.num_kv_heads <= A.num_sms * launch.tile.programs_per_sm
    assert launch.tile.registers == 168 and launch.tile.programs_per_sm == 12


@pytest.mark.parametrize("group", [1, 4, 7, 16, 80])
@pytest.mark.parametrize("query_len", [1, 2, 8, 16])
def test_query_rows_over_packed_keys_are_spread_over_tiles(query_len: int, group: int) -> None:
    """More than 16 rows beside packed keys have no registers; rows of one group stay together, and every token has its tile."""
    packed, plain = (plan(replace(A, ways=n, lanes=128 // n, max_seqlen_q=query_len, group=group))[0] for n in (4, 1))
    assert packed.tile.rows == min(plain.tile.rows, max(16, power_of_two(group)))
    for launch in (packed, plain):
        assert (launch.max_row_blocks - 1) * (launch.tile.rows // group) < query_len <= launch.max_row_blocks * (launch.tile.rows // group)


@pytest.mark.parametrize(("query_len", "group", "rows"), [(5, 4, 32), (8, 4, 32), (16, 4, 64), (9, 7, 64), (1, 32, 32)])
def test_one_warp_group_takes_drafts_where_it_can(query_len: int, group: int, rows: int) -> None:
    drafts = replace(A, max_seqlen_q=query_len, group=group, ways=2, lanes=64, variant="int8", arch="sm_90", multirow_fits=True)
    (launch,) = plan(drafts)
    assert (launch.tile.groups, launch.tile.rows, launch.tile.keys, launch.tile.warps) == (1, rows, 64, 4)
    assert (launch.split, launch.max_row_blocks, launch.programs) == ("equal", 1, 2 * 132 // 8)
    # Two programs find their registers on a multiprocessor.
    assert launch.tile.programs_per_sm == 2 and 2 * 128 * (launch.tile.registers or 255) <= 65536
    for other in ({"multirow_fits": False}, {"uniform": False}, {"may_split": False}, {"batch_invariant": True}, {"max_seqlen_k": 128}):
        assert all(launch.tile.groups == 0 for launch in plan(replace(drafts, **other)))


@pytest.mark.parametrize(
    ("changed", "waits"),
    [
        ({"num_seqs": 1, "max_seqlen_k": 512}, True),
        ({"num_seqs": 1, "max_seqlen_k": 131072}, False),
        ({"num_seqs": 32, "max_seqlen_k": 1024}, False),
        ({}, False),
        ({"num_seqs": 1, "max_seqlen_k": 512, "batch_invariant": True}, False),
    ],
)
def test_a_merge_waits_from_the_start_where_programs_get_no_share(changed: dict[str, Any], waits: bool) -> None:
    (launch,) = plan(replace(A, arch="sm_90", **changed))
    assert launch.split and launch.combine_waits == waits


@pytest.mark.parametrize(
    ("changed", "keys_per_sm"),
    [
        ({}, 31775),  # 64 x 8192 x 8 / 132
        ({"num_seqs": 1, "max_seqlen_k": 131072}, 7943),
        ({"num_kv_heads": 1}, 3971),
        ({"num_sms": 66}, 63550),
        ({"max_keys": 1 << 20, "group": 1, "max_seqlen_q": 4}, 31775),
        ({"num_seqs": 1, "max_seqlen_k": 1}, 0),
        ({"batch_invariant": True}, 0),
    ],
)
def test_decode_tiles_are_looked_up_by_the_keys_there_are_for_a_multiprocessor(changed: dict[str, Any], keys_per_sm: int) -> None:
    ((kind, facts),) = looked_up(replace(A, **changed))
    assert kind == "decode" and facts["keys_per_sm"] == keys_per_sm


def test_long_decode_takes_other_tiles_where_that_was_measured() -> None:
    """On sm_90: two buffers from 4096 keys a multiprocessor, and int2 wider tiles."""
    one = {"num_seqs": 1, "max_seqlen_k": 131072}
    problems = [replace(A, arch="sm_90", lanes=128 // n, ways=n, **facts) for facts in ({}, one) for n in (4, 8)]
    tiles = [plan(problem)[0].tile for problem in problems]
    assert [(tile.keys, tile.stages) for tile in tiles] == [(64, 5), (128, 5)] * 2
    short = {plan(replace(problem, max_seqlen_k=4096, num_seqs=1))[0].tile for problem in problems}
    assert {(tile.keys, tile.stages) for tile in short} == {(64, 2)}


def test_one_short_sequence_takes_shorter_tiles_and_shares() -> None:
    """On sm_90, from 16 to 63 keys a multiprocessor."""
    for streams in (1, 2, 4, 8):
        problem = replace(A, arch="sm_90", num_seqs=1, lanes=128 // streams, ways=streams)
        short, longer = (plan(replace(problem, max_seqlen_k=keys))[0].tile for keys in (512, 2048))
        assert (short.keys, short.least) == (32, 1) and longer.keys * longer.least == 64
        # However short: a piece more costs a combine kernel.
        assert plan(replace(problem, max_seqlen_k=64))[0].split == ""


def test_short_contexts_are_not_split() -> None:
    (launch,) = plan(replace(A, max_seqlen_k=128))
    assert launch.split == "" and launch.max_items == 0


def test_an_engine_may_forbid_splits() -> None:
    (launch,) = plan(replace(A, may_split=False))
    assert launch.split == ""


def test_an_engine_s_segments_are_for_single_rows() -> None:
    (launch,) = plan(replace(A, engine_segments=16))
    assert (launch.split, launch.segments) == ("segments", 16)
    (launch,) = plan(replace(A, engine_segments=16, max_seqlen_q=2))
    assert launch.split == "equal"


def test_mixed_batches_take_two_launches() -> None:
    decode, prefill = plan(replace(A, max_seqlen_q=500, uniform=False))
    assert decode.tile.decode and not prefill.tile.decode
    assert decode.max_query_len + 1 == prefill.min_query_len


@pytest.mark.parametrize(
    ("num_seqs", "rows_together", "blocks"),
    [(1, False, 1), (64, True, 8), (2000, True, 64)],
    ids=["one sequence", "a batch", "a large batch"],
)
def test_the_merge_suits_the_number_of_rows(num_seqs: int, rows_together: bool, blocks: int) -> None:
    problem = replace(A, num_seqs=num_seqs)
    (launch,) = plan(problem)
    combine = combine_tile(problem, launch, num_seqs * launch.max_row_blocks)
    assert (combine.few > 1) == rows_together
    assert combine.blocks == blocks
    if num_seqs == 1:
        shares = problem.max_seqlen_k // (launch.least * launch.tile.keys)
        assert 2 * combine.splits >= min(launch.programs, shares)  # a row's pieces in two steps


@pytest.mark.parametrize(("keys", "pieces"), [(512, 32), (1024, 32), (4096, 64), (131072, 128)])
def test_the_merge_of_a_short_sequence_expects_few_pieces(keys: int, pieces: int) -> None:
    """As many as the longest sequence has shares, which may be fewer than programs would be resident."""
    problem = replace(A, arch="sm_90", num_seqs=1, max_seqlen_k=keys, max_keys=keys)
    (launch,) = plan(problem)
    combine = combine_tile(problem, launch, launch.max_row_blocks)
    assert combine.splits == pieces
    resident = launch.tile.programs_per_sm * problem.num_sms // problem.num_kv_heads
    assert launch.programs == min(resident, keys // (launch.least * launch.tile.keys))


def test_no_program_is_launched_that_there_can_be_no_share_for() -> None:
    """Programs that find nothing to do take their time, too: 16 shares of 32 keys of one sequence of 512, 32 of 64 keys of two of 1024."""
    for num_seqs, keys, shares in ((1, 512, 16), (2, 1024, 32), (2, 700, 32), (1, 131072, 132)):
        (launch,) = plan(replace(A, arch="sm_90", num_seqs=num_seqs, max_seqlen_k=power_of_two(keys), ways=4, lanes=32))
        assert launch.split == "equal" and launch.programs == shares
        assert launch.max_items == launch.programs + num_seqs


def test_write_programs_are_small() -> None:
    assert write_tile("sm_90", "", 4, 128, 8192 * 8) == Write(rows=16, warps=1, store_mma=0)
    assert write_tile("sm_90", "", 4, 128, 64 * 8) == Write(rows=8, warps=1, store_mma=0)


@pytest.mark.parametrize("arch", record_plans.ARCHITECTURES)
def test_plans_are_those_recorded(arch: str) -> None:
    """A changed table shows in the record which problems it serves otherwise: ``python tests/unit/record_plans.py``."""
    recorded = json.loads(record_plans.FILE.read_text())[arch]
    assert {words: "; ".join(served) for words, served in record_plans.recorded(arch).items()} == recorded


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whatever an earlier test of this process has set.
    monkeypatch.setattr(planner._BATCH_INVARIANT, "value", None)
    monkeypatch.delenv("KVQ_BATCH_INVARIANT", raising=False)
    assert not is_batch_invariant()
    with batch_invariant():
        assert is_batch_invariant()
        with batch_invariant(False):
            assert not is_batch_invariant()
        assert is_batch_invariant()
    assert not is_batch_invariant()
    monkeypatch.setenv("KVQ_BATCH_INVARIANT", "1")
    assert is_batch_invariant()


def test_rows_come_first_where_they_fill_the_long_side_of_a_product() -> None:
    """In one warp, unfolded, and not in pieces of lanes, for which registers are short."""

    def first(problem: Problem, warps: int = 1) -> str:
        with ops.planning_with(Table("", {"decode": (Entry({}, Decode(64, warps, 2, 8, None, 64, 2)),)})):
            tile = plan(problem)[0].tile
        assert tile.decode
        return "keys" if tile.keys_first else "rows"

    four = replace(A, max_seqlen_q=4)
    assert first(A) == "keys" and first(replace(A, max_seqlen_q=2)) == "keys" and first(four) == first(replace(A, group=16)) == "rows"
    assert first(four, warps=2) == "keys" and first(replace(A, group=64)) == "rows"
    halves = replace(A, max_seqlen_q=2, lanes=16, ways=8, head_lanes=8, foldable=True)
    assert first(halves) == "keys" and first(replace(halves, max_seqlen_q=4)) == "rows"
    assert first(replace(four, in_chunks=True)) == "keys"


def folded(problem: Problem) -> tuple[int, int, int]:
    """(keys that share a row of lanes, rows of scores, keys of a tile) under a table that chooses 64 keys."""
    with ops.planning_with(Table("", {"decode": (Entry({}, Decode(64, 1, 2, 8, None, 64, 2)),)})):
        tile = plan(problem)[0].tile
    return tile.fold, tile.rows, tile.keys


def test_keys_share_rows_of_lanes_where_they_can_and_sixteen_rows_have_room() -> None:
    """A tile has no more lanes than it would have had: twice the keys of 8 lanes, as many of 24."""
    eight = replace(A, lanes=16, ways=8, head_lanes=8, foldable=True)
    assert folded(eight) == (2, 8, 128) and folded(replace(eight, head_lanes=24, lanes=32)) == (2, 8, 64)
    assert folded(replace(eight, group=1)) == (2, 8, 128) and folded(replace(eight, group=8)) == (2, 16, 128)
    assert folded(replace(eight, group=9)) == (1, 16, 64) and folded(replace(eight, max_seqlen_q=4)) == (1, 16, 64)
    assert folded(replace(eight, batch_invariant=True))[0] == 1 and folded(replace(eight, foldable=False)) == (1, 8, 64)
