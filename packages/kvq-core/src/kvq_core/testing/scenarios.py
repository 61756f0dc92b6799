"""Whole scenarios: a case, what its rows hold, which of them are damaged, where its blocks lie, and how the read is planned.

They are drawn in two steps, because a GPU compiles for seconds what it runs in no time: a ``Signature`` fixes all that kernels are
compiled for, ``scenarios`` draws any number of scenarios of it.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.database import InMemoryExampleDatabase

from kvq_core.testing import scene, strategies
from kvq_core.testing.cases import LAYOUTS, ROWS, Case
from kvq_core.testing.places import Place
from kvq_core.testing.scene import Scene

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend

T = TypeVar("T")

PLANS = ("own", "whole", "segments", "invariant")
QUERY_KINDS = tuple(kind for kind in strategies.KINDS if kind not in ("huge", "outlier"))
"""Queries whose scores stay in the range where a rounding error of the query still says something about the result."""
BAD_VALUES = ("nan", "inf", "-inf", "largest")
_RANDOM_BYTES = 1 << 14
ATTEMPTS = 100
"""Examples to draw before a strategy counts as empty."""


@dataclass(frozen=True)
class Signature:
    """What the kernels of a scenario are compiled for. ``case`` has no sequences yet."""

    case: Case
    num_seqs: int
    longest: int
    most_keys: int
    uniform: bool
    num_ranges: int
    hint: int
    plan: str
    segments: int


@dataclass(frozen=True)
class Damage:
    """``value`` of ``BAD_VALUES`` in head ``head`` of row ``row`` of ``key``, ``value`` or ``q``; ``largest`` fills the row with
    numbers as large as the dtype has, which overflow in any sum."""

    of: str
    row: int
    head: int
    value: str


@dataclass(frozen=True)
class Scenario:
    """One write and one read.

    ``kinds`` and ``query_kinds`` (``strategies.KINDS``) take turns, row by row. ``plan`` of ``PLANS``: kvq's own, keys never split,
    an engine's ``segments``, or batch-invariant. ``longest`` and ``hint`` are the read's ``max_seqlen_q`` and ``max_seqlen_k``.
    ``padded``: the query has rows of no sequence.
    ``lost``: (sequence, column, id) of the block table that names no block of the cache. ``parts``: each row comes with one of so many
    writes, and is padding or out of the cache in the others.
    """

    case: Case
    seed: int = 0
    kinds: tuple[str, ...] = ("gaussian",)
    query_kinds: tuple[str, ...] = ("gaussian",)
    damage: tuple[Damage, ...] = ()
    longest: int = 1
    hint: int = 1
    plan: str = "own"
    segments: int = 0
    padded: bool = True
    lost: tuple[int, int, int] | None = None
    parts: int = 1


@dataclass
class Staged:
    """A scenario's scene. ``stored`` [keys]: rows that have a slot of their own. ``damaged``: ``key``, ``value`` -> [num_slots, Hkv] bool,
    ``q`` -> [rows, Hq] bool; ``huge``: [num_slots, Hkv] bool, the keys whose scores leave every range but float32's."""

    built: Scene
    stored: torch.Tensor
    damaged: dict[str, torch.Tensor]
    huge: torch.Tensor


def stage(scenario: Scenario, backend: QuantKVBackend, device: torch.device) -> Staged:
    """The scene of ``scenario``, nothing stored yet."""
    case = scenario.case
    built = scene.build(case, backend, device, scenario.seed)
    generator = torch.Generator().manual_seed(scenario.seed)
    for x in (built.key, built.value):
        _fill(x, scenario.kinds, generator)
    _fill(built.q[: sum(case.query_lens)], scenario.query_kinds, generator)

    stored = built.own
    if scenario.lost is not None:
        seq, column, block = scenario.lost
        built.block_table[seq, column] = block

    slots = built.num_blocks * case.block_size
    damaged = {half: torch.zeros(slots, case.num_kv_heads, dtype=torch.bool, device=device) for half in ("key", "value")}
    damaged["q"] = torch.zeros(built.q.shape[:2], dtype=torch.bool, device=device)
    for bad in scenario.damage:
        x = {"key": built.key, "value": built.value, "q": built.q}[bad.of]
        _spoil(x[bad.row, bad.head], bad.value)
        if bad.of == "q":
            damaged["q"][bad.row, bad.head] = True
        elif stored[bad.row]:
            damaged[bad.of][built.slots[bad.row], bad.head] = True
    huge = torch.zeros_like(damaged["key"])
    kinds = torch.arange(built.key.shape[0] * case.num_kv_heads, device=device).reshape(-1, case.num_kv_heads) % len(scenario.kinds)
    is_huge = torch.tensor([kind == "huge" for kind in scenario.kinds], device=device)
    huge[built.slots[stored]] = is_huge[kinds[stored]]
    return Staged(built, stored, damaged, huge)


