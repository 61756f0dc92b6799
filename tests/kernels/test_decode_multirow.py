"""A few query rows by one warp group: which calls take it, and that it answers as float64 attention and as the portable kernels do.

kvq's table for sm_90 plans it from 17 to 64 query rows (tokens x heads of a group) of each sequence over packed pages.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import exact_reads
from exact_reads import SUITES
from kvq_core.call import ops
from kvq_core.launch.offline import Device
from kvq_core.plan import Groups, Table
from kvq_core.plan.lookup import listening
from kvq_core.plan.planner import batch_invariant
from kvq_core.registry import FIRST_PARTY
from kvq_core.testing import places
from kvq_core.testing.cases import Case
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

MODES = sorted(set(FIRST_PARTY) - {"none"})
DRAFTS = Case(query_lens=(8,) * 3, seq_lens=(1100, 400, 77), head_size=128, queries_per_kv=4, dtype=torch.bfloat16)
NOBODY_S = Table("sm_90", {})
KERNELS = [f"kvq_{package}.decode_multirow" for package in ("int8fp8", "int4", "int2")]

TAKEN: tuple[Case, ...] = (
    DRAFTS,
    replace(DRAFTS, dtype=torch.float16),
    replace(DRAFTS, dtype=torch.float32, layout="token_major", rows="fused"),
    replace(DRAFTS, sinks=True, block_size=32),
    replace(DRAFTS, smoothing="balanced", layout="paired", rows="transposed"),
    replace(DRAFTS, smoothing="mean", block_size=64),
    # Some keys far above the others, and rows that see no key at all but their own.
    replace(DRAFTS, score_gain=400.0, dtype=torch.float16, query_lens=(8, 8, 8), seq_lens=(3000, 8, 65)),
    # Rows that do not fill the tile; one token of many heads; two tiles of 64 rows; lengths around the tile's 64 keys.
    replace(DRAFTS, query_lens=(3,) * 4, seq_lens=(700, 3, 129, 64), queries_per_kv=7, num_kv_heads=3),
    replace(DRAFTS, query_lens=(1,) * 5, seq_lens=(4000, 1, 127, 128, 193), queries_per_kv=32, num_kv_heads=1),
    replace(DRAFTS, query_lens=(16,) * 2, seq_lens=(2049, 16), queries_per_kv=4, dtype=torch.float16),
    replace(DRAFTS, query_lens=(2,) * 130, seq_lens=tuple(range(2, 392, 3)), queries_per_kv=12, num_kv_heads=1),
    replace(DRAFTS, query_lens=(2,), seq_lens=(20000,), queries_per_kv=16, num_kv_heads=1, block_size=128),
)


@pytest.fixture(autouse=True)
def kvq_s_tables_and_a_known_triton(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use_kvq_s_tables_and_a_known_triton(request, monkeypatch)


def rows_alone(built: Scene) -> dict[str, Any]:
    """And longer than what is worth no start."""
    return exact_reads.rows_alone(built) | longest(built.case)


def longest(case: Case) -> dict[str, int]:
    return {"max_seqlen_k": max(*case.seq_lens, 129)}


def asked(mode: str, case: Case, device: Device = H200, **overrides: Any) -> set[str]:
    return kinds_asked(mode, case, NOBODY_S, device, **longest(case) | overrides)


@pytest.mark.parametrize("mode", MODES)
def test_kvq_s_own_table_takes_drafts(mode: str) -> None:
    for case in TAKEN:
        kinds = asked(mode, case)
        assert {"groups", "combine"} <= kinds and "decode" not in kinds, case


REFUSED = refused(DRAFTS) | {
    "16 rows": replace(DRAFTS, query_lens=(4,) * 3),
    "unlike lengths": replace(DRAFTS, query_lens=(8, 8, 7)),
    "a group of more heads than a tile has rows": replace(DRAFTS, query_lens=(1,) * 3, queries_per_kv=65, num_kv_heads=1),
}


@pytest.mark.parametrize("why", REFUSED)
@pytest.mark.parametrize("mode", MODES)
def test_what_it_cannot_do_is_not_asked_of_it(mode: str, why: str) -> None:
    assert "decode" in asked(mode, REFUSED[why])


def test_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    mode = "int8_per_token_head"
    assert "groups" not in asked(mode, DRAFTS, replace(H200, arch="sm_100"))
    assert "groups" not in asked(mode, replace(DRAFTS, seq_lens=(100, 40, 77)), max_seqlen_k=100)
    assert "groups" not in asked("none", DRAFTS)
    with batch_invariant():
        assert "groups" not in asked(mode, DRAFTS)
    monkeypatch.setattr("kvq_core.launch.dispatch.triton_is_known", lambda: False)
    assert "groups" not in asked(mode, DRAFTS)


@pytest.fixture(params=places.params("interpret", "gpu"))
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Where]:
    with entered(request.param, monkeypatch, NOBODY_S, Groups(1, 4, 248), *KERNELS) as where:
        yield where


def read(built: Scene, where: Where, *, without: bool = False, **overrides: Any) -> torch.Tensor:
    """By a warp group, or ``without``."""
    with ops.planning_with(where.without if without else where.taking), listening() as questions:
        out = built.read(**rows_alone(built) | overrides)
    # Where a warp group takes the rows, no tile is looked up for them.
    assert ("decode" in {kind for kind, _ in questions}) == without
    return out


def filled(mode: str, case: Case, where: Where) -> tuple[Scene, Callable[..., None]]:
    """The case, filled, and what fails unless it is read as float64 attention reads it, within the suite's own error budgets."""
    built = where.build(mode, case)
    suite = SUITES[mode]()

    def assert_read(**overrides: Any) -> None:
        suite.assert_exact(built.backend, built, where.place, read(built, where, **overrides), **rows_alone(built) | overrides)

    return built, assert_read


