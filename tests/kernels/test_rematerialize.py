"""What is made anew for each piece of a share: which calls do so, and that they are attention, of several pieces a program."""

from dataclasses import replace

import pytest
import torch

from exact_reads import read_exactly
from kvq_core.testing import places
from kvq_core.testing.cases import Case

INT4, INT2 = "int4_per_token_head", "int2_per_token_head"
# Shares are of 128 keys: one program has the end of the first sequence and the whole second, another the whole fourth and fifth.
SEVERAL = Case(query_lens=(1,) * 7, seq_lens=(700, 33, 90, 1, 64, 129, 1200), head_size=128, num_kv_heads=1, queries_per_kv=4)
CASES: tuple[tuple[str, Case], ...] = (
    (INT4, SEVERAL),
    (INT4, replace(SEVERAL, queries_per_kv=16, dtype=torch.bfloat16, sinks=True)),
    (INT4, replace(SEVERAL, query_lens=(1, 4, 2, 1, 3, 4, 4), window=900, softcap=9.0, output=torch.float8_e4m3fn)),
    (INT4, replace(SEVERAL, head_size=192, alibi=True)),
    (INT4, replace(SEVERAL, head_size=96, smoothing="balanced")),
    (INT2, replace(SEVERAL, head_size=256, block_size=32)),
    (INT2, replace(SEVERAL, head_size=192, smoothing="mean")),
)
OTHERS: dict[str, tuple[str, Case]] = {
    "nothing is rotated": ("int8_per_token_head", SEVERAL),
    "a matrix of 16 lanes": (INT2, SEVERAL),
    "a row block on its own": (INT4, replace(SEVERAL, query_lens=(1,), seq_lens=(2300,))),
    "nothing is split": (INT4, replace(SEVERAL, seq_lens=(16, 9, 1, 3, 16, 2, 7))),
}


def rematerialized(mode: str, case: Case, place: str, monkeypatch: pytest.MonkeyPatch) -> set[bool]:
    """What the launches of a read, which is attention, were compiled for."""
    return {constants["C"].rematerialized for constants in read_exactly(mode, case, place, monkeypatch)}


@pytest.mark.parametrize("place", places.params("interpret", "gpu"))
@pytest.mark.parametrize(("mode", "case"), CASES, ids=str)
def test_made_anew(mode: str, case: Case, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rematerialized(mode, case, place, monkeypatch) == {True}


@pytest.mark.parametrize("why", OTHERS)
def test_kept(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rematerialized(*OTHERS[why], "interpret", monkeypatch) == {False}
