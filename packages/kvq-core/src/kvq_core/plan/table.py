"""A table of launch plans: for each kind of kernel an ordered list of classes of problems with what is chosen for them, and why.

A file is JSON::

    {"format": 1, "arch": "sm_90",
     "runs": {"92ed51f": {"gpu": "NVIDIA H200", "triton": "3.6.0", "commit": "92ed51f", "date": "2026-11-21"}},
     "decode": [
      {"where": {"ways": 4, "width": {"max": 128}, "rows": {"max": 16}},
       "choice": {"keys": 64, "warps": 1, "stages": 2, "programs_per_sm": 12, "registers": 168, "min_keys": 128, "loops": 1},
       "measured": [
        {"run": "92ed51f", "mode": "int4_per_token_head", "setting": "A", "us": 167.9,
         "alternatives": [{"choice": {"registers": null, "programs_per_sm": 8}, "us": 189}]}]}]}

The first entry of a kind whose ``where`` holds is taken. A fact that ``where`` leaves out may be anything; ``{"min": a, "max": b}`` are
bounds, both included, either of which may be left out. ``measured`` may be empty: not measured. ``arch`` may be ``generic``: any.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn, cast

from kvq_core.errors import PlanTableError
from kvq_core.plan.choices import KINDS, Choice, Fact, Facts

FORMAT: Final = 1
GENERIC: Final = "generic"
UNITS: Final = ("us", "tflops")
"""A measurement has one of them: microseconds (less is better) or TFLOP/s."""


@dataclass(frozen=True)
class Range:
    """A condition: from ``least`` to ``most``, both included; ``None``: no bound."""

    least: int | None = None
    most: int | None = None

    def holds(self, fact: Fact) -> bool:
        return (self.least is None or fact >= self.least) and (self.most is None or fact <= self.most)  # type: ignore[operator]


Where = Mapping[str, Fact | Range]


@dataclass(frozen=True)
class Run:
    """The circumstances of measurements."""

    gpu: str
    triton: str
    commit: str
    date: str


@dataclass(frozen=True)
class Alternative:
    """What else was measured: the fields in which it differs from the choice, and its figure in the measurement's unit."""

    choice: Mapping[str, Any]
    value: float


@dataclass(frozen=True)
class Measurement:
    """A choice's figure in one setting of the benchmarks, with ``unit`` one of :data:`UNITS`, and those of what it was chosen from."""

    run: str
    mode: str
    setting: str
    value: float
    unit: str = "us"
    alternatives: tuple[Alternative, ...] = ()


@dataclass(frozen=True)
class Entry:
    """A class of problems, what is chosen for it, and what that was seen to cost."""

    where: Where
    choice: Choice
    measured: tuple[Measurement, ...] = ()

    def holds(self, facts: Facts) -> bool:
        return all(c.holds(facts[name]) if isinstance(c, Range) else facts[name] == c for name, c in self.where.items())