@pytest.mark.parametrize("case", TAKEN, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_attention(mode: str, case: Case, where: Where) -> None:
    built, assert_read = filled(mode, case, where)
    assert_read()
    if where.place.name == "gpu":
        assert_alike(read(built, where), read(built, where, without=True))


@pytest.mark.parametrize("rising", [0.02, 0.2, 3.0])
@pytest.mark.parametrize("mode", MODES)
def test_maxima_and_scales_that_rise_from_key_to_key(mode: str, rising: float, where: Where) -> None:
    """The maximum that sums are relative to is raised in some tiles and not in others, for some rows more than for others."""
    built, assert_read = filled(mode, replace(DRAFTS, seq_lens=(1500, 900, 1100), dtype=torch.float32), where)
    for seq in range(built.case.num_seqs):
        rows = slice(built.first_key(seq), built.first_key(seq + 1))
        steps = torch.arange(built.key[rows].shape[0], device=built.key.device)
        built.key[rows, :, 0] = (rising * steps)[:, None]
        built.value[rows] *= torch.exp2((steps // 90).float())[:, None, None] if mode != "fp8_per_tensor" else 1.0
    built.q[:, ::3, 0] = 3.0
    built.fill()
    assert_read()


@pytest.mark.parametrize("mode", MODES)
def test_the_largest_of_huge_scores_wins(mode: str, where: Where) -> None:
    """Keys of one direction, as long as can be: the rounding of a product of such a score is itself beyond every exponent."""
    built, _ = filled(mode, DRAFTS, where)
    direction = built.key[0].clone()
    order = torch.randperm(built.key.shape[0], generator=torch.Generator().manual_seed(0)).to(built.key.device)
    built.key[:] = (1e22 * 1.02 ** order[:, None, None].double() * direction.double()).clamp(-1e37, 1e37).to(built.key.dtype)
    built.q[:] = direction.repeat_interleave(built.case.queries_per_kv, 0)
    built.fill()
    got, wanted = read(built, where), read(built, where, without=True)
    assert got.isfinite().all()
    if mode != "fp8_per_tensor":  # a scale of the whole tensor clamps such keys to one length
        assert_alike(got, wanted)


@pytest.mark.parametrize("mode", MODES)
def test_a_row_that_is_no_number_stays_alone(mode: str, where: Where) -> None:
    built, _ = filled(mode, DRAFTS, where)
    before = read(built, where)
    built.q[9, 5, 77] = torch.nan
    after = read(built, where)
    alone = torch.zeros(after.shape[:2], dtype=torch.bool, device=after.device)
    alone[9, 5] = True
    assert after[alone].isnan().all() and torch.equal(after[~alone], before[~alone])


@pytest.mark.parametrize("mode", MODES)
def test_missing_blocks_and_lengths_beyond_the_table(mode: str, where: Where) -> None:
    """Keys that are not there are seen by nobody, whatever lies in the block that stands for theirs."""
    built, _ = filled(mode, DRAFTS, where)
    table = table_with_holes(built)
    holes = read(built, where, block_table=table)
    assert_alike(holes, read(built, where, without=True, block_table=table))
    assert not torch.equal(holes, read(built, where))
    short = built.block_table[:, :9].contiguous()
    assert_alike(read(built, where, block_table=short), read(built, where, without=True, block_table=short))
    # No key at all: zeros.
    table[0] = -1
    assert not read(built, where, block_table=table)[: DRAFTS.query_lens[0]].any()


@pytest.mark.parametrize("mode", ["fp8_per_token_head", "fp8_per_tensor"])
def test_codes_that_are_no_numbers_and_not_to_be_seen(mode: str, where: Where) -> None:
    """A weight of 0 takes out all but NaN."""
    built, _ = filled(mode, replace(DRAFTS, seq_lens=(1101, 403, 79)), where)
    before = read(built, where)
    spoil_unseen(built)
    assert torch.isfinite(before).all() and torch.equal(read(built, where), before)


@pytest.mark.parametrize("where", places.params("gpu"), indirect=True)
@pytest.mark.parametrize("mode", MODES)
def test_results_do_not_move(mode: str, where: Where) -> None:
    """Warps that overtake each other would show here, which the interpreter has none of."""
    case = replace(DRAFTS, query_lens=(8,) * 12, seq_lens=tuple(range(500, 6500, 500)), num_kv_heads=8)
    built, _ = filled(mode, case, where)
    first = read(built, where)
    with ops.planning_with(where.taking):
        assert all(torch.equal(built.read(**rows_alone(built)), first) for _ in range(30))
