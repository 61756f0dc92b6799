"""Which attention problems are tried: one frozen value each, and the lists of them.

float16 is the default dtype because its budgets are the tightest of the 16-bit ones: an error of one key in a thousand shows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

Range = tuple[int, int]

LAYOUTS = ("head_major", "token_major", "paired", "interleaved")
ROWS = ("contiguous", "fused", "transposed")
SMOOTHINGS = ("", "mean", "balanced", "rotary", "ordered")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of both doors.

    ``query_lens`` and ``seq_lens`` (keys, the new ones included) are per sequence. ``layout`` says how the pages lie in memory:
    ``head_major`` [block, head, slot], ``token_major`` [block, slot, head], ``paired`` [block, K or V, slot, head], ``interleaved``
    vLLM's cell [K codes | K scale | V codes | V scale] per slot and head; ``padding`` bytes that are nobody's follow each block.
    ``rows`` says how key, value, q and out lie: ``contiguous``, ``fused`` (columns of one wide projection) or ``transposed``
    [head, token]. ``smoothing``: keys share a mean, in some channels thirty times what they
    differ in, which is known (``mean``), with a factor for each channel (``balanced``), and with a rotary mean as well, of
    sequences that begin anywhere (``rotary``), or not (empty). The block table has
    ``spare_columns`` more than the longest sequence needs. ``shared``: every sequence begins with the blocks of the first, as far as both
    fill them, and with the keys and values that are in them. ``key_stops``: keys at these positions and later are not seen. ``joined``: the
    read is given what another one has found.
    """

    query_lens: tuple[int, ...] = (1, 5)
    seq_lens: tuple[int, ...] = (48, 17)
    head_size: int = 64
    head_size_v: int | None = None
    num_kv_heads: int = 2
    queries_per_kv: int = 2
    block_size: int = 16
    dtype: torch.dtype = torch.float16
    layout: str = "head_major"
    padding: int = 64
    rows: str = "contiguous"
    window: int = -1
    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    alibi_sqrt: bool = False
    qq_bias: int = 0
    mm_prefix: tuple[tuple[Range, ...], ...] = ()
    output: torch.dtype | None = None
    score_gain: float = 1.0
    smoothing: str = ""
    spare_columns: int = 0
    shared: bool = False
    key_stops: tuple[int, ...] = ()
    joined: bool = False

    def __post_init__(self) -> None:
        fits = all(0 <= q <= k for q, k in zip(self.query_lens, self.seq_lens, strict=True))
        if not fits or self.layout not in LAYOUTS or self.rows not in ROWS or self.smoothing not in SMOOTHINGS:
            raise ValueError(f"not a case: {self}")

    @property
    def has_rotary_mean(self) -> bool:
        return self.smoothing in ("rotary", "ordered")

    @property
    def value_size(self) -> int:
        return self.head_size if self.head_size_v is None else self.head_size_v

    @property
    def num_query_heads(self) -> int:
        return self.num_kv_heads * self.queries_per_kv

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)

    def __str__(self) -> str:
        """What differs from the default case, as a test id."""
        changed = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return ",".join(f"{name}={_short(value)}" for name, value in changed) or "default"


def _short(value: object) -> str:
    if isinstance(value, tuple):
        return "x".join(_short(item) for item in value) if value else "none"
    return str(value).removeprefix("torch.")


# Blocks have 16 slots, tiles 32 keys or 64: sequences end at an edge of both, a key after it and a key before it.
_MIXED: dict[str, Any] = {"query_lens": (1, 7, 0, 20, 3), "seq_lens": (33, 48, 16, 31, 64)}
_LONG: dict[str, Any] = {"query_lens": (1, 6), "seq_lens": (65, 48)}

