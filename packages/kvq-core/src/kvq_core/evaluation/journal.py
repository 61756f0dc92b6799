"""Finished work in a JSON Lines file, from which a run that was interrupted goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvq_core.errors import ArgumentError

_FORMAT: Final = "kvq_eval"
_VERSION: Final = 1


class Journal:
    """What was found for each (task, mode, item). The file's first line says which run it belongs to: all of ``facts`` must agree.

    Each record is on disk before :meth:`add` returns. A last line that was cut off is dropped. ``path`` None: in memory only.

    Raises:
        ArgumentError: the file is another run's, or no journal.
    """

    def __init__(self, path: Path | None = None, facts: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self._found: dict[tuple[str, str, str], dict[str, Any]] = {}
        if path is not None:
            self._begin(path, {_FORMAT: _VERSION, **(facts or {})})

    def __len__(self) -> int:
        return len(self._found)

    def get(self, task: str, mode: str, item: str) -> dict[str, Any] | None:
        """The record, or ``None``."""
        return self._found.get((task, mode, item))

    def add(self, task: str, mode: str, item: str, record: Mapping[str, Any]) -> None:
        """Keep ``record``, of plain JSON values."""
        self._found[task, mode, item] = dict(record)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"task": task, "mode": mode, "item": item, **record}) + "\n")

    def _begin(self, path: Path, facts: dict[str, Any]) -> None:
        header = (json.dumps(facts) + "\n").encode()
        whole = path.read_bytes() if path.exists() else b""
        kept = whole[: whole.rfind(b"\n") + 1]
        try:
            first, *lines = [json.loads(line) for line in kept.decode("utf-8").splitlines()] or [None]
            found = {(r.pop("task"), r.pop("mode"), r.pop("item")): r for r in lines}
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as cause:
            raise ArgumentError("--resume", f"{path}: {type(cause).__name__}: {cause}", "a file that --resume wrote") from cause
        if first is None:
            if not header.startswith(whole):
                raise ArgumentError("--resume", f"{path}: no line of its own", "a file that --resume wrote, or a new one")
            path.write_bytes(header)
            return
        if not isinstance(first, dict) or _FORMAT not in first:
            raise ArgumentError("--resume", f"{path}: no line of its own", "a file that --resume wrote, or a new one")
        other = [name for name in facts if first.get(name) != facts[name]]
        if other:
            differences = "; ".join(f"{name} {first.get(name)!r}, now {facts[name]!r}" for name in other)
            raise ArgumentError("--resume", f"{path}, of another run: {differences}", "the same run, or a new file")
        if len(kept) < len(whole):
            with path.open("r+b") as file:
                file.truncate(len(kept))
        self._found = found
