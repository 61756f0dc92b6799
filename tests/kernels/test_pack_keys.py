"""Keys that share a row of lanes: which calls read them so, and that it is attention.

Heads of 64 in int2 and of 32 in int4 have 8 lanes, half of what a product takes; heads of 32 in int2 have 4; those of 192 in int2 have 24,
which would be padded to 32, where 48 are 32 and 16. Two of 12 lanes, heads of 96 in int2, would be padded as one is.
"""

from dataclasses import replace

import pytest
import torch

from exact_reads import read_exactly
from kvq_core.testing import places
from kvq_core.testing.cases import Case

PADDED = [
    ("int2_per_token_head", 64),
    ("int4_per_token_head", 32),
    ("int4_per_token_head", 96),
    ("int2_per_token_head", 192),
    ("int8_per_token_head", 112),
    ("fp8_per_token_head", 80),
    ("fp8_per_tensor", 48),
]
TOKENS = Case(query_lens=(1,) * 4, seq_lens=(301, 64, 1, 30), queries_per_kv=4)
SHARED: tuple[Case, ...] = (
    TOKENS,
    replace(TOKENS, dtype=torch.bfloat16, rows="fused"),
    replace(TOKENS, dtype=torch.float32, rows="transposed", block_size=32),
    replace(TOKENS, queries_per_kv=3, sinks=True),
    replace(TOKENS, queries_per_kv=1, smoothing="mean", sinks=True),
    replace(TOKENS, smoothing="balanced", softcap=9.0),
    # A window's edge between two keys that share a row.
    *(replace(TOKENS, window=window) for window in (0, 1, 22, 23, 100)),
    replace(TOKENS, alibi=True),
    replace(TOKENS, alibi=True, alibi_sqrt=True, score_gain=400.0),
    replace(TOKENS, output=torch.float8_e4m3fn),
    replace(TOKENS, query_lens=(2,) * 4, seq_lens=(300, 65, 2, 31), queries_per_kv=2, window=9),
    replace(TOKENS, query_lens=(2,) * 4, seq_lens=(300, 65, 2, 31), queries_per_kv=2, qq_bias=4),
    replace(TOKENS, query_lens=(2, 1), seq_lens=(40, 70), queries_per_kv=2, mm_prefix=(((12, 17), (3, 3)), ((2, 9), (30, 35))), window=5),
    # Many pieces, and many sequences that are not split.
    replace(TOKENS, query_lens=(1,), seq_lens=(2300,), num_kv_heads=1),
    replace(TOKENS, query_lens=(1,) * 9, seq_lens=tuple(range(3, 12)), num_kv_heads=1),
)


def keys_in_a_row(mode: str, case: Case, place: str, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Keys in a row of lanes, in each of the launches of a read, which is attention."""
    return {constants["C"].fold for constants in read_exactly(mode, case, place, monkeypatch)}


@pytest.mark.parametrize("place", places.params("interpret", "gpu"))
@pytest.mark.parametrize("case", SHARED, ids=str)
@pytest.mark.parametrize(("mode", "head_size"), PADDED)
def test_lanes_that_would_be_padded(mode: str, head_size: int, case: Case, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert keys_in_a_row(mode, replace(case, head_size=head_size), place, monkeypatch) == {2}


@pytest.mark.parametrize("place", places.params("interpret", "gpu"))
@pytest.mark.parametrize(
    ("mode", "case"),
    [
        # Nothing to spare: no padding, or as much.
        ("int2_per_token_head", replace(TOKENS, head_size=128)),
        ("int2_per_token_head", replace(TOKENS, head_size=96)),
        # 16 rows have no room for both keys'.
        ("int2_per_token_head", replace(TOKENS, head_size=64, queries_per_kv=9)),
        # No neighbours.
        *(("int2_per_token_head", replace(TOKENS, head_size=64, layout=name)) for name in ("token_major", "interleaved", "paired")),
        ("int2_per_token_head", replace(TOKENS, head_size=64, head_size_v=128)),
    ],
    ids=str,
)
def test_others_are_read_one_by_one(mode: str, case: Case, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert keys_in_a_row(mode, case, place, monkeypatch) == {1}
