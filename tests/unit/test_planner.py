"""Launch plans are values: what every plan must hold to, over all kinds of problems, and the plans that the shipped tables give."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvq_core.plan import lookup, planner
from kvq_core.plan.planner import (
    DECODE_QUERY_LEN,
    PACKED_ROWS,
    KernelFamily,
    Problem,
    batch_invariant,
    combine_tile,
    is_batch_invariant,
    plan,
    power_of_two,
    write_tile,
)

ARCHITECTURES = ("", "sm_90")  # one that no table knows, and the one that choices were measured on
SHAPE: dict[str, Any] = {"max_seqlen_q": 1, "uniform": True, "num_kv_heads": 8, "lane_bytes": 2, "num_sms": 132}


A = Problem(num_seqs=64, max_seqlen_k=8192, max_keys=8192, group=4, lanes=32, ways=4, arch="sm_90", **SHAPE)
"""int4 at batch 64, context 8192, 32/8 heads of 128 on an H200."""


@pytest.fixture(autouse=True)
def no_tables_but_kvq_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(lookup.SWITCH, "")
    lookup.forget()
    plan.cache_clear()


PROBLEMS = st.builds(
    Problem,
    num_seqs=st.integers(1, 2048),
    max_seqlen_q=st.integers(1, 9000),
    max_seqlen_k=st.integers(0, 20).map(lambda exponent: 2**exponent),
    max_keys=st.integers(1, 2**20),
    group=st.integers(1, 64),
    num_kv_heads=st.integers(1, 32),
    lane_bytes=st.sampled_from([1, 2, 4]),
    lanes=st.sampled_from([16, 32, 64, 128, 256]),
    ways=st.sampled_from([1, 2, 4, 8]),
    num_sms=st.sampled_from([4, 84, 132]),
    engine_segments=st.sampled_from([0, 0, 1, 16]),
    arch=st.sampled_from(ARCHITECTURES),
    variant=st.sampled_from(["", "int8"]),
    head_lanes=st.sampled_from([4, 8, 12, 16, 24, 32, 64]),
    most_staged=st.sampled_from([0, 1, 512]),
    **dict.fromkeys(
        ("uniform", "scaled", "may_split", "batch_invariant", "foldable", "in_chunks", "sm90_fits", "multirow_fits"), st.booleans()
    ),
)


@given(PROBLEMS)
@example(replace(A, max_seqlen_q=8, ways=2, variant="int8", multirow_fits=True, uniform=False))
@example(replace(A, max_seqlen_q=2048, num_seqs=1, sm90_fits=True, most_staged=512))
def test_what_every_plan_holds_to(problem: Problem) -> None:
    launches = plan(problem)
    for length in {1, 2, DECODE_QUERY_LEN, DECODE_QUERY_LEN + 1, problem.max_seqlen_q}:
        # Of a uniform batch, too: max_seqlen_q is a bound.
        if length <= problem.max_seqlen_q:
            assert sum(launch.min_query_len <= length <= launch.max_query_len for launch in launches) == 1, "served once"
    for launch in launches:
        tile, longest = launch.tile, min(launch.max_query_len, problem.max_seqlen_q)
        tokens = tile.query_rows // problem.group
        assert tokens >= 1 and launch.max_row_blocks * tokens >= longest, "every row has a tile"
        assert problem.batch_invariant or (launch.max_row_blocks - 1) * tokens < longest, "no tile is empty"
        if tile.family is not KernelFamily.TRITON:
            multirow = tile.family is KernelFamily.SM90_DECODE_MULTIROW
            assert (problem.multirow_fits and problem.uniform and problem.may_split) if multirow else problem.sm90_fits
            assert not problem.batch_invariant, "which kernel a row is in would follow from the batch"
            assert tile.programs_per_sm * tile.warps * 32 * (tile.registers or 255) <= 65536, "programs that share a multiprocessor"
        assert tile.rows == power_of_two(tile.rows) >= 8
        if tile.decode and tile.family is KernelFamily.TRITON and problem.ways > 1:
            assert tile.query_rows <= max(PACKED_ROWS, power_of_two(problem.group)), "more rows beside packed keys find no registers"
        blocks = problem.num_seqs * launch.max_row_blocks
        # A work tile's number is its program's plus its row block's.
        assert launch.split not in ("equal", "chunks") or launch.max_items >= launch.programs + blocks
        assert launch.split != "chunks" or launch.programs * launch.chunk >= problem.max_keys
        if launch.split == "equal":
            resident, ranges = problem.num_sms * tile.programs_per_sm, blocks * -(-problem.max_seqlen_k // (launch.least * tile.keys))
            # One wave, and no program without a share of the keys: it takes its time, too.
            assert launch.programs == 1 or (launch.programs * problem.num_kv_heads <= resident and launch.programs <= ranges)
            assert launch.combine_waits == (ranges <= max(1, resident // problem.num_kv_heads)), "where programs without work leave room"


@given(PROBLEMS, st.integers(1, 2048))
def test_batch_invariance_ignores_the_rest_of_the_batch(problem: Problem, num_seqs: int) -> None:
    """What decides how a sequence is computed, and the order of its sums, is the same whatever else is in the batch."""
    alone = replace(problem, batch_invariant=True, engine_segments=0)
    others = replace(alone, num_seqs=num_seqs, uniform=not alone.uniform, max_seqlen_k=2 * alone.max_seqlen_k)
    for one, other in zip(plan(alone), plan(others), strict=True):
        kept = [(x.tile, x.split, x.chunk, x.min_query_len, x.max_query_len) for x in (one, other)]
        assert kept[0] == kept[1]
        if one.split:
            merges = {combine_tile(p, x, p.num_seqs * x.max_row_blocks) for p, x in ((alone, one), (others, other))}
            assert len(merges) == 1
    few, many = (write_tile(problem.arch, "int4", 4, 128, rows, batch_invariant=True) for rows in (num_seqs, 10_000 * num_seqs))
    assert few == many


def in_words(problem: Problem) -> Iterator[str]:
    """Each launch's tile (rows x keys, warps, stages, K or Q first, registers, programs an SM, loops), split, and combine tile."""
    for launch in plan.__wrapped__(problem):
        tile = launch.tile
        words = f"{tile.rows}x{tile.keys} w{tile.warps} s{tile.stages} {'K' if tile.keys_first else 'Q'}"
        words += f" r{tile.registers}" if tile.registers else ""
        words += f" {tile.programs_per_sm}/SM {tile.loops}L" if tile.decode else ""
        words += " fold" * (tile.fold > 1) + f" {tile.family.name}" * (tile.groups > 0)
        if launch.split:
            size = f"chunk {launch.chunk}" if launch.chunk else f"least {launch.least}"
            words += f"; {launch.split} {launch.programs}/{launch.max_items} {size}" + " waits" * launch.combine_waits
            combine = combine_tile(problem, launch, problem.num_seqs * launch.max_row_blocks)
            words += f"; {combine.few},{combine.splits},{combine.blocks},{combine.slices} w{combine.warps}"
        yield words


