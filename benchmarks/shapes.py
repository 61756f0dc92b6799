"""What is measured: the settings, as values, and the bytes and operations that each of them must move and do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from kvq_core.cache.layout import cell_size, fields

if TYPE_CHECKING:
    from kvq_core import QuantKVBackend

DTYPE = torch.bfloat16
"""Of queries, outputs and new rows, everywhere."""


def stored_bytes(backend: QuantKVBackend, head_size: int) -> int:
    """Bytes that ``backend`` stores for one token of one head, K and V: the codes, and the float32 scales if it has some."""
    return cell_size(fields(backend, head_size, head_size, DTYPE))


@dataclass(frozen=True)
class Read:
    """Attention of ``query_len`` new tokens of each sequence over its ``seq_lens`` keys (the new ones included), causal.

    ``window``: keys that a row sees, its own included. ``layout``: of the pages, one of :data:`kvq_core.cache.layout.LAYOUTS`.
    """

    name: str
    seq_lens: tuple[int, ...]
    query_len: int = 1
    query_heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16
    window: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    layout: str = "head_major"

    def __post_init__(self) -> None:
        if not self.seq_lens or min(self.seq_lens) < self.query_len or self.query_heads % self.kv_heads:
            raise ValueError(f"not a setting: {self!r}")

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Blocks of each sequence."""
        return tuple(-(-n // self.block_size) for n in self.seq_lens)

    def bytes(self, backend: QuantKVBackend) -> int:
        """Packed bytes of K and V that must be read once: codes and scales of all keys that some row sees."""
        return self.rows_read * stored_bytes(backend, self.head_size)

    @property
    def rows_read(self) -> int:
        """Rows of K, and as many of V, that must be read: all keys that some query row sees, of each head."""
        return sum(self._reach(n) for n in self.seq_lens) * self.kv_heads

    @property
    def flops(self) -> int:
        """Operations of the two products, over the keys that causality and the window leave."""
        pairs = sum(self.query_len * (n - self.query_len) + self.query_len * (self.query_len + 1) // 2 for n in self.seq_lens)
        if self.window is not None:
            pairs = sum(min(position + 1, self.window) for n in self.seq_lens for position in range(n - self.query_len, n))
        return 4 * self.query_heads * self.head_size * pairs

    @property
    def plain(self) -> bool:
        """Whether only causality decides what a row sees, and with what weight."""
        return not self.options

    @property
    def options(self) -> tuple[str, ...]:
        """The options of attention that are on, in words."""
        on = (
            f"a window of {self.window}" * (self.window is not None),
            "softcap" * bool(self.softcap),
            "sinks" * self.sinks,
            "ALiBi" * self.alibi,
        )
        return tuple(filter(None, on))

    def like(self, other: Read) -> Read:
        """This one in the heads, blocks, layout and options of ``other``; of a window, one that hides keys here."""
        fields = ("query_heads", "kv_heads", "head_size", "block_size", "softcap", "sinks", "alibi", "layout")
        window = None if other.window is None else min(other.window, max(max(self.seq_lens) // 3, 1))
        return replace(self, window=window, **{name: getattr(other, name) for name in fields})

    def _reach(self, length: int) -> int:
        """Keys of a sequence that some row sees."""
        return length if self.window is None else min(length, self.window + self.query_len - 1)

    def __str__(self) -> str:
        low, high = min(self.seq_lens), max(self.seq_lens)
        keys = f"{high}" if low == high else f"{low}..{high}"
        heads = f"{self.query_heads}/{self.kv_heads} heads of {self.head_size}"
        text = f"{self.name}: {self.num_seqs} x {self.query_len} queries over {keys} keys, {heads}, blocks of {self.block_size}"
        return ", ".join((text, *(f"{self.layout} pages" for _ in [0] if self.layout != "head_major"), *self.options))


@dataclass(frozen=True)
class Write:
    """``tokens`` new K and V rows for each head. ``scattered``: each goes to another block (decode), or they fill blocks (prefill).

    ``layers``: as many writes one after the other, each of rows and to pages of its own, as the layers of a model have them.
    """

    name: str
    tokens: int
    scattered: bool = False
    kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16
    layers: int = 1

    @property
    def num_blocks(self) -> int:
        """Of a layer."""
        return self.tokens if self.scattered else -(-self.tokens // self.block_size)

    def bytes(self, backend: QuantKVBackend) -> int:
        """Rows read and packed rows written, K and V, and the slots."""
        rows = self.tokens * self.kv_heads * (2 * self.head_size * DTYPE.itemsize + stored_bytes(backend, self.head_size))
        return self.layers * (rows + 8 * self.tokens)

    def __str__(self) -> str:
        where = "scattered" if self.scattered else "in whole blocks"
        layers = f", {self.layers} layers one after the other" if self.layers > 1 else ""
        return f"{self.name}: {self.tokens} tokens {where}, {self.kv_heads} heads of {self.head_size}, K and V{layers}"


Setting = Read | Write

HEADLINE = (
    Read("A", (8192,) * 64),
    Read("B", (131072,)),
    Read("C", (4096,) * 128, query_heads=64),
)
DECODE = (
    *HEADLINE,
    Read("b1-512", (512,)),
    Read("b32-512", (512,) * 32),
    Read("b1-4096", (4096,)),
    Read("ragged", (131072, *(1024,) * 63)),
    # The bytes of ``ragged``, spread evenly.
    Read("even", (3056,) * 64),
)
PREFILL = (
    Read("q8192", (8192,), query_len=8192),
    Read("q2048-32768", (32768,), query_len=2048),
)
WRITE = (
    Write("w64", 64, scattered=True),
    Write("w8192", 8192),
)
VARIED = (
    *(Read(f"A-q{n}", (8192,) * 64, query_len=n) for n in (2, 4, 8)),
    *(Read(f"A-d{d}", (8192,) * 64, head_size=d) for d in (64, 96, 192, 256)),
    *(Read(f"A-g{g}", (8192,) * 64, query_heads=8 * g) for g in (1, 7, 16)),
    *(Read(f"A-p{p}", (8192,) * 64, block_size=p) for p in (32, 64, 128)),
)
"""Decode settings with more query rows, other head sizes, groups and blocks."""
OPTIONS = (
    # A window that hides nothing: what it costs to have one.
    Read("A-window", (8192,) * 64, window=8192),
    Read("A-softcap", (8192,) * 64, softcap=30.0),
    Read("A-sinks", (8192,) * 64, sinks=True),
    Read("A-alibi", (8192,) * 64, alibi=True),
    # The same keys in both: 1024 of 131072, and all of 1024.
    Read("B-window-1024", (131072,), window=1024),
    Read("b1-1024", (1024,)),
    Read("A-token-major", (8192,) * 64, layout="token_major"),
    Read("A-cells", (8192,) * 64, layout="interleaved"),
)
"""Decode settings with options of attention and other layouts: planned as setting A is, or as one short sequence."""
LENGTHS = (
    Read("b64-8100", (8100,) * 64),
    Read("b32-3000", (3000,) * 32),
    Read("b8-5000", (5000,) * 8),
    Read("b32-4016-q4", (4016,) * 32, query_len=4),
)
"""Decode settings of lengths that no tile divides, as most are; those of the others are powers of two."""
OTHER_PREFILL = tuple(Read(f"q8192-d{d}", (8192,), query_len=8192, head_size=d) for d in (64, 96))
"""Prefill with other head sizes."""
LAYERS = tuple(Write(f"{one.name}-8", one.tokens, one.scattered, layers=8) for one in WRITE)
"""Writes as a graph of a model's step has them: the launches of one layer hide behind the work of the one before."""
MORE: tuple[Setting, ...] = (*VARIED, *OPTIONS, *LENGTHS, *OTHER_PREFILL, *LAYERS)
"""What only ``--settings`` asks for (``more``: all of it)."""

DEFAULT = (("decode", DECODE), ("prefill", PREFILL), ("write", WRITE))
QUICK = (("decode", HEADLINE),)


def chosen(names: list[str]) -> tuple[tuple[str, tuple[Setting, ...]], ...]:
    """The settings of these names (or of an operation's name: all its default ones) by operation; ``ValueError`` for others."""
    everything: tuple[tuple[str, tuple[Setting, ...]], ...] = (
        ("decode", DECODE + VARIED + OPTIONS + LENGTHS),
        ("prefill", PREFILL + OTHER_PREFILL),
        ("write", WRITE + LAYERS),
    )
    defaults: dict[str, tuple[Setting, ...]] = {**dict(DEFAULT), "more": MORE}
    wanted = {n for name in names for n in ([s.name for s in defaults[name]] if name in defaults else [name])}
    known = {s.name for _, settings in everything for s in settings}
    if not wanted or not wanted <= known:
        raise ValueError(
            f"no such settings: {', '.join(sorted(wanted - known)) or 'none named'}; known: {', '.join([*defaults, *sorted(known)])}"
        )
    picked = ((op, tuple(s for s in settings if s.name in wanted)) for op, settings in everything)
    return tuple((op, settings) for op, settings in picked if settings)