@dataclass(frozen=True)
class Table:
    """The entries of one architecture by kind, in the order in which they are asked. ``source``: the file, for messages."""

    arch: str
    entries: Mapping[str, tuple[Entry, ...]]
    runs: Mapping[str, Run] = field(default_factory=dict)
    source: str = ""

    def find(self, kind: str, facts: Facts) -> Entry | None:
        """The first entry of ``kind`` that holds for ``facts``."""
        return next((entry for entry in self.entries.get(kind, ()) if entry.holds(facts)), None)

    @classmethod
    def read(cls, path: Path) -> Table:
        """Read and check the file ``path``.

        Raises:
            PlanTableError: it cannot be read, is no JSON, or a field of it is wrong; the message names the file and the field.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as problem:
            raise PlanTableError(str(path), "the file", problem.strerror or str(problem), "a table of launch plans") from problem
        except RecursionError as problem:
            raise PlanTableError(str(path), "the file", "something nested too deep", "a table of launch plans") from problem
        except ValueError as problem:
            raise PlanTableError(str(path), "the file", str(problem), "JSON") from problem
        return _Reader(str(path)).table(content)

    def with_entries(self, fresh: Mapping[str, Sequence[Entry]], runs: Mapping[str, Run]) -> Table:
        """This table with ``fresh`` entries, each in place of that of the same class if there is one; new classes are asked first."""
        entries = {}
        for kind in KINDS:
            old, new = list(self.entries.get(kind, ())), []
            for entry in fresh.get(kind, ()):
                place = next((i for i, known in enumerate(old) if known.where == entry.where), None)
                if place is None:
                    new.append(entry)
                else:
                    old[place] = entry
            entries[kind] = (*new, *old)
        used = {one.run for kind in KINDS for entry in entries[kind] for one in entry.measured}
        return Table(self.arch, entries, {name: run for name, run in {**self.runs, **runs}.items() if name in used}, self.source)

    def write(self, path: Path) -> None:
        """Write the file ``path``, a line for each class, choice and measurement, so that a change reads well as a diff."""
        runs = ",\n".join(f"  {json.dumps(name)}: {json.dumps(asdict(run))}" for name, run in self.runs.items())
        head = f'{{"format": {FORMAT}, "arch": {json.dumps(self.arch)}, "runs": {{\n{runs}\n }}'.replace("{\n\n }", "{}")
        kinds = (f' "{kind}": [\n' + ",\n".join(map(_as_text, entries)) + "]" for kind, entries in self.entries.items() if entries)
        path.write_text(",\n".join([head, *kinds]) + "}\n", encoding="utf-8")


def _as_text(entry: Entry) -> str:
    where = {name: _bounds(c) if isinstance(c, Range) else c for name, c in entry.where.items()}
    measured = ",\n".join("    " + json.dumps(_measured(one)) for one in entry.measured)
    inside = f"\n{measured}" if measured else ""
    return f'  {{"where": {json.dumps(where)},\n   "choice": {json.dumps(asdict(entry.choice))},\n   "measured": [{inside}]}}'


def _bounds(condition: Range) -> dict[str, int]:
    return {name: bound for name, bound in (("min", condition.least), ("max", condition.most)) if bound is not None}


def _measured(one: Measurement) -> dict[str, Any]:
    known = {"run": one.run, "mode": one.mode, "setting": one.setting, one.unit: one.value}
    alternatives = [{"choice": dict(other.choice), one.unit: other.value} for other in one.alternatives]
    return known | ({"alternatives": alternatives} if alternatives else {})


class _Reader:
    """Checks a table's content from the top down; the first thing wrong ends it."""

    def __init__(self, source: str) -> None:
        self.source = source

    def table(self, content: Any) -> Table:
        self._object("the file", content, {"format", "arch"}, {"runs", *KINDS})
        if type(content["format"]) is not int or content["format"] != FORMAT:
            self._refuse("format", content["format"], f"{FORMAT}, the format that this version of kvq reads (kvq tune writes it)")
        arch = self._text("arch", content["arch"])
        runs = {}
        for name, run in self._object("runs", content.get("runs", {})).items():
            self._object(f"runs.{name}", run, set(Run.__annotations__))
            runs[name] = Run(**{part: self._text(f"runs.{name}.{part}", text) for part, text in run.items()})
        entries = {}
        for kind in KINDS:
            listed = self._list(kind, content.get(kind, []))
            entries[kind] = tuple(self._entry(f"{kind}[{i}]", KINDS[kind], one, runs) for i, one in enumerate(listed))
        return Table(arch, entries, runs, self.source)

    def _entry(self, at: str, kind: type[Choice], content: Any, runs: Mapping[str, Run]) -> Entry:
        self._object(at, content, {"where", "choice"}, {"measured"})
        where = self._object(f"{at}.where", content["where"], set(), set(kind.facts))
        conditions = {name: self._condition(f"{at}.where.{name}", kind.facts[name], c) for name, c in where.items()}
        choice = self._object(f"{at}.choice", content["choice"], set(kind.values()))
        self._fields(f"{at}.choice", kind, choice)
        chosen = kind(**choice)
        if chosen.need():
            self._refuse(f"{at}.choice", choice, chosen.need())
        listed = self._list(f"{at}.measured", content.get("measured", []))
        measured = tuple(self._measurement(f"{at}.measured[{i}]", kind, one, runs) for i, one in enumerate(listed))
        return Entry(conditions, chosen, measured)

    def _condition(self, at: str, kind: type, content: Any) -> Fact | Range:
        if kind is int and isinstance(content, dict):
            self._object(at, content, set(), {"min", "max"})
            for name, bound in content.items():
                if type(bound) is not int:
                    self._refuse(f"{at}.{name}", bound, "a whole number")
            found = Range(content.get("min"), content.get("max"))
            if found == Range() or (found.least is not None and found.most is not None and found.least > found.most):
                self._refuse(at, content, "bounds min and max, or one of them, between which something lies")
            return found
        if type(content) is not kind:
            need = {int: "a whole number, or its bounds {min, max}", bool: "true or false", str: "text"}[kind]
            self._refuse(at, content, need)
        return cast(Fact, content)

    def _fields(self, at: str, kind: type[Choice], content: Mapping[str, Any]) -> None:
        for name, value in content.items():
            allowed = kind.values()[name]
            if not allowed.allow(value):
                self._refuse(f"{at}.{name}", value, allowed.words)

    def _measurement(self, at: str, kind: type[Choice], content: Any, runs: Mapping[str, Run]) -> Measurement:
        unit = next((name for name in UNITS if isinstance(content, dict) and name in content), UNITS[0])
        self._object(at, content, {"run", "mode", "setting", unit}, {"alternatives"})
        if content["run"] not in runs:
            self._refuse(f"{at}.run", content["run"], f"one of runs: {', '.join(runs) or 'there are none'}")
        alternatives = []
        for i, other in enumerate(self._list(f"{at}.alternatives", content.get("alternatives", []))):
            there = f"{at}.alternatives[{i}]"
            self._object(there, other, {"choice", unit})
            self._fields(f"{there}.choice", kind, self._object(f"{there}.choice", other["choice"], set(), set(kind.values())))
            alternatives.append(Alternative(other["choice"], self._figure(f"{there}.{unit}", other[unit])))
        mode, setting = (self._text(f"{at}.{name}", content[name]) for name in ("mode", "setting"))
        return Measurement(content["run"], mode, setting, self._figure(f"{at}.{unit}", content[unit]), unit, tuple(alternatives))

    def _object(self, at: str, content: Any, required: set[str] | None = None, optional: set[str] | None = None) -> dict[str, Any]:
        if not isinstance(content, dict):
            self._refuse(at, content, "an object")
        if required is not None:
            known = required | (optional or set())
            for name in content:
                if name not in known:
                    self._refuse(f"{at}.{name}", content[name], f"one of {', '.join(sorted(known))} in its place")
            for name in sorted(required - content.keys()):
                self._refuse(f"{at}.{name}", None, "a value: it is missing")
        return content

    def _list(self, at: str, content: Any) -> list[Any]:
        if not isinstance(content, list):
            self._refuse(at, content, "a list")
        return content

    def _text(self, at: str, content: Any) -> str:
        if not isinstance(content, str) or not content:
            self._refuse(at, content, "text")
        return content

    def _figure(self, at: str, content: Any) -> float:
        if isinstance(content, bool) or not isinstance(content, int | float) or not 0 < content < 1e12:
            self._refuse(at, content, "a positive number")
        return content

    def _refuse(self, at: str, got: Any, need: str) -> NoReturn:
        raise PlanTableError(self.source, at.removeprefix("the file."), got, need)
