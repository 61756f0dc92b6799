"""A few query rows with two columns of a product each: which calls have them, and that they are attention."""

from dataclasses import replace

import pytest
import torch

from exact_reads import SUITES, read_exactly
from kvq_core.testing import places
from kvq_core.testing.cases import Case

ONE = Case(query_lens=(1,) * 3, seq_lens=(700, 1, 129), head_size=128, num_kv_heads=2, queries_per_kv=4, softcap=20.0)
FEW: tuple[Case, ...] = (
    ONE,
    replace(ONE, queries_per_kv=1, dtype=torch.bfloat16, sinks=True),
    replace(ONE, queries_per_kv=3, window=100, block_size=32),
    # Two tokens of two heads, each of which sees as many keys as its position lets it.
    replace(ONE, query_lens=(2, 2, 1), seq_lens=(700, 2, 1), queries_per_kv=2, alibi=True, softcap=5.0),
    replace(ONE, head_size=96, smoothing="mean", dtype=torch.float32),
    replace(ONE, head_size=256, smoothing="balanced", output=torch.float8_e4m3fn),
    # Scores far beyond the cap, and one piece after another of a long sequence.
    replace(ONE, query_lens=(1,), seq_lens=(3000,), score_gain=400.0, softcap=50.0),
)
MANY: dict[str, Case] = {
    "no softcap": replace(ONE, softcap=0.0),
    "five heads": replace(ONE, queries_per_kv=5),
    "two tokens of three heads": replace(ONE, query_lens=(2, 2, 1), seq_lens=(700, 2, 1), queries_per_kv=3),
    "two keys in a row of lanes": replace(ONE, head_size=64),
    "two keys in a row of 48 lanes": replace(ONE, head_size=192),
    "a prompt": replace(ONE, query_lens=(200,) * 3, seq_lens=(700, 200, 300)),
}


def two_columns(mode: str, case: Case, place: str, monkeypatch: pytest.MonkeyPatch) -> set[bool]:
    """Whether rows have two columns, in each of the launches of a read, which is attention."""
    return {constants["C"].narrow_n for constants in read_exactly(mode, case, place, monkeypatch)}


@pytest.mark.parametrize("place", places.params("interpret", "gpu"))
@pytest.mark.parametrize("case", FEW, ids=str)
def test_narrow_n(case: Case, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert two_columns("int2_per_token_head", case, place, monkeypatch) == {True}


@pytest.mark.parametrize("place", places.params("interpret", "gpu"))
@pytest.mark.parametrize("why", MANY)
def test_other_rows(why: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert two_columns("int2_per_token_head", MANY[why], place, monkeypatch) == {False}


@pytest.mark.parametrize("mode", sorted({*SUITES} - {"int2_per_token_head"}))
def test_modes_that_do_not_know_of_them(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert two_columns(mode, ONE, "interpret", monkeypatch) == {False}
