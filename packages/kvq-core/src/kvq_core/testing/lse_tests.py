"""The read door's log-sum-exp, and reads in parts that :func:`kvq_core.combine` joins."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from kvq_core.call.cascade import combine
from kvq_core.testing import places
from kvq_core.testing.cases import Case
from kvq_core.testing.places import Place
from kvq_core.testing.scene import Scene
from kvq_core.testing.subject import Subject, assert_within

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend

_MIXED = Case(query_lens=(3, 1, 20), seq_lens=(70, 33, 45), queries_per_kv=3)
_SPLIT = Case(query_lens=(1, 1, 4), seq_lens=(560, 270, 300), num_kv_heads=1)
_CASES = (
    replace(_MIXED, smoothing="balanced", alibi=True),
    replace(_MIXED, softcap=1.5, sinks=True, window=9),
    replace(_SPLIT, sinks=True, smoothing="mean"),
    replace(_SPLIT, joined=True),
    replace(_MIXED, smoothing="mean", joined=True),
    Case(query_lens=(0, 1), seq_lens=(0, 20), output=torch.float8_e4m3fn),
)
_LARGE = (
    Case(query_lens=(1,) * 8, seq_lens=tuple(range(100, 4100, 500)), num_kv_heads=8, queries_per_kv=4, head_size=128, dtype=torch.bfloat16),
    Case(query_lens=(1,), seq_lens=(16384,), num_kv_heads=1, queries_per_kv=7, head_size=128),
    Case(query_lens=(8, 8), seq_lens=(3000, 2000), num_kv_heads=2, queries_per_kv=4, head_size=128, dtype=torch.bfloat16),
    Case(query_lens=(700, 300), seq_lens=(1700, 300), num_kv_heads=2, queries_per_kv=4, head_size=128, dtype=torch.bfloat16),
    Case(query_lens=(700,), seq_lens=(1700,), num_kv_heads=2, queries_per_kv=4, head_size=128, dtype=torch.bfloat16, sinks=True),
    Case(query_lens=(700, 3), seq_lens=(1700, 900), num_kv_heads=2, queries_per_kv=4, head_size=128, joined=True),
    Case(query_lens=(8, 8), seq_lens=(3000, 2000), num_kv_heads=2, queries_per_kv=4, head_size=128, sinks=True, joined=True),
    Case(query_lens=(1,) * 8, seq_lens=tuple(range(100, 4100, 500)), num_kv_heads=8, queries_per_kv=4, head_size=128, joined=True),
)
_IN_PARTS = Case(query_lens=(1, 1), seq_lens=(70, 45), queries_per_kv=3, dtype=torch.float32)


class LSETests(Subject):
    @places.each(_CASES, large=_LARGE, quick=(_CASES[0], _CASES[4]))
    def test_lse(self, backend: QuantKVBackend, place: Place, case: Case) -> None:
        self.assert_lse(backend, self.build(backend, case, place).fill(), place)

    @places.each((_IN_PARTS, replace(_IN_PARTS, softcap=2.0)))
    def test_reads_in_parts(self, backend: QuantKVBackend, place: Place, case: Case) -> None:
        """Keys read in two parts, a first block and the rest, and combined: attention over all of them."""
        built = self.build(backend, case, place).fill()
        size, table = case.block_size, built.read_arguments()["block_table"]
        lens = built.tensor(case.seq_lens, torch.int32)
        parts = (
            {"block_table": table[:, :1], "seqused_k": torch.full_like(lens, size)},
            {"block_table": table[:, 1:], "seqused_k": lens - size},
        )
        (one, one_lse), (two, two_lse) = (_read_with_lse(built, **part) for part in parts)
        got, lse = combine(one, one_lse[: len(one)], two, two_lse[: len(two)])
        for judged in self.judge(backend, built, place, got):
            at = built.first_row(judged.seq)
            weight = (one_lse[at] - lse[at]).exp().double()[:, None, None]
            apart = (one[at] - two[at]).abs().double()[:, None, :]
            of_lse = judged.lse_bound[..., None]
            # Each part's rounding weighs as the whole's does; a weight w moves by at most w (1 - w) times what the two LSEs do.
            bound = 2 * judged.bound + 2 * weight * (1 - weight) * of_lse * apart
            assert_within(judged.got, judged.wanted, bound, f"{case}: combined [head, row, channel]")

    def assert_lse(self, backend: QuantKVBackend, built: Scene, place: Place, **overrides: Any) -> None:
        """Fail unless a read that is asked for its LSE gives it, and the result, to within rounding, and no row of no sequence."""
        out, lse = _read_with_lse(built, **overrides)
        for judged in self.judge(backend, built, place, out, lse=lse, **overrides):
            what = f"{built.case}: sequence {judged.seq}"
            assert_within(judged.got, judged.wanted, judged.bound, f"{what}, [head, row, channel]")
            got, wanted = judged.rows_of(lse, built), judged.lse
            unseen = wanted == -torch.inf
            assert torch.equal(got[unseen], wanted[unseen])
            assert_within(got.masked_fill(unseen, 0), wanted.masked_fill(unseen, 0), judged.lse_bound, f"{what}: LSE [head, row]")
        assert bool(lse[len(out) :].isnan().all()), "the LSE of rows of no sequence was written"


def _read_with_lse(built: Scene, **overrides: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and the LSE, NaN where nothing was written."""
    lse = torch.full(overrides.get("q", built.q).shape[:2], torch.nan, dtype=torch.float32, device=built.device)
    return built.read(lse=lse, **overrides), lse
