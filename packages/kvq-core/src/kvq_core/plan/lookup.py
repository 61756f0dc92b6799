"""Which table is asked. In this order, until one has an entry for the class of problem:

1. a table of one's own for exactly this architecture, written by ``kvq tune``;
2. the table that kvq ships for exactly this architecture;
3. the one that it ships for the nearest of the same family (``sm_8x``, ``gfx94x``): the highest below, or else the lowest above;
4. ``generic.json``, which has an answer to everything.

Tables are read when an architecture is first asked for, and kept. A table of one's own that is wrong is an error at the first call on that
GPU, which names the file and the field: what was tuned and then silently ignored would be missed for months.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeVar, cast

from kvq_core import variables
from kvq_core.errors import PlanTableError
from kvq_core.plan.choices import Choice, Facts
from kvq_core.plan.table import GENERIC, Table

SWITCH: Final = "KVQ_PLANS"
"""A file, or a folder of files ``<arch>.json``, in place of the folder in the user's configuration; empty: no tables but kvq's own."""
SHIPPED: Final = Path(__file__).parent

C = TypeVar("C", bound=Choice)
Asked = tuple[str, Facts]
"""A kind, and the facts of what was to be planned."""


def own_folder() -> Path:
    """Where ``kvq tune`` writes and lookups read tables of one's own: ``kvq/plans`` in the user's configuration."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "kvq" / "plans"


def own_file(arch: str) -> Path | None:
    """The file of one's own table for ``arch``, whether or not it is there; ``None`` if the switch says that there is none.

    Raises:
        ArgumentError: the switch names something that does not exist.
    """
    if SWITCH not in os.environ:
        return own_folder() / f"{arch}.json"
    place = variables.place(SWITCH)
    return place / f"{arch}.json" if place is not None and place.is_dir() else place


def own_files() -> list[Path]:
    """All tables of one's own, for whichever architecture.

    Raises:
        ArgumentError: the switch names something that does not exist.
    """
    place = own_folder() if SWITCH not in os.environ else variables.place(SWITCH)
    return [] if place is None or not place.exists() else sorted(place.glob("*.json")) if place.is_dir() else [place]


class _Tables:
    def __init__(self) -> None:
        self._chains: dict[str, tuple[Table, ...]] = {}
        self._instead: tuple[Table, ...] = ()
        self.asked: list[Asked] | None = None

    def chain(self, arch: str) -> tuple[Table, ...]:
        chain = self._chains.get(arch)
        if chain is None:
            chain = self._chains[arch] = self._instead + _tables(arch)
        return chain

    @contextlib.contextmanager
    def first(self, table: Table) -> Iterator[None]:
        before = self._instead
        self._instead = (table, *before)
        self.forget()
        try:
            yield
        finally:
            self._instead = before
            self.forget()

    def forget(self) -> None:
        self._chains = {}


_TABLES = _Tables()


def _tables(arch: str) -> tuple[Table, ...]:
    """The tables for ``arch`` ("" for what is no GPU), in the order in which they are asked."""
    found = []
    own = own_file(arch) if arch else None
    if own is not None and own.exists():
        table = Table.read(own)
        if table.arch != arch:
            raise PlanTableError(str(own), "arch", table.arch, f"{arch!r}, that of this GPU (a folder may hold a table for each)")
        found.append(table)
    shipped = nearest(arch, [path.stem for path in SHIPPED.glob("*.json") if path.stem != GENERIC])
    return (*found, *map(_shipped, (*shipped, GENERIC)))


@functools.cache
def _shipped(arch: str) -> Table:
    return Table.read(SHIPPED / f"{arch}.json")


def nearest(arch: str, known: list[str]) -> list[str]:
    """``arch`` if it is known, and then the nearest of its family that is, if any."""
    exact = [arch] if arch in known else []
    family = re.fullmatch(r"((?:sm_|gfx)\w+)(\w)", arch)
    if family is None:
        return exact
    others = sorted(other for other in known if other != arch and other[:-1] == family[1])
    below = [other for other in others if other < arch]
    return [*exact, *(below[-1:] or others[:1])]


def tables_for(arch: str) -> tuple[Table, ...]:
    """The tables that are asked for plans on ``arch`` (``sm_90``, ``gfx942``, "" for what is no GPU), the first one first.

    Raises:
        PlanTableError: a table of one's own cannot be used.
    """
    return _TABLES.chain(arch)


def choose(arch: str, kind: type[C], facts: Facts) -> C:
    """What the first table with an entry for ``facts`` chooses. Pure, but for reading the tables the first time.

    Raises:
        PlanTableError: a table of one's own cannot be used.
    """
    if _TABLES.asked is not None:
        _TABLES.asked.append((kind.kind, facts))
    for table in _TABLES.chain(arch):
        entry = table.find(kind.kind, facts)
        if entry is not None:
            return cast(C, entry.choice)
    raise PlanTableError(str(SHIPPED / f"{GENERIC}.json"), kind.kind, dict(facts), "an entry for every problem")


def asking_first(table: Table) -> contextlib.AbstractContextManager[None]:
    """Within the block, ``table`` is asked before all others. For plans that are kept elsewhere:
    :func:`kvq_core.call.ops.planning_with`."""
    return _TABLES.first(table)


@contextlib.contextmanager
def listening() -> Iterator[list[Asked]]:
    """Yields the list to which every lookup within the block adds what it was asked."""
    asked: list[Asked] = []
    before, _TABLES.asked = _TABLES.asked, asked
    try:
        yield asked
    finally:
        _TABLES.asked = before


def forget() -> None:
    """Have the next lookup read the tables again."""
    _TABLES.forget()
