"""Random problems for hypothesis: cases of odd sizes, and rows of the kinds that break quantizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from hypothesis import strategies as st

from kvq_core.errors import ArgumentError
from kvq_core.testing.cases import LAYOUTS, ROWS, Case
from kvq_core.testing.places import Place

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD_SIZES = (16, 24, 32, 40, 48, 64, 72, 80, 96, 112, 128, 160, 192, 256, 512, 576)

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


def head_sizes(backend: QuantKVBackend, largest: int = 128) -> st.SearchStrategy[int]:
    """Head sizes that the mode packs."""

    def packs(size: int) -> bool:
        try:
            backend.check_head_size(size, "head_size")
        except ArgumentError:
            return False
        return size <= largest

    return st.sampled_from([size for size in HEAD_SIZES if packs(size)])


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
def rows(draw: st.DrawFn, backend: QuantKVBackend) -> Rows:
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=6))
    return Rows(tuple(kinds), draw(head_sizes(backend, 256)), draw(st.sampled_from(DTYPES)), draw(st.integers(0, 2**20)))


@st.composite
def cases(draw: st.DrawFn, backend: QuantKVBackend, place: Place, plain: bool = False) -> Case:
    """Cases with random options (``plain``: none). Small on the CPU; on a GPU with more and longer sequences."""
    large = place.name == "gpu"
    num_seqs = draw(st.integers(1, 9 if large else 3))
    seq_lens = tuple(draw(st.integers(0, 700 if large else 70)) for _ in range(num_seqs))
    query_lens = tuple(draw(st.one_of(st.just(min(1, n)), st.integers(0, min(n, 80 if large else 20)))) for n in seq_lens)
    heads, group = draw(st.integers(1, 3)), draw(st.sampled_from((1, 2, 3, 4, 5, 7, 8)))
    sizes = head_sizes(backend, 256 if large else 128)
    geometry = {
        "query_lens": query_lens,
        "seq_lens": seq_lens,
        "head_size": draw(sizes),
        "head_size_v": draw(st.one_of(st.none(), sizes)),
        "num_kv_heads": heads,
        "queries_per_kv": group if large or heads * group <= 8 else 2,
        "block_size": draw(st.sampled_from((8, 16, 24, 32, 64, 128))),
        "dtype": draw(st.sampled_from(DTYPES)),
        "layout": draw(st.sampled_from(LAYOUTS)),
        "rows": draw(st.sampled_from(ROWS)),
    }
    return Case(**geometry, **({} if plain else draw(options(seq_lens))))  # type: ignore[arg-type]


def ranges(num_keys: int, least: int = 1, most: int = 3) -> st.SearchStrategy[tuple[tuple[int, int], ...]]:
    """``least`` to ``most`` pairs of positions among ``num_keys``, for ``mm_prefix_range``; some are no range."""
    position = st.integers(0, max(num_keys - 1, 0))
    return st.lists(st.tuples(position, position), min_size=least, max_size=most).map(tuple)


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
    }