OPTIONS = (
    Case(**_MIXED),
    Case(**_LONG, window=0),
    Case(**_LONG, window=1),
    Case(**_LONG, window=16),
    Case(**_MIXED, window=23),
    Case(**_LONG, softcap=1.5),
    Case(**_LONG, softcap=20.0, score_gain=30.0),
    Case(**_LONG, sinks=True),
    Case(**_LONG, sinks=True, window=0),
    Case(**_LONG, alibi=True),
    Case(**_LONG, alibi=True, alibi_sqrt=True),
    Case(query_lens=(6, 1), seq_lens=(45, 70), qq_bias=6),
    Case(query_lens=(12, 3), seq_lens=(40, 3), qq_bias=8),
    Case(**_MIXED, shared=True),
    Case(**_MIXED, key_stops=(32, 7, 0, 20, 64)),
    Case(**_LONG, key_stops=(40, 16), window=23, sinks=True),
    Case(**_MIXED, key_stops=(20, 40, 0, 0, 70), joined=True),
    Case(**_LONG, sinks=True, joined=True, output=torch.float8_e4m3fn),
    Case(query_lens=(20, 1), seq_lens=(30, 40), mm_prefix=(((12, 17), (3, 3)), ((2, 9), (30, 35)))),
    Case(query_lens=(20, 5), seq_lens=(20, 40), mm_prefix=(((0, 11), (15, 2**31 - 1)), ((33, 39), (0, 0))), window=4),
    Case(**_LONG, output=torch.float8_e4m3fn),
    Case(**_LONG, output=torch.float8_e5m2),
    Case(**_LONG, dtype=torch.bfloat16),
    Case(**_LONG, dtype=torch.float32),
    Case(**_LONG, score_gain=0.0),
    Case(**_LONG, score_gain=400.0),
)
"""Every option of the attention alone."""

ROTARY = (
    Case(**_MIXED, smoothing="rotary", shared=True),
    Case(**_LONG, smoothing="rotary", softcap=20.0, head_size=96, dtype=torch.bfloat16),
    Case(**_LONG, smoothing="rotary", dtype=torch.float32, rows="fused", layout="interleaved", sinks=True, alibi=True),
    Case(query_lens=(20, 3), seq_lens=(90, 65), num_kv_heads=1, queries_per_kv=8, head_size=24, smoothing="rotary"),
)
"""Keys with a rotary mean."""
ROTARY_LARGE = (Case(query_lens=(1, 700), seq_lens=(3000, 700), head_size=128, dtype=torch.bfloat16, smoothing="rotary"),)

SMOOTHED = (
    Case(**_MIXED, smoothing="mean"),
    Case(**_MIXED, smoothing="balanced", head_size=80, queries_per_kv=3, window=23),
    Case(**_LONG, smoothing="mean", sinks=True, dtype=torch.bfloat16),
    Case(**_LONG, smoothing="balanced", softcap=20.0, head_size=96),
    Case(**_LONG, smoothing="balanced", softcap=5.0, sinks=True, alibi=True),
    Case(**_LONG, smoothing="balanced", dtype=torch.float32, rows="fused", layout="interleaved", sinks=True),
    Case(query_lens=(1, 1), seq_lens=(560, 270), num_kv_heads=2, smoothing="balanced", sinks=True),
    Case(query_lens=(4,), seq_lens=(400,), num_kv_heads=1, queries_per_kv=3, sinks=True, window=300, smoothing="mean"),
    Case(query_lens=(2, 20, 0), seq_lens=(300, 280, 300), num_kv_heads=1, queries_per_kv=1, softcap=9.0, smoothing="mean"),
    *ROTARY,
    Case(query_lens=(1, 1), seq_lens=(560, 270), num_kv_heads=2, smoothing="rotary", sinks=True),
    Case(query_lens=(4,), seq_lens=(400,), num_kv_heads=1, queries_per_kv=3, window=300, smoothing="rotary", key_stops=(390,)),
    Case(**_LONG, smoothing="mean", joined=True),
)
"""Keys whose mean is taken off: prefill, decode and split keys, with what sees the difference (sinks, a softcap) and what does not."""

SHAPES = (
    Case(query_lens=(1,), seq_lens=(1,)),
    Case(query_lens=(1, 1, 1), seq_lens=(1, 16, 17)),
    Case(query_lens=(33,), seq_lens=(33,)),
    Case(query_lens=(17, 5), seq_lens=(50, 5)),
    Case(query_lens=(2, 8, 5), seq_lens=(40, 33, 70), shared=True),
    Case(query_lens=(3, 3, 3, 3), seq_lens=(3, 24, 48, 9)),
    Case(query_lens=(0, 2, 0), seq_lens=(0, 20, 31)),
    Case(query_lens=(0,), seq_lens=(25,)),
    *(Case(head_size=d) for d in (80, 96, 112, 128)),
    *(Case(head_size=d, seq_lens=(20, 9), num_kv_heads=1) for d in (192, 256)),
    Case(head_size=576, head_size_v=512, num_kv_heads=1, queries_per_kv=3, seq_lens=(19, 9)),
    Case(head_size=128, head_size_v=64),
    Case(head_size=96, head_size_v=112, num_kv_heads=1),
    *(Case(block_size=p, seq_lens=(65, 49)) for p in (8, 24, 32, 64, 128)),
    *(Case(num_kv_heads=h, queries_per_kv=g) for h, g in ((3, 1), (1, 3), (2, 4), (1, 7), (1, 8), (1, 16))),
    *(Case(layout=layout, head_size=d) for layout, d in (("token_major", 64), ("paired", 64), ("interleaved", 64), ("interleaved", 80))),
    *(Case(layout=layout, padding=0, spare_columns=i) for i, layout in enumerate(LAYOUTS)),
    *(Case(rows=rows) for rows in ("fused", "transposed")),
)
"""Every geometry alone: batches, head sizes, block sizes, group sizes, layouts, strides."""

