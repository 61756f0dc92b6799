"""The combine kernel of split keys: it is attention, however many programs share a row's channels."""

from dataclasses import replace

import pytest
import torch

from exact_reads import SUITES, read_exactly
from kvq_core.plan import Combine, Entry, Table
from kvq_core.testing import places
from kvq_core.testing.cases import Case

LONG = Case(query_lens=(1,), seq_lens=(2300,), head_size=128, num_kv_heads=1, queries_per_kv=4)
CASES: tuple[Case, ...] = (
    LONG,
    # Rows of no pieces, one and many.
    Case(query_lens=(1, 0, 1, 1), seq_lens=(900, 0, 40, 500), head_size=128, queries_per_kv=2, sinks=True, dtype=torch.bfloat16),
    Case(query_lens=(2, 2), seq_lens=(900, 333), head_size=96, queries_per_kv=3, window=400, dtype=torch.float32),
    replace(LONG, head_size=64, output=torch.float8_e4m3fn, smoothing="mean"),
    replace(LONG, head_size=256, queries_per_kv=1, softcap=9.0),
    replace(LONG, head_size=64, head_size_v=128, alibi=True),
)


def slices_of(mode: str, case: Case, place: str, monkeypatch: pytest.MonkeyPatch, choice: Combine) -> set[int]:
    """The slices that rows are merged in, in each of the merges of a read, which is attention."""
    table = Table("", {"combine": (Entry({}, choice),)})
    return {constants["TILE"].slices for constants in read_exactly(mode, case, place, monkeypatch, table) if "TILE" in constants}


@pytest.mark.parametrize("place", places.params("interpret", "gpu"))
@pytest.mark.parametrize("slices", [2, 8])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("mode", sorted(SUITES))
def test_a_row_in_slices(mode: str, case: Case, slices: int, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # As many row blocks a program as hold one of many pieces at most, or all.
    choice = Combine(few=1, splits=32, blocks=2 if slices == 2 else 4, slices=slices, warps=4)
    most = {"int4_per_token_head": 4}.get(mode.rpartition("/")[2], 8)  # of a rotated row of V, no more than it has ways
    assert slices_of(mode, case, place, monkeypatch, choice) == {min(slices, most)}


@pytest.mark.parametrize("place", places.params("interpret", "gpu"))
@pytest.mark.parametrize("mode", ["none", "int8_per_token_head", "int4_per_token_head", "int2_per_token_head"])
def test_eight_rows_together(mode: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices are of rows that are merged one by one: others have the same programs as ever, and of slices nothing to do."""
    choice = Combine(few=64, splits=32, blocks=1, slices=2, warps=4)
    two = replace(LONG, query_lens=(1, 1), seq_lens=(2300, 500))
    assert slices_of(mode, two, place, monkeypatch, choice) == {2}
