"""Which reads have which property of a plan, and that each read is attention: one table, one body."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from exact_reads import EMPTY_TABLE, SUITES, read_exactly
from kvq_core.plan import Combine, Decode, Entry, Table
from kvq_core.registry import FIRST_PARTY
from kvq_core.testing.cases import Case

ALL = sorted(SUITES)
FIRST = sorted(SUITES.keys() & FIRST_PARTY.keys())
"""kvq's own, but for int3, whose suite is its package's."""
INT8, INT4, INT2 = "int8_per_token_head", "int4_per_token_head", "int2_per_token_head"
DISTINCT = ("none", INT8, INT4, INT2)
"""Modes whose launches differ in what these properties are of: in the interpreter the others would run the same lines."""
MOST_KEYS = 1100
"""Of a sequence in the interpreter, which has few programs to split it over."""
BOTH, INTERPRET, GPU = ("interpret", "gpu"), ("interpret",), ("gpu",)
FP8_OUT = torch.float8_e4m3fn
BF16, FP32 = torch.bfloat16, torch.float32


def reads(
    modes: Collection[str], cases: Collection[Case] | Mapping[str, Case], on: tuple[str, ...] = BOTH, table: Any = None, **wanted: Any
) -> list[Any]:
    """Parameters of :func:`test_plan`. ``wanted``: the value that each property has in every launch; ``table``: a kind and its choice.

    Of all modes, or all first-party ones, the interpreter runs those of :data:`DISTINCT`.
    """
    named = cases if isinstance(cases, Mapping) else {str(case): case for case in cases}
    properties = ",".join(f"{name}={value}" for name, value in wanted.items())
    return [
        pytest.param(
            place, mode, case, table, wanted, id=f"{properties}-{place}-{mode}-{name}", marks=pytest.mark.gpu if place == "gpu" else ()
        )
        for place in on
        for mode in (DISTINCT if place == "interpret" and modes in (ALL, FIRST) else modes)
        for name, case in named.items()
    ]


def with_size(size: int, cases: tuple[Case, ...]) -> list[Case]:
    return [replace(case, head_size=size) for case in cases]


# -- alone: the launch has one row block, so a program has at most one work tile ---------------------------------------------------

ONE = Case(query_lens=(1,), seq_lens=(2300,), head_size=128, num_kv_heads=1, queries_per_kv=4)
ALONE = (
    ONE,
    # More block ids than a program looks at together, a last block that is not full, a window that leaves some of them.
    replace(ONE, seq_lens=(4099,), head_size=64, block_size=8, dtype=BF16),
    replace(ONE, seq_lens=(3001,), window=700, sinks=True, output=FP8_OUT),
    # Three tokens, each of which sees as many keys as its position lets it.
    replace(ONE, query_lens=(3,), seq_lens=(900,), queries_per_kv=2, alibi=True, dtype=FP32),
    replace(ONE, query_lens=(4,), seq_lens=(777,), num_kv_heads=2, softcap=9.0, block_size=32),
    replace(ONE, head_size=96, queries_per_kv=16, smoothing="mean"),
    replace(ONE, head_size=256, queries_per_kv=7, smoothing="balanced", softcap=5.0),
    replace(ONE, query_lens=(4,), seq_lens=(900,), mm_prefix=(((12, 869), (896, 898)),)),
)
NOT_ALONE = {
    "two sequences": replace(ONE, query_lens=(1, 1), seq_lens=(2300, 40)),
    "two sequences, one without a token": replace(ONE, query_lens=(0, 1), seq_lens=(0, 2300)),
    "more rows than a tile has": replace(ONE, query_lens=(5,)),
    "no longer than a split": replace(ONE, seq_lens=(16,)),
}

# -- slices: programs of the combine kernel that share a row's channels ------------------------------------------------------------

COMBINED = (
    ONE,
    # Rows of no splits, one and many.
    Case(query_lens=(1, 0, 1, 1), seq_lens=(900, 0, 40, 500), head_size=128, queries_per_kv=2, sinks=True, dtype=BF16),
    Case(query_lens=(2, 2), seq_lens=(900, 333), head_size=96, queries_per_kv=3, window=400, dtype=FP32),
    replace(ONE, head_size=64, output=FP8_OUT, smoothing="mean"),
    replace(ONE, head_size=256, queries_per_kv=1, softcap=9.0),
    replace(ONE, head_size=64, head_size_v=128, alibi=True),
)
INT4_VALUES = [mode for mode in ALL if mode.endswith(INT4)]
"""A rotated row of V has no more slices than ways."""


def sliced(slices: int, few: int = 1) -> tuple[str, Combine]:
    """As many row blocks a program as hold one of many splits at most, or all."""
    return "combine", Combine(few=few, splits=32, blocks=1 if few > 1 else 2 if slices == 2 else 4, slices=slices, warps=4)


# -- narrow_n: at most half of the rows are valid, and each has two columns of a product -------------------------------------------

THREE = Case(query_lens=(1,) * 3, seq_lens=(700, 1, 129), head_size=128, num_kv_heads=2, queries_per_kv=4, softcap=20.0)
NARROW = (
    THREE,
    replace(THREE, queries_per_kv=1, dtype=BF16, sinks=True),
    replace(THREE, queries_per_kv=3, window=100, block_size=32),
    # Two tokens of two heads, each of which sees as many keys as its position lets it.
    replace(THREE, query_lens=(2, 2, 1), seq_lens=(700, 2, 1), queries_per_kv=2, alibi=True, softcap=5.0),
    replace(THREE, head_size=96, smoothing="mean", dtype=FP32),
    replace(THREE, head_size=256, smoothing="balanced", output=FP8_OUT),
    # Scores far beyond the cap, and the work tiles of a long sequence.
    replace(THREE, query_lens=(1,), seq_lens=(3000,), score_gain=400.0, softcap=50.0),
)
WIDE_N = {
    "no softcap": replace(THREE, softcap=0.0),
    "five heads": replace(THREE, queries_per_kv=5),
    "two tokens of three heads": replace(THREE, query_lens=(2, 2, 1), seq_lens=(700, 2, 1), queries_per_kv=3),
    "two keys in a row of lanes": replace(THREE, head_size=64),
    "two keys in a row of 48 lanes": replace(THREE, head_size=192),
    "a prompt": replace(THREE, query_lens=(40, 20, 17), seq_lens=(70, 20, 30)),
}

# -- fold: two neighbouring keys fill a row of lanes, which one would leave padded -------------------------------------------------

# Heads of 64 in int2 and of 32 in int4 have 8 lanes, half of what a product takes. Those of 192 in int2 have 24, padded to 32, where two
# have 48, which are 32 and 16. Two of 12 lanes, heads of 96 in int2, would be padded as one is.
PADDED = ((INT2, 64), (INT4, 96), (INT8, 112))
PADDED_ALIKE = ((INT4, 32), (INT2, 192), ("fp8_per_token_head", 80), ("fp8_per_tensor", 48))
FOUR = Case(query_lens=(1,) * 4, seq_lens=(301, 64, 1, 30), queries_per_kv=4)
TWOS = replace(FOUR, query_lens=(2,) * 4, seq_lens=(300, 65, 2, 31), queries_per_kv=2)
FOLDED_EDGES = (
    FOUR,
    # A window's edge between two keys of one row.
    replace(FOUR, window=22),
    replace(FOUR, window=23),
    replace(TWOS, query_lens=(2, 1), seq_lens=(40, 70), mm_prefix=(((12, 17), (3, 3)), ((2, 9), (30, 35))), window=5),
    # Many splits.
    replace(FOUR, query_lens=(1,), seq_lens=(2300,), num_kv_heads=1),
)
FOLDED = (
    *FOLDED_EDGES,
    replace(FOUR, dtype=BF16, rows="fused"),
    replace(FOUR, dtype=FP32, rows="transposed", block_size=32),
    replace(FOUR, queries_per_kv=3, sinks=True),
    replace(FOUR, queries_per_kv=1, smoothing="mean", sinks=True),
    replace(FOUR, smoothing="balanced", softcap=9.0),
    *(replace(FOUR, window=window) for window in (0, 1, 100)),
    replace(FOUR, alibi=True),
    replace(FOUR, alibi=True, alibi_sqrt=True, score_gain=400.0),
    replace(FOUR, output=FP8_OUT),
    replace(TWOS, window=9),
    replace(TWOS, qq_bias=4),
    # Many sequences that are not split.
    replace(FOUR, query_lens=(1,) * 9, seq_lens=tuple(range(3, 12)), num_kv_heads=1),
)
INT2_64 = replace(FOUR, head_size=64)
NOT_FOLDED = (
    # No padding, or as much.
    replace(FOUR, head_size=128),
    replace(FOUR, head_size=96),
    # 16 rows have no room for both keys'.
    replace(INT2_64, queries_per_kv=9),
    # The keys are not neighbours in memory.
    *(replace(INT2_64, layout=name) for name in ("token_major", "interleaved", "paired")),
    replace(INT2_64, head_size_v=128),
)

# -- rematerialized: recomputed per work tile, to save registers -------------------------------------------------------------------

# Splits are of 128 keys: one program has the end of the first sequence and the whole second, another the whole fourth and fifth.
SEVEN = Case(query_lens=(1,) * 7, seq_lens=(700, 33, 90, 1, 64, 129, 1200), head_size=128, num_kv_heads=1, queries_per_kv=4)
REMATERIALIZED_INT4 = (
    SEVEN,
    replace(SEVEN, queries_per_kv=16, dtype=BF16, sinks=True),
    replace(SEVEN, query_lens=(1, 4, 2, 1, 3, 4, 4), window=900, softcap=9.0, output=FP8_OUT),
    replace(SEVEN, head_size=192, alibi=True),
    replace(SEVEN, head_size=96, smoothing="balanced"),
)
REMATERIALIZED_INT2 = (replace(SEVEN, head_size=256, block_size=32), replace(SEVEN, head_size=192, smoothing="mean"))
KEPT_INT4 = {
    "a row block on its own": replace(SEVEN, query_lens=(1,), seq_lens=(2300,)),
    "nothing is split": replace(SEVEN, seq_lens=(16, 9, 1, 3, 16, 2, 7)),
}

# -- keys_first: keys are on a product's long side (M), unless the query rows fill it ----------------------------------------------

SIXTEEN = Case(query_lens=(4,) * 4, seq_lens=(301, 64, 4, 30), head_size=64, queries_per_kv=4)
ROWS_FIRST = (
    SIXTEEN,
    replace(SIXTEEN, query_lens=(1,) * 4, queries_per_kv=16, head_size=128, dtype=BF16),
    replace(SIXTEEN, query_lens=(3, 1, 4, 2), head_size=256, dtype=BF16, block_size=32),
    replace(SIXTEEN, queries_per_kv=3, head_size=80, sinks=True, window=23),
    replace(SIXTEEN, head_size=112, smoothing="balanced", softcap=9.0),
    replace(SIXTEEN, alibi=True, score_gain=400.0, output=FP8_OUT),
    replace(SIXTEEN, qq_bias=4, mm_prefix=(((12, 17), (3, 3)), ((2, 9),), (), ((1, 5),)), window=5),
    # Many splits.
    replace(SIXTEEN, query_lens=(4,), seq_lens=(2300,), num_kv_heads=1),
)
EIGHT_ROWS = {"eight rows": replace(SIXTEEN, query_lens=(2,) * 4)}  # int2: two keys share a row of lanes
SIZE_192 = {"lanes in chunks": replace(SIXTEEN, head_size=192)}
SIZE_96 = {"lanes in chunks, 96": replace(SIXTEEN, head_size=96)}

# -- keys_an_id: neighbouring keys of a thread whose block is looked up once -------------------------------------------------------

RAGGED = Case(query_lens=(1, 1, 1), seq_lens=(700, 3, 301), head_size=128, num_kv_heads=2, queries_per_kv=2)
WIDE = Decode(keys=128, warps=1, stages=2, programs_per_sm=2, registers=None, min_keys=64, loops=2)
LOOKUPS: dict[str, tuple[Case, Decode, int]] = {
    "four keys a thread": (RAGGED, WIDE, 4),
    "blocks of a tile": (replace(RAGGED, block_size=128), WIDE, 4),
    "blocks of more than a tile": (replace(RAGGED, block_size=256, layout="paired", dtype=BF16), WIDE, 4),
    "blocks that no tile is a multiple of": (replace(RAGGED, block_size=24, layout="interleaved"), WIDE, 4),
    "as many keys a thread as a block has": (replace(RAGGED, block_size=8), replace(WIDE, keys=256), 8),
    "two keys a thread, a window": (replace(RAGGED, window=333, sinks=True), replace(WIDE, keys=64), 2),
    "a key a thread": (RAGGED, replace(WIDE, keys=32), 1),
    "two warps": (RAGGED, replace(WIDE, warps=2), 2),
    "one sequence": (replace(RAGGED, query_lens=(1,), seq_lens=(1500,), block_size=32), WIDE, 4),
}

TABLE = [
    *reads(ALL, ALONE, alone=True),
    *reads([INT4], NOT_ALONE, INTERPRET, alone=False),
    *reads(ALL, COMBINED, table=sliced(2), slices=2),
    *reads([INT4], COMBINED, INTERPRET, table=sliced(8), slices=4),
    *reads(INT4_VALUES, COMBINED, GPU, table=sliced(8), slices=4),
    *reads(["none", INT8, INT2], COMBINED, INTERPRET, table=sliced(8), slices=8),
    *reads([mode for mode in ALL if mode not in INT4_VALUES], COMBINED, GPU, table=sliced(8), slices=8),
    # Rows of up to 64 splits are combined eight at a time, without slices.
    *reads(DISTINCT, [replace(ONE, query_lens=(1, 1), seq_lens=(2300, 500))], table=sliced(2, few=64), slices=2),
    *reads([INT2], NARROW, narrow_n=True),
    *reads([INT2], WIDE_N, narrow_n=False),
    *reads([mode for mode in ALL if mode != INT2], {"no such kernel": THREE}, INTERPRET, narrow_n=False),
    *(one for mode, size in PADDED for one in reads([mode], with_size(size, FOLDED), fold=2)),
    *(one for mode, size in PADDED_ALIKE for one in reads([mode], with_size(size, FOLDED_EDGES), INTERPRET, fold=2)),
    *(one for mode, size in PADDED_ALIKE for one in reads([mode], with_size(size, FOLDED), GPU, fold=2)),
    *reads([INT2], NOT_FOLDED, fold=1),
    *reads([INT4], REMATERIALIZED_INT4, rematerialized=True),
    *reads([INT2], REMATERIALIZED_INT2, rematerialized=True),
    *reads([INT4], KEPT_INT4, INTERPRET, rematerialized=False),
    *reads([INT8], {"nothing is rotated": SEVEN}, INTERPRET, rematerialized=False),
    *reads([INT2], {"a matrix of 16 lanes": SEVEN}, INTERPRET, rematerialized=False),
    *reads(FIRST, ROWS_FIRST, keys_first=False, decode=True),
    *reads(FIRST, EIGHT_ROWS, keys_first=True, decode=True),
    *reads([INT4, INT8], SIZE_192, keys_first=True, decode=True),
    *reads([INT8], SIZE_96, keys_first=True, decode=True),
    *(
        one
        for name, (case, choice, together) in LOOKUPS.items()
        # On a GPU, the modes whose tiles have several keys a thread in kvq's own tables.
        for modes, on in ((DISTINCT, INTERPRET), ([INT4, INT2], GPU))
        for one in reads(modes, {name: case}, on, ("decode", choice), keys_an_id=together, loops=2)
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