LARGE = (
    Case(query_lens=(1,) * 16, seq_lens=tuple(range(1, 4096, 256)), num_kv_heads=8, queries_per_kv=4, head_size=128, dtype=torch.bfloat16),
    Case(query_lens=(1, 1), seq_lens=(8191, 5000), num_kv_heads=2, queries_per_kv=8, head_size=128),
    Case(query_lens=(1,), seq_lens=(16384,), num_kv_heads=1, queries_per_kv=7, head_size=128, block_size=32),
    Case(query_lens=(5, 2, 8, 16), seq_lens=(3000, 700, 1025, 64), num_kv_heads=4, queries_per_kv=3, head_size=96),
    Case(query_lens=(513, 256, 1), seq_lens=(513, 1500, 999), num_kv_heads=2, queries_per_kv=4, head_size=128, dtype=torch.bfloat16),
    Case(query_lens=(300, 1, 4), seq_lens=(900, 2500, 1200), head_size=256, window=511, sinks=True, softcap=30.0),
    Case(query_lens=(130, 1), seq_lens=(700, 2000), head_size=80, alibi=True, layout="interleaved", rows="fused"),
    Case(query_lens=(16, 16), seq_lens=(1700, 333), head_size=64, qq_bias=16, queries_per_kv=16, num_kv_heads=1),
    Case(query_lens=(600,), seq_lens=(600,), head_size=192, mm_prefix=(((32, 300), (400, 599)),), block_size=128),
    Case(query_lens=(70, 1), seq_lens=(300, 1100), head_size=576, head_size_v=512, num_kv_heads=1, queries_per_kv=16),
    Case(query_lens=(1,) * 8, seq_lens=tuple(range(500, 4100, 450)), queries_per_kv=8, head_size=128, sinks=True, smoothing="balanced"),
    Case(query_lens=(513, 2), seq_lens=(700, 3000), head_size=128, softcap=30.0, dtype=torch.bfloat16, smoothing="mean"),
    Case(query_lens=(1,) * 70, seq_lens=tuple(range(100, 170)), num_kv_heads=1, queries_per_kv=1, head_size=112, block_size=8),
    Case(query_lens=(70, 1, 129, 64), seq_lens=(1100, 1600, 129, 2000), queries_per_kv=7, head_size=128, block_size=32, sinks=True),
    # Short ones, of which there are enough to fill a GPU without a split.
    Case(query_lens=(1,) * 19, seq_lens=tuple(range(1, 513, 27)), num_kv_heads=8, queries_per_kv=4, head_size=128, dtype=torch.bfloat16),
    Case(
        query_lens=(300, 33),
        seq_lens=(1300, 33),
        queries_per_kv=1,
        head_size=128,
        dtype=torch.float32,
        smoothing="balanced",
        layout="token_major",
        rows="fused",
    ),
    Case(query_lens=(513, 2), seq_lens=(700, 3000), head_size=128, dtype=torch.bfloat16, smoothing="rotary"),
    Case(query_lens=(1,) * 9, seq_lens=tuple(range(500, 5000, 500)), queries_per_kv=8, head_size=128, sinks=True, smoothing="rotary"),
    Case(query_lens=(200,), seq_lens=(1700,), queries_per_kv=4, head_size=128, dtype=torch.bfloat16, score_gain=400.0, layout="paired"),
)
"""Shapes that only a GPU gets through in time."""

QUICK = (OPTIONS[0], OPTIONS[4], SHAPES[2])
"""The cases of ``-m quick``: decode, a few rows and prefill in one batch, without a window and with one; prefill alone."""
