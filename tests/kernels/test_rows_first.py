"""Query rows that fill the tensor cores' long side: which calls of few rows have them first, and that it is attention."""

from dataclasses import replace

import pytest
import torch

from exact_reads import read_exactly
from kvq_core.registry import FIRST_PARTY
from kvq_core.testing import places
from kvq_core.testing.cases import Case

MODES = sorted(FIRST_PARTY)
DRAFTS = Case(query_lens=(4,) * 4, seq_lens=(301, 64, 4, 30), head_size=64, queries_per_kv=4)
FILLED: tuple[Case, ...] = (
    DRAFTS,
    replace(DRAFTS, query_lens=(1,) * 4, queries_per_kv=16, head_size=128, dtype=torch.bfloat16),
    replace(DRAFTS, query_lens=(3, 1, 4, 2), head_size=256, dtype=torch.bfloat16, block_size=32),
    replace(DRAFTS, queries_per_kv=3, head_size=80, sinks=True, window=23),
    replace(DRAFTS, head_size=112, smoothing="balanced", softcap=9.0),
    replace(DRAFTS, alibi=True, score_gain=400.0, output=torch.float8_e4m3fn),
    replace(DRAFTS, qq_bias=4, mm_prefix=(((12, 17), (3, 3)), ((2, 9),), (), ((1, 5),)), window=5),
    # Many pieces.
    replace(DRAFTS, query_lens=(4,), seq_lens=(2300,), num_kv_heads=1),
)


def first(mode: str, case: Case, place: str, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What comes first in the launches of a read, which is attention; all of few rows."""
    configs = [constants["C"] for constants in read_exactly(mode, case, place, monkeypatch)]
    assert all(config.decode for config in configs)
    return {"keys" if config.keys_first else "rows" for config in configs}


@pytest.mark.parametrize("place", places.params("interpret", "gpu"))
@pytest.mark.parametrize("case", FILLED, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_sixteen_rows_come_first(mode: str, case: Case, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert first(mode, case, place, monkeypatch) == {"rows"}


@pytest.mark.parametrize("place", places.params("interpret", "gpu"))
@pytest.mark.parametrize(
    ("mode", "case"),
    [
        # Too few rows.
        *((mode, replace(DRAFTS, query_lens=(2,) * 4)) for mode in MODES if mode != "int2_per_token_head"),
        # Two keys share a row of lanes.
        ("int2_per_token_head", replace(DRAFTS, query_lens=(2,) * 4)),
        # 48 lanes are multiplied as 32 and 16, 96 as 64 and 32.
        ("int4_per_token_head", replace(DRAFTS, head_size=192)),
        ("int8_per_token_head", replace(DRAFTS, head_size=192)),
        ("int8_per_token_head", replace(DRAFTS, head_size=96)),
    ],
    ids=str,
)
def test_keys_come_first_elsewhere(mode: str, case: Case, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert first(mode, case, place, monkeypatch) == {"keys"}
