"""Reads whose launches have a property of a plan are attention: one table, one body. Reads without it are the conformance suite's."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
import torch

from exact_reads import EMPTY_TABLE, SUITES, read_exactly
from kvq_core.plan import Combine, Decode, Entry, Table
from kvq_core.testing.cases import Case

ALL = sorted(SUITES)
INT8, INT4, INT2 = "int8_per_token_head", "int4_per_token_head", "int2_per_token_head"
DISTINCT = ("none", INT8, INT4, INT2)
"""Modes whose launches differ in what these properties are of: in the interpreter the others would run the same lines."""
MOST_KEYS = 700
"""Of a sequence in the interpreter, which has few programs to split it over."""
FP8_OUT = torch.float8_e4m3fn
BF16, FP32 = torch.bfloat16, torch.float32


def reads(modes: Collection[str], cases: Collection[Case], on: str = "interpret gpu", table: Any = None, **wanted: Any) -> list[Any]:
    """Parameters of :func:`test_plan`. ``wanted``: the value that each property has in every launch; ``table``: a kind and its choice.

    Of all modes the interpreter runs those of :data:`DISTINCT`.
    """
    properties = ",".join(f"{name}={value}" for name, value in wanted.items())
    return [
        pytest.param(
            place, mode, case, table, wanted, id=f"{properties}-{place}-{mode}-{case}", marks=pytest.mark.gpu if place == "gpu" else ()
        )
        for place in on.split()
        for mode in (DISTINCT if place == "interpret" and modes is ALL else modes)
        for case in cases
    ]


# -- alone: the launch has one row block, so a program has at most one work tile ---------------------------------------------------

ONE = Case(query_lens=(1,), seq_lens=(2300,), head_size=128, num_kv_heads=1, queries_per_kv=4)
ALONE = (
    # More block ids than a program looks at together, a last block that is not full.
    replace(ONE, seq_lens=(4099,), head_size=64, block_size=8, dtype=BF16),
    replace(ONE, seq_lens=(3001,), window=500, sinks=True, output=FP8_OUT),
    # Tokens, each of which sees as many keys as its position lets it.
    replace(ONE, query_lens=(3,), seq_lens=(900,), queries_per_kv=2, alibi=True, dtype=FP32),
    replace(ONE, head_size=256, queries_per_kv=7, smoothing="balanced", softcap=5.0),
)

# -- slices: programs of the combine kernel that share a row's channels ------------------------------------------------------------

COMBINED = (
    # Rows of no splits, one and many.
    Case(query_lens=(1, 0, 1, 1), seq_lens=(900, 0, 40, 500), head_size=128, queries_per_kv=2, sinks=True, dtype=BF16),
    Case(query_lens=(2, 2), seq_lens=(900, 333), head_size=96, queries_per_kv=3, window=400, dtype=FP32),
    replace(ONE, head_size=64, head_size_v=128, output=FP8_OUT, alibi=True),
)
INT4_VALUES = [mode for mode in ALL if mode.endswith(INT4)]
"""A rotated row of V has no more slices than ways."""


def sliced(slices: int, few: int = 1) -> tuple[str, Combine]:
    """As many row blocks a program as hold one of many splits at most, or all."""
    return "combine", Combine(few=few, splits=32, blocks=1 if few > 1 else 2 if slices == 2 else 4, slices=slices, warps=4)


# -- narrow_n: at most half of the rows are valid, and each has two columns of a product -------------------------------------------

THREE = Case(query_lens=(1,) * 3, seq_lens=(700, 1, 129), head_size=128, num_kv_heads=2, queries_per_kv=4, softcap=20.0)
NARROW = (
    replace(THREE, queries_per_kv=3, window=100, sinks=True, dtype=BF16, block_size=32),
    # Two tokens of two heads, each of which sees as many keys as its position lets it.
    replace(THREE, query_lens=(2, 2, 1), seq_lens=(700, 2, 1), queries_per_kv=2, alibi=True, softcap=5.0),
    replace(THREE, head_size=256, smoothing="balanced", output=FP8_OUT),
    # Scores far beyond the cap, and the work tiles of a long sequence.
    replace(THREE, query_lens=(1,), seq_lens=(3000,), score_gain=400.0, softcap=50.0),
)

# -- fold: two neighbouring keys fill a row of lanes, which one would leave padded -------------------------------------------------

# Heads of 64 in int2 have 8 lanes, half of what a product takes. Those of 192 have 24, padded to 32, where two have 48: 32 and 16.
FOLDING = ((INT2, 64), (INT4, 96), (INT8, 112), (INT4, 32), (INT2, 192), ("fp8_per_token_head", 80), ("fp8_per_tensor", 48))
FOUR = Case(query_lens=(1,) * 4, seq_lens=(301, 64, 1, 30), queries_per_kv=4)
FOLDED = (
    # A window's edge between two keys of one row.
    replace(FOUR, window=22, sinks=True, dtype=BF16, rows="fused"),
    replace(FOUR, query_lens=(2, 1), seq_lens=(40, 70), mm_prefix=(((12, 17), (3, 3)), ((2, 9), (30, 35))), window=5),
    # Many splits.
    replace(FOUR, query_lens=(1,), seq_lens=(2300,), num_kv_heads=1, alibi=True, alibi_sqrt=True, output=FP8_OUT),
)

# -- rematerialized: recomputed per work tile, to save registers -------------------------------------------------------------------

# Splits are of 128 keys: one program has the end of the first sequence and the whole second, another the whole fourth and fifth.
SEVEN = Case(query_lens=(1,) * 7, seq_lens=(700, 33, 90, 1, 64, 129, 1200), head_size=128, num_kv_heads=1, queries_per_kv=4)
REMATERIALIZED_INT4 = (
    replace(SEVEN, queries_per_kv=16, dtype=BF16, sinks=True),
    replace(SEVEN, query_lens=(1, 4, 2, 1, 3, 4, 4), window=900, softcap=9.0, output=FP8_OUT),
    replace(SEVEN, head_size=192, alibi=True),
    replace(SEVEN, head_size=96, smoothing="balanced"),
)
REMATERIALIZED_INT2 = (replace(SEVEN, head_size=256, block_size=32), replace(SEVEN, head_size=192, smoothing="mean"))

# -- keys_an_id: neighbouring keys of a thread whose block is looked up once -------------------------------------------------------

RAGGED = Case(query_lens=(1, 1, 1), seq_lens=(700, 3, 301), head_size=128, num_kv_heads=2, queries_per_kv=2)
WIDE = Decode(keys=128, warps=1, stages=2, programs_per_sm=2, registers=None, min_keys=64, loops=2)
LOOKUPS: tuple[tuple[int, Decode, Case], ...] = (
    # Blocks that no tile is a multiple of, and of as many keys as a thread has.
    (4, WIDE, replace(RAGGED, block_size=24, layout="interleaved")),
    (8, replace(WIDE, keys=256), replace(RAGGED, block_size=8)),
    (1, replace(WIDE, keys=32), replace(RAGGED, block_size=256, layout="paired", dtype=BF16)),
    # Masked iterations over smaller tiles: at a window's edge, between the positions of a few tokens, up to the last key.
    (4, WIDE, replace(RAGGED, query_lens=(3, 1, 2), seq_lens=(700, 97, 321), window=200, sinks=True, joined=True)),
)

# -- apart: the small tiles of sm_90's table where something lies between the rows of a head's keys ---------------------------------

TILES_APART = {INT8: 16, "fp8_per_token_head": 16, f"{INT8}/{INT4}": 16, INT4: 32, f"{INT4}/{INT2}": 32, INT2: 64}
APART = (
    replace(RAGGED, layout="token_major", dtype=BF16),
    replace(RAGGED, layout="interleaved", query_lens=(2, 1, 2), seq_lens=(700, 97, 321), window=200, sinks=True, joined=True),
    replace(RAGGED, layout="paired", queries_per_kv=8, seq_lens=(700, 16, 33), block_size=32, alibi=True),
)

TABLE = [
    *reads(ALL, ALONE, alone=True),
    *reads(ALL, COMBINED, table=sliced(2), slices=2),
    *reads(INT4_VALUES, COMBINED, "gpu", table=sliced(8), slices=4),
    *reads(["none", INT8, INT2], COMBINED[:1], "interpret", table=sliced(8), slices=8),
    *reads([mode for mode in ALL if mode not in INT4_VALUES], COMBINED, "gpu", table=sliced(8), slices=8),
    # Rows of up to 64 splits are combined eight at a time, without slices.
    *reads(DISTINCT, [replace(ONE, query_lens=(1, 1), seq_lens=(2300, 500))], table=sliced(2, few=64), slices=2),
    *reads([INT2], NARROW, narrow_n=True),
    *(one for mode, size in FOLDING for one in reads([mode], [replace(case, head_size=size) for case in FOLDED], fold=2)),
    *reads([INT4], REMATERIALIZED_INT4, rematerialized=True),
    *reads([INT2], REMATERIALIZED_INT2, rematerialized=True),
    # Modes whose tiles have several keys a thread in kvq's own tables.
    *(
        one
        for together, choice, case in LOOKUPS
        for one in reads([INT4, INT2], [case], table=("decode", choice), keys_an_id=together, loops=2)
    ),
    *(
        one
        for mode, keys in TILES_APART.items()
        for one in reads([mode], APART, table=("decode", replace(WIDE, keys=keys, stages=5)), keys=keys)
    ),
]


@pytest.mark.parametrize(("place", "mode", "case", "table", "wanted"), TABLE)
def test_plan(
    place: str, mode: str, case: Case, table: tuple[str, Any] | None, wanted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if place == "interpret" and case.block_size >= 16:  # with smaller blocks, a case is about its many block ids
        case = replace(case, seq_lens=tuple(min(n, MOST_KEYS) for n in case.seq_lens))
    planned = EMPTY_TABLE
    if table:
        kind, choice = table
        planned = Table("sm_90" if kind == "decode" and place == "gpu" else "", {kind: (Entry({}, choice),)})
    launches = read_exactly(mode, case, place, monkeypatch, planned)
    got = {name: {value for launch in launches for value in values_of(launch, name)} for name in wanted}
    assert got == {name: {value} for name, value in wanted.items()}


def values_of(launch: dict[str, Any], name: str) -> list[Any]:
    """Property ``name`` of a launch: of the tile of a combine kernel, or of the config that all kernels of a read share, or of its tile."""
    if name == "slices":
        return [launch["TILE"].slices] if "TILE" in launch else []
    config = launch.get("C")
    if config is None:
        return []
    return [getattr(config.tile if hasattr(config.tile, name) else config, name)]