def _fill(x: torch.Tensor, kinds: tuple[str, ...], generator: torch.Generator) -> None:
    """Rows of ``kinds`` in turn into ``x`` [rows, heads, size]; gaussian ones keep what is there."""
    turn = torch.arange(x.shape[0] * x.shape[1]).reshape(x.shape[:2]) % len(kinds)
    for i, kind in enumerate(kinds):
        where = (turn == i).nonzero(as_tuple=True)
        if kind != "gaussian" and len(where[0]):
            rows = strategies.rows_of(kind, len(where[0]), x.shape[2], x.dtype, generator)
            x[tuple(index.to(x.device) for index in where)] = rows.to(x.device, x.dtype)


def _spoil(row: torch.Tensor, value: str) -> None:
    if value == "largest":
        row.copy_(torch.where(row < 0, -1.0, 1.0) * torch.finfo(row.dtype).max)
    else:
        row[row.shape[0] // 2] = float(value)


# -- drawing -------------------------------------------------------------------------------------------------------------


@st.composite
def signatures(draw: st.DrawFn, head_sizes: Sequence[int], place: Place) -> Signature:
    """Every geometry, layout, dtype, option and plan: small ones on the CPU, for the interpreter's sake."""
    large = place.name == "gpu"
    sizes = strategies.up_to(1024 if large else 96, head_sizes)
    head_size = draw(sizes)
    num_kv_heads = draw(strategies.between(1, 3 if large else 2))
    longest = draw(st.one_of(st.just(1), strategies.between(2, 16), strategies.between(17, 90 if large else 20)))
    case = Case(
        query_lens=(),
        seq_lens=(),
        head_size=head_size,
        head_size_v=draw(st.one_of(st.none(), sizes)),
        num_kv_heads=num_kv_heads,
        queries_per_kv=draw(st.sampled_from((1, 2, 3, 4, 5, 7, 8, 16) if large else (1, 3, 4) if num_kv_heads == 1 else (1, 2))),
        block_size=draw(st.sampled_from((8, 16, 24, 32, 64, 128) if large else (8, 16, 24, 32))),
        dtype=draw(st.sampled_from(strategies.DTYPES)),
        layout=draw(st.sampled_from(LAYOUTS)),
        padding=draw(st.sampled_from((0, 4, 64, 1028))),
        rows=draw(st.sampled_from(ROWS)),
        **draw(strategies.options(())),  # type: ignore[arg-type]
    )
    plan = draw(st.sampled_from(("own", *PLANS)))
    most_keys = draw(st.sampled_from((40, 150, 700, 2300) if large else (10, 20, 40)))
    return Signature(
        case=case,
        num_seqs=draw(strategies.between(1, (2 if most_keys > 1000 else 9) if large else (2 if most_keys == 40 else 3))),
        longest=longest,
        most_keys=most_keys,
        uniform=draw(st.integers(0, 3)) == 3,
        num_ranges=max(0, draw(strategies.between(-5, 3))),
        hint=draw(st.sampled_from((1, 100_000))),
        plan=plan,
        segments=draw(st.sampled_from((2, 3, 16))) if plan == "segments" else 0,
    )


@st.composite
def scenarios(draw: st.DrawFn, signature: Signature) -> Scenario:
    """Scenarios of ``signature``."""
    longest = signature.longest
    least = longest if signature.uniform else 0
    most = max(signature.most_keys, least)
    lens = strategies.lengths(least, most, signature.case.block_size)
    seq_lens = tuple(draw(lens) for _ in range(signature.num_seqs))
    rows = [st.just(longest) if signature.uniform else st.one_of(st.just(min(1, n)), st.integers(0, min(n, longest))) for n in seq_lens]
    query_lens = tuple(draw(count) for count in rows)
    ranges = tuple(draw(strategies.ranges(n, signature.num_ranges, signature.num_ranges)) for n in seq_lens) if signature.num_ranges else ()
    case = replace(signature.case, query_lens=query_lens, seq_lens=seq_lens, mm_prefix=ranges, **draw(strategies.tables()))  # type: ignore[arg-type]
    return Scenario(
        case=case,
        seed=draw(st.integers(0, 2**20)),
        kinds=draw(_turns(strategies.KINDS)),
        query_kinds=draw(_turns(QUERY_KINDS)),
        damage=draw(_damage(case)) if draw(st.booleans()) else (),
        longest=longest,
        hint=signature.hint,
        plan=signature.plan,
        segments=signature.segments,
        padded=not signature.uniform,
        lost=draw(_lost(case)) if draw(st.integers(0, 3)) == 3 else None,
        parts=draw(st.sampled_from((1, 1, 1, 2))),
    )


def _turns(kinds: tuple[str, ...]) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(st.one_of(st.just("gaussian"), st.sampled_from(kinds)), min_size=1, max_size=5).map(tuple)


def _damage(case: Case) -> st.SearchStrategy[tuple[Damage, ...]]:
    keys, rows = sum(case.seq_lens), sum(case.query_lens)
    places = []
    if keys:
        places += [st.tuples(st.just(half), st.integers(0, keys - 1), st.integers(0, case.num_kv_heads - 1)) for half in ("key", "value")]
    if rows:
        places.append(st.tuples(st.just("q"), st.integers(0, rows - 1), st.integers(0, case.num_query_heads - 1)))
    if not places:
        return st.just(())
    one = st.tuples(st.one_of(places), st.sampled_from(BAD_VALUES))
    return st.lists(one.map(lambda drawn: Damage(*drawn[0], drawn[1])), min_size=1, max_size=3).map(tuple)


def _lost(case: Case) -> st.SearchStrategy[tuple[int, int, int] | None]:
    filled = [(seq, -(-n // case.block_size)) for seq, n in enumerate(case.seq_lens) if n]
    if not filled:
        return st.none()
    ids = st.sampled_from((-1, -(2**31), 2**31 - 1, 2**20))
    return st.one_of([st.tuples(st.just(seq), st.integers(0, columns - 1), ids) for seq, columns in filled])


def drawn(strategy: st.SearchStrategy[T], name: str) -> T:
    """The example of ``strategy`` that ``name`` stands for: the same in every process (of one version of hypothesis)."""
    found: list[T] = []
    for attempt in range(ATTEMPTS):
        _feed(strategy, found.append, f"{name}/{attempt}", None)
        if found:
            return found[0]
    raise ValueError(f"{name}: got {ATTEMPTS} examples that the strategy refused, need one")


def smallest(strategy: st.SearchStrategy[T], name: str, check: Callable[[T], None], seconds: float = 120) -> T:
    """The smallest example like the one that ``name`` stands for that ``check`` fails for, as hypothesis shrinks for so long."""
    seen: list[T] = []
    end = time.monotonic() + seconds

    def noting(example: T) -> None:
        if seen and time.monotonic() > end:
            return
        try:
            check(example)
        except Exception:
            seen.append(example)
            raise

    database = InMemoryExampleDatabase()
    with contextlib.suppress(Exception):
        _feed(strategy, noting, f"{name}/0", database)
    with contextlib.suppress(Exception):
        _checked(strategy, noting, database)()
    if not seen:
        raise ValueError(f"{name}: got an example that does not fail, need one that does")
    return seen[-1]


def _feed(strategy: st.SearchStrategy[T], check: Callable[[T], None], name: str, database: InMemoryExampleDatabase | None) -> None:
    _checked(strategy, check, database).hypothesis.fuzz_one_input(random.Random(name).randbytes(_RANDOM_BYTES))


def _checked(strategy: st.SearchStrategy[T], check: Callable[[T], None], database: InMemoryExampleDatabase | None) -> Any:
    """A test of hypothesis's that tries again what ``database`` holds, and shrinks it."""
    phases = (Phase.reuse, Phase.shrink)

    @settings(database=database, deadline=None, phases=phases, derandomize=False, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def run(example: T) -> None:
        check(example)

    return run
