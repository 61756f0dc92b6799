"""Random problems for hypothesis: cases of odd sizes, and rows of the kinds that break quantizers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from kvq_core.testing.cases import LAYOUTS, ROWS, Case
from kvq_core.testing.places import Place

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD_SIZES = (16, 24, 32, 40, 48, 64, 72, 80, 96, 112, 128, 160, 192, 256, 512, 576)
TILES = (32, 64)
"""Keys in the tiles of kvq's kernels, where they are interpreted."""

KINDS = (
    "gaussian",
    "outlier",
    "constant",
    "zero",
    "subnormal",
    "tiny",
    "huge",
    "one_hot",
    "alternating",
    "ramp",
    "positive",
    "few_values",
)


def between(least: int, most: int) -> st.SearchStrategy[int]:
    """``least`` to ``most``. Fed with bytes, hypothesis before 6.170 finds no integer of a range such as 38 to 40, and few of others."""
    return st.integers(0, most - least).map(lambda above: least + above)


def up_to(largest: int, head_sizes: Sequence[int]) -> st.SearchStrategy[int]:
    """Those of ``head_sizes`` up to ``largest``; the smallest if there are none."""
    return st.sampled_from([size for size in head_sizes if size <= largest] or [min(head_sizes)])


def lengths(least: int, most: int, block_size: int) -> st.SearchStrategy[int]:
    """Of a sequence's keys: half of them at an edge of a block or tile, one before it or one after it."""
    units = (block_size, *TILES)
    edges = sorted(
        {edge + off for unit in units for edge in range(unit, most + 2, unit) for off in (-1, 0, 1) if least <= edge + off <= most}
    )
    anywhere = between(least, most)
    return st.one_of(anywhere, st.sampled_from(edges)) if edges else anywhere


def tables() -> st.SearchStrategy[dict[str, object]]:
    """How wide a block table is, mostly no wider than it must be, and whether its sequences share blocks."""
    return st.fixed_dictionaries({"spare_columns": st.sampled_from((0, 0, 0, 1, 4)), "shared": st.booleans()})


@dataclass(frozen=True)
class Rows:
    """Rows [len(kinds), head_size] to quantize, one kind each."""

    kinds: tuple[str, ...]
    head_size: int
    dtype: torch.dtype
    seed: int

    def tensor(self, device: torch.device) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.stack([row(kind, self.head_size, self.dtype, generator) for kind in self.kinds]).to(device, self.dtype)


def row(kind: str, size: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """One float32 row [size] of a kind, within the range of ``dtype``."""
    return rows_of(kind, 1, size, dtype, generator)[0]


def rows_of(kind: str, count: int, size: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Float32 rows [count, size] of a kind, within the range of ``dtype``."""
    x = torch.randn(count, size, generator=generator)
    at = torch.arange(count), torch.randint(size, (count,), generator=generator)
    # A rotation adds up to ``size`` channels: what is huge must still be finite then.
    huge = 3e4 if dtype == torch.float16 else 1e30
    if kind == "outlier":
        x[at] *= 300
    elif kind == "one_hot":
        x = torch.zeros(count, size)
        x[at] = 3.0
    elif kind == "ramp":
        x = torch.linspace(-2, 5, size).repeat(count, 1)
    elif kind == "few_values":
        x = (x * 2).round() / 2
    gain = {"constant": 0.0, "zero": 0.0, "subnormal": 1e-40 if dtype != torch.float16 else 3e-7, "tiny": 1e-6, "huge": huge / 6}
    x = x * gain.get(kind, 1.0)
    if kind == "constant":
        x = x + 1.7
    if kind == "alternating":
        x = x.abs() * (1 - 2 * (torch.arange(size) % 2))
    if kind == "positive":
        x = x.abs() + 0.5
    return x.clamp(-huge, huge)


@st.composite
def rows(draw: st.DrawFn, head_sizes: Sequence[int]) -> Rows:
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=6))
    return Rows(tuple(kinds), draw(up_to(256, head_sizes)), draw(st.sampled_from(DTYPES)), draw(st.integers(0, 2**20)))


@st.composite
def cases(draw: st.DrawFn, head_sizes: Sequence[int], place: Place, plain: bool = False) -> Case:
    """Cases with random options (``plain``: none, and no shared blocks). Small on the CPU; on a GPU with more and longer sequences."""
    large = place.name == "gpu"
    num_seqs = draw(st.integers(1, 9 if large else 3))
    block_size = draw(st.sampled_from((8, 16, 24, 32, 64, 128)))
    seq_lens = tuple(draw(lengths(0, 700 if large else 70, block_size)) for _ in range(num_seqs))
    query_lens = tuple(draw(st.one_of(st.just(min(1, n)), st.integers(0, min(n, 80 if large else 20)))) for n in seq_lens)
    heads, group = draw(st.integers(1, 3)), draw(st.sampled_from((1, 2, 3, 4, 5, 7, 8)))
    sizes = up_to(256 if large else 128, head_sizes)
    geometry = {
        "query_lens": query_lens,
        "seq_lens": seq_lens,
        "head_size": draw(sizes),
        "head_size_v": draw(st.one_of(st.none(), sizes)),
        "num_kv_heads": heads,
        "queries_per_kv": group if large or heads * group <= 8 else 2,
        "block_size": block_size,
        "dtype": draw(st.sampled_from(DTYPES)),
        "layout": draw(st.sampled_from(LAYOUTS)),
        "rows": draw(st.sampled_from(ROWS)),
    }
    return Case(**geometry, **({} if plain else draw(options(seq_lens)) | draw(tables())))  # type: ignore[arg-type]


def ranges(num_keys: int, least: int = 1, most: int = 3) -> st.SearchStrategy[tuple[tuple[int, int], ...]]:
    """``least`` to ``most`` pairs of positions among ``num_keys``, for ``mm_prefix_range``; some are no range."""
    position = st.integers(0, max(num_keys - 1, 0))
    end = st.one_of(position, st.sampled_from((num_keys, 2**31 - 1)))
    return st.lists(st.tuples(position, end), min_size=least, max_size=most).map(tuple)


@st.composite
def options(draw: st.DrawFn, seq_lens: tuple[int, ...]) -> dict[str, object]:
    """A random combination of the attention's options."""

    def sometimes(strategy: st.SearchStrategy[object], otherwise: object) -> object:
        return draw(strategy) if draw(st.integers(0, 2)) == 0 else otherwise

    alibi = sometimes(st.just(True), False)
    return {
        "window": sometimes(st.integers(0, 80), -1),
        "softcap": sometimes(st.sampled_from((0.5, 5.0, 50.0)), 0.0),
        "sinks": sometimes(st.just(True), False),
        "alibi": alibi,
        "alibi_sqrt": alibi and draw(st.booleans()),
        "qq_bias": sometimes(st.integers(1, 24), 0),
        "mm_prefix": sometimes(st.tuples(*(ranges(n) for n in seq_lens)), ()),
        "output": sometimes(st.sampled_from((torch.float8_e4m3fn, torch.float8_e5m2)), None),
        "score_gain": sometimes(st.sampled_from((0.0, 0.1, 10.0)), 1.0),
        "key_stops": sometimes(st.tuples(*(st.integers(0, n + 3) for n in seq_lens)), ()),
        "joined": sometimes(st.just(True), False),
    }
