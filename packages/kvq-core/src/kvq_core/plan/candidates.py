"""What ``kvq tune`` tries for a class of problems, and which classes there are: bounded lists, so that a run has an end."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

from kvq_core.plan.choices import KINDS, Choice, Combine, Decode, Facts, Groups, Prefill, Write
from kvq_core.plan.table import Range, Where

Axis = tuple[Mapping[str, Any], ...]
"""Settings of one or more fields that belong together, of which one is taken."""


def _axis(*names: str, of: tuple[Any, ...]) -> Axis:
    return tuple(MappingProxyType(dict(zip(names, values if len(names) > 1 else (values,), strict=True))) for values in of)


_RESIDENCY = _axis(
    "warps",
    "registers",
    "programs_per_sm",
    # A quarter of a multiprocessor's 65,536 registers holds two one-warp programs of up to 255 a thread, three of 168, four of 128.
    of=((1, None, 8), (1, 168, 12), (1, 128, 16), (2, None, 4), (2, 168, 6), (4, None, 2), (4, None, 4)),
)
_COMBINING = _axis("few", "blocks", of=((1, 1), (4, 8), (8, 1), (8, 8), (8, 64)))
_TILES: Final = (32, 64, 128)
# A warp has 8 rows or 16. Beside them, what else writes well.
_FRAGMENTS = _axis(
    "rows", "warps", "store_mma", of=((8, 1, 0), (16, 1, 0), *((rows * warps, warps, 1) for rows in (8, 16) for warps in (1, 2, 4)))
)
# Without groups, registers are nobody's.
_GROUPS = _axis("groups", "registers", of=((0, 184), (2, 168), (2, 176), (2, 184), (2, 192), (2, 200)))
# One group, with as many registers as two programs leave it, or three.
_MULTIROW = _axis("groups", "registers", of=((0, 184), (1, 168), (1, 248)))
# Five stages are a second buffer of tiles, which only the loop without masks leaves registers for.
_BUFFERS = _axis("stages", "loops", of=((2, 1), (5, 2)))
_CROSSED: Final[Mapping[type[Choice], tuple[Axis, ...]]] = {
    Decode: (_axis("keys", of=(16, *_TILES)), _RESIDENCY, _BUFFERS),
    Prefill: (_axis("rows", of=_TILES), _axis("keys", of=_TILES), _axis("warps", of=(4, 8)), _axis("stages", of=(2, 3))),
    Groups: (_GROUPS,),
    Write: (_axis("rows", of=(4, 8, 16, 32, 64)), _axis("warps", of=(1, 2, 4))),
    Combine: (_COMBINING, _axis("splits", of=(32, 64, 128, 256)), _axis("warps", of=(4, 8))),
}
"""Every combination of these is tried, with the other fields as they are."""
_ALONE: Final[Mapping[type[Choice], tuple[Axis, ...]]] = {
    Decode: (_axis("min_keys", of=(32, 64, 128, 256)), _axis("loops", of=(1, 2)), _axis("stages", of=(7,))),
    Prefill: (_axis("stages", of=(1, 4)), _axis("registers", of=(None, 128, 168))),
    Groups: (),
    Write: (),
    Combine: (_axis("slices", of=(1, 2, 4, 8)),),
}
"""These are tried one at a time, with all other fields as they are."""

_BOUNDS: Final[Mapping[str, Mapping[str, tuple[int, ...]]]] = {
    "decode": {
        "width": (64, 128, 256, 512),
        "rows": (8, 16, 32, 64),
        "keys_per_sm": (15, 63, 511, 1023, 4095, 16383, 131071),
        "longest": (512,),
    },
    "prefill": {"width": (64, 128, 256, 512)},
    "groups": {"width": (64, 128, 256, 512), "rows": (16, 64, 255)},
    "write": {"width": (64, 128, 256, 512), "rows": (64, 1024, 2048, 8191, 16383, 49151)},
    "combine": {"width": (64, 128, 256, 512), "rows_per_sm": (4, 16, 64), "splits": (1, 32, 64)},
}
"""Where a class ends and the next begins, each bound the last of its class. Other facts are a class for each value."""


def candidates(present: Choice, *, quick: bool = False) -> list[Choice]:
    """``present`` first, and what to try beside it, each once. ``quick``: only what differs from it along one axis."""
    crossed, alone = _CROSSED[type(present)], _ALONE[type(present)]
    if isinstance(present, Groups) and present.groups == 1:
        crossed, alone = (_MULTIROW,), (_axis("stages", of=(3, 4, 5)),)
    if isinstance(present, Write) and present.store_mma:
        crossed = (_FRAGMENTS,)
    found = {present: None}
    if not quick:
        for together in itertools.product(*crossed):
            found[replace(present, **{name: value for part in together for name, value in part.items()})] = None
    for axis in (*crossed, *alone) if quick else alone:
        found.update({replace(present, **part): None for part in axis})
    return list(found)


def class_of(kind: str, facts: Facts) -> Where:
    """The class of problems that one with ``facts`` stands for, as a table's ``where``."""
    bounds = _BOUNDS[kind]
    return {name: _between(facts[name], bounds[name]) if name in bounds else facts[name] for name in KINDS[kind].facts}


def _between(fact: Any, bounds: tuple[int, ...]) -> Range:
    below = [bound for bound in bounds if bound < fact]
    above = [bound for bound in bounds if bound >= fact]
    return Range(below[-1] + 1 if below else None, above[0] if above else None)