BF16: dict[str, Any] = {"ways": 1, "scaled": False}
MIXED: dict[str, Any] = {"num_seqs": 9, "max_seqlen_q": 500, "max_seqlen_k": 4096, "uniform": False}
SM90: dict[str, Any] = {"sm90_fits": True, "multirow_fits": True}
INVARIANT: dict[str, Any] = {"max_seqlen_q": 20, "batch_invariant": True}
PLANS: dict[str, dict[str, Any]] = {
    # On a GPU that no table knows.
    "8x32 w1 s2 K 8/SM 1L; equal 132/133 least 4; 1,128,1,1 w8": {**BF16, "arch": "", "num_seqs": 1, "max_seqlen_k": 131072, "lanes": 64},
    "64x16 w4 s2 K 4/SM 1L; chunks 256/320 chunk 2048; 8,32,8,1 w4 + 32x32 w4 s2 Q": {**BF16, **INVARIANT, "arch": "", "lanes": 512},
    "8x64 w1 s2 K r168 12/SM 1L; equal 4/5 least 2 waits; 1,32,1,1 w4": {"arch": "", "num_seqs": 1, "max_seqlen_k": 512, "lanes": 16},
    "8x64 w1 s2 K r168 12/SM 1L; segments 1024/1024 least 0; 8,32,8,1 w4": {"arch": "", "engine_segments": 16},
    "16x32 w1 s2 Q r168 12/SM 1L; equal 198/234 least 4; 8,32,8,1 w4 + 64x64 w4 s2 Q": {**MIXED, "arch": "", "lanes": 32, "ways": 2},
    # On an H200.
    "64x32 w2 s2 K 4/SM 1L; equal 66/75 least 4; 8,128,64,4 w4 + 128x128 w4 s2 Q r232 SM90_PREFILL": {**BF16, **MIXED, **SM90, "lanes": 64},
    "8x32 w1 s5 K 6/SM 2L; equal 64/68 least 2 waits; 1,32,1,2 w2": {**BF16, "num_seqs": 4, "max_seqlen_k": 1024, "lanes": 128},
    "128x128 w8 s2 Q": {**BF16, "num_seqs": 1, "max_seqlen_q": 8192, "lanes": 128},
    "32x64 w4 s4 K r248 2/SM 2L SM90_DECODE_MULTIROW; equal 33/97 least 2; 8,32,64,1 w4": {
        **{"max_seqlen_q": 8, "ways": 2, "variant": "int8"},
        **SM90,
    },
    "8x64 w1 s5 K 8/SM 2L; equal 132/133 least 2; 1,128,1,2 w4": {"num_seqs": 1, "max_seqlen_k": 131072},
    "8x64 w1 s2 K r168 12/SM 1L; equal 198/262 least 2; 8,128,64,4 w4": {"max_seqlen_k": 131072},
    "16x64 w1 s7 K 8/SM 2L fold; equal 132/133 least 2; 1,128,1,2 w4": {
        **{"num_seqs": 1, "max_seqlen_k": 131072, "ways": 8},
        **{"head_lanes": 24, "foldable": True, "group": 8},
    },
    "8x64 w1 s5 K 8/SM 2L; equal 132/196 least 2; 8,128,64,4 w4": {"lanes": 16, "ways": 8, "side_bytes": True},
}


@pytest.mark.parametrize("words", PLANS)
def test_plans_of_the_shipped_tables(words: str) -> None:
    """A row for each rule of the planner: a change shows here which problems it plans otherwise, from A on."""
    assert " + ".join(in_words(replace(A, **PLANS[words]))) == words


@pytest.mark.parametrize(
    ("arch", "variant", "ways", "rows", "fits", "expected"),
    [
        ("", "", 4, 512, False, "8 w1"),
        ("", "", 4, 65536, False, "16 w1"),
        ("sm_90", "int8", 2, 1024, False, "4 w1"),
        ("sm_90", "int8", 2, 1025, False, "8 w2"),
        ("sm_90", "", 4, 49152, True, "16 w1 mma"),
        ("sm_90", "", 8, 16383, True, "16 w2 mma"),
    ],
)
def test_writes_of_the_shipped_tables(arch: str, variant: str, ways: int, rows: int, fits: bool, expected: str) -> None:
    tile = write_tile(arch, variant, ways, 128, rows, store_mma_fits=fits)
    assert f"{tile.rows} w{tile.warps}" + " mma" * tile.store_mma == expected


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
