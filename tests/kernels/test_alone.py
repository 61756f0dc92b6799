"""A row block on its own, whose programs have one piece at most: which calls are one, and that they are attention."""

from dataclasses import replace

import pytest
import torch

from exact_reads import SUITES, read_exactly
from kvq_core.testing import places
from kvq_core.testing.cases import Case

ONE = Case(query_lens=(1,), seq_lens=(2300,), head_size=128, num_kv_heads=1, queries_per_kv=4)
ALONE: tuple[Case, ...] = (
    ONE,
    # More block ids than a program looks at together, a last block that is not full, a window that leaves some of them.
    replace(ONE, seq_lens=(4099,), head_size=64, block_size=8, dtype=torch.bfloat16),
    replace(ONE, seq_lens=(3001,), window=700, sinks=True, output=torch.float8_e4m3fn),
    # Three tokens, each of which sees as many keys as its position lets it.
    replace(ONE, query_lens=(3,), seq_lens=(900,), queries_per_kv=2, alibi=True, dtype=torch.float32),
    replace(ONE, query_lens=(4,), seq_lens=(777,), num_kv_heads=2, softcap=9.0, block_size=32),
    replace(ONE, head_size=96, queries_per_kv=16, smoothing="mean"),
    replace(ONE, head_size=256, queries_per_kv=7, smoothing="balanced", softcap=5.0),
    replace(ONE, query_lens=(4,), seq_lens=(900,), mm_prefix=(((12, 869), (896, 898)),)),
)
OTHERS: dict[str, Case] = {
    "two sequences": replace(ONE, query_lens=(1, 1), seq_lens=(2300, 40)),
    "two sequences, one without a token": replace(ONE, query_lens=(0, 1), seq_lens=(0, 2300)),
    "more rows than a tile has": replace(ONE, query_lens=(5,)),
    "no longer than a share": replace(ONE, seq_lens=(16,)),
}


def alone(mode: str, case: Case, place: str, monkeypatch: pytest.MonkeyPatch) -> set[bool]:
    """Whether a row block is on its own, in each of the launches of a read, which is attention."""
    return {constants["C"].alone for constants in read_exactly(mode, case, place, monkeypatch)}


@pytest.mark.parametrize("place", places.params("interpret", "gpu"))
@pytest.mark.parametrize("case", ALONE, ids=str)
@pytest.mark.parametrize("mode", sorted(SUITES))
def test_alone(mode: str, case: Case, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert alone(mode, case, place, monkeypatch) == {True}


@pytest.mark.parametrize("why", OTHERS)
def test_not_alone(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert alone("int4_per_token_head", OTHERS[why], "interpret", monkeypatch) == {False}
