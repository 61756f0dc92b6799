"""What is chosen for each kind of kernel, which values it may have, and the facts that decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, ClassVar, Final

FORMAT_FACTS: Final[Mapping[str, type]] = MappingProxyType(
    {
        "variant": str,  # where ways do not tell kernels apart: int8, fp8, fp8_per_tensor; of writes of ordered keys "ordered"
        "ways": int,  # channels that share a lane: 8 of int2, 4 of int4, 2 of int8 and fp8, 1 of unpacked rows
        "width": int,  # channels of a head, K's or V's, padded to a power of two
    }
)
"""Facts that every kind of kernel is chosen by, and their types."""
_PLANE_FACTS: Final[Mapping[str, type]] = MappingProxyType(
    {
        **FORMAT_FACTS,
        "lane_bytes": int,  # of a lane; 4 is float32
        "scaled": bool,  # whether each row has a scale
        "side_bytes": bool,  # whether there is a byte beside each lane, which takes registers to unpack
    }
)

Fact = int | bool | str
Facts = Mapping[str, Fact]


@dataclass(frozen=True)
class Values:
    """The values that a field may have, in words and as a test."""

    words: str
    allow: Callable[[Any], bool]


def _whole(least: int, most: int) -> Values:
    return Values(f"a whole number from {least} to {most}", lambda x: type(x) is int and least <= x <= most)


def _power_of_two(least: int, most: int) -> Values:
    return Values(f"a power of two from {least} to {most}", lambda x: type(x) is int and least <= x <= most and x & (x - 1) == 0)


def _value(values: Values) -> Any:
    return field(metadata={"values": values})


_KEYS = _power_of_two(8, 256)
_WARPS = _power_of_two(1, 16)
_STAGES = _whole(1, 8)
_REGISTERS = Values("null or a whole number from 24 to 255", lambda x: x is None or (type(x) is int and 24 <= x <= 255))


@dataclass(frozen=True)
class Choice:
    """Base of the choices; :func:`of_kind` finds one by ``kind``, its name in tables."""

    kind: ClassVar[str]
    facts: ClassVar[Mapping[str, type]]

    @classmethod
    def values(cls) -> dict[str, Values]:
        """What each field may hold."""
        return {part.name: part.metadata["values"] for part in fields(cls)}

    def need(self) -> str:
        """What the fields, each of which is right, must be together, in words; "" if they are."""
        return ""


@dataclass(frozen=True)
class Decode(Choice):
    """Tiles of few query rows.

    ``stages``: Triton's, for which block ids are a level of loads: 2 to 4 keep one buffer of tiles, 5 two, 7 three.
    ``registers``: at most so many for a thread (CUDA), so that more programs fit a multiprocessor; ``None`` leaves it to the compiler.
    ``min_keys``: keys that a program of a split takes at least, and below which nothing is split.
    ``loops``: of a tile of single tokens; 2: a loop without masks takes the tiles of which every key counts, a second one the rest.
    """

    kind = "decode"
    facts = MappingProxyType(
        {
            **_PLANE_FACTS,
            "rows": int,  # of a tile: tokens x query heads of a group, a power of two
            "folded": bool,  # whether two keys share a row of lanes
            "apart": bool,  # whether something lies between the rows of a head's keys, as in token-major pages
            "keys_per_sm": int,  # that all sequences and kv heads have at most, on each multiprocessor; 0 for a batch-invariant call
            "longest": int,  # keys of the longest sequence at most; 0 for a batch-invariant call
        }
    )

    keys: int = _value(_KEYS)
    warps: int = _value(_WARPS)
    stages: int = _value(_STAGES)
    programs_per_sm: int = _value(_whole(1, 32))
    registers: int | None = _value(_REGISTERS)
    min_keys: int = _value(_whole(32, 8192))
    loops: int = _value(_whole(1, 2))


@dataclass(frozen=True)
class Prefill(Choice):
    """Tiles of many query rows, rows first. A group of more query heads than ``rows`` takes more."""

    kind = "prefill"
    facts = _PLANE_FACTS

    rows: int = _value(_power_of_two(16, 256))
    keys: int = _value(_KEYS)
    warps: int = _value(_WARPS)
    stages: int = _value(_STAGES)
    registers: int | None = _value(_REGISTERS)


@dataclass(frozen=True)
class Groups(Choice):
    """Whether warp groups take a call's query rows (:mod:`kvq_core.kernels.sm90`), where they can: then no tile is looked up.

    ``groups`` that multiply: 0; 1, which loads and unpacks as well, for a few rows and split keys; or 2 beside one that unpacks, for many.
    ``registers``: of each of their threads. ``stages``: tiles in shared memory, of which one group loads two ahead of the one in work.
    ``staged``: 1 for tiles that another launch unpacked (:mod:`kvq_core.kernels.staging`), which the other group then copies.
    """

    kind = "groups"
    facts = MappingProxyType(
        {
            **FORMAT_FACTS,
            "rows": int,  # tokens x query heads of a group of the longest query
            "stageable": bool,  # whether tiles can be staged; what finds no room for them is asked for again, without
        }
    )

    groups: int = _value(_whole(0, 2))
    stages: int = _value(_whole(1, 6))
    registers: int = _value(Values("a multiple of 8 from 152 to 248", lambda x: type(x) is int and 152 <= x <= 248 and x % 8 == 0))
    staged: int = _value(_whole(0, 1))

    def need(self) -> str:
        if self.staged and self.groups != 2:
            return "groups 2 with staged 1"
        # Of no groups it means nothing.
        least, most = ((1, 6), (3, 6), (1, 3))[self.groups]
        return "" if least <= self.stages <= most else f"{least} to {most} stages with groups {self.groups}"


@dataclass(frozen=True)
class Write(Choice):
    """``rows`` (token, head) rows of a write program.

    ``store_mma``: 1 for the mode's kernel that rotates them in the tensor cores' own layout (:mod:`kvq_core.kernels.sm90.store_mma`), if
    it can take them.
    """

    kind = "write"
    facts = MappingProxyType(
        {
            **FORMAT_FACTS,
            "rows": int,  # of the call: tokens x kv heads
            "side_bytes": bool,  # whether there is a byte beside each lane
            "store_mma": bool,  # whether such a kernel can take them
        }
    )

    rows: int = _value(_power_of_two(4, 128))
    warps: int = _value(_WARPS)
    store_mma: int = _value(_whole(0, 1))

    def need(self) -> str:
        # A product has 16 rows, and half of them are other channels of the same.
        return "8 or 16 rows a warp with store_mma 1" if self.store_mma and self.rows not in (8 * self.warps, 16 * self.warps) else ""


@dataclass(frozen=True)
class Combine(Choice):
    """Eight rows together up to ``few`` splits; of more, ``splits`` of a row are loaded together, by a program for ``blocks`` such rows.

    ``slices`` programs share a row's channels, or fewer where they cannot.
    """

    kind = "combine"
    facts = MappingProxyType(
        {
            **FORMAT_FACTS,
            "rows_per_sm": int,  # rows to combine for each multiprocessor, rounded up
            "splits": int,  # that a row can be in, on average, rounded up to a power of two
        }
    )

    few: int = _value(_whole(1, 64))
    splits: int = _value(_power_of_two(16, 512))
    blocks: int = _value(_power_of_two(1, 128))
    slices: int = _value(_power_of_two(1, 8))
    warps: int = _value(_WARPS)


KINDS: Final[Mapping[str, type[Choice]]] = MappingProxyType({kind.kind: kind for kind in (Decode, Prefill, Groups, Write, Combine)})
"""The choices by their names in tables."""
