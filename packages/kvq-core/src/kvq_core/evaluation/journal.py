"""Finished work in a JSON Lines file, from which a run that was interrupted goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from kvq_core import __version__
from kvq_core.environment import installed
from kvq_core.errors import ArgumentError

if TYPE_CHECKING:
    from kvq_core.evaluation.options import CacheConfig
    from kvq_core.evaluation.subject import Passage, Subject
    from kvq_core.evaluation.tasks.task import Item

_FORMAT: Final = "kvq_eval"
_VERSION: Final = 1


def identity_of(subject: Subject, calibration: Passage, chunk: int) -> dict[str, Any]:
    """What all records of a run depend on, beside the mode and the item, which :class:`Records` tells apart."""
    device = subject.device
    return {
        "kvq": __version__,
        **{name: installed(name) for name in ("triton", "transformers", "kvq-transformers")},
        "torch": torch.__version__,
        "model": subject.name,
        "weights": subject.fingerprint(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "chunk": chunk,
        "rows": str(subject.rows_dtype),
        "calibration": calibration.digest,
    }


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


class Records:
    """One mode's records of a task. ``items`` of the methods are read side by side.

    A mode is its label and its digest. Where items share a mean of their keys, an item is told apart by those beside it, too.
    """

    def __init__(self, journal: Journal, task: str, config: CacheConfig) -> None:
        self.journal, self.task, self.shares_mean = journal, task, config.shares_mean
        self.mode = f"{config.label} {config.digest}"

    def get(self, items: Sequence[Passage] | Sequence[Item]) -> list[dict[str, Any] | None]:
        """The record of each of ``items``, or ``None``."""
        return [self.journal.get(self.task, self.mode, name) for name in self._names(items)]

    def add(self, items: Sequence[Passage] | Sequence[Item], records: Sequence[Mapping[str, Any]]) -> None:
        """Keep a record of each of ``items``."""
        for name, record in zip(self._names(items), records, strict=True):
            self.journal.add(self.task, self.mode, name, record)

    def _names(self, items: Sequence[Passage] | Sequence[Item]) -> list[str]:
        digests = [item.digest for item in items]
        if not self.shares_mean:
            return digests
        together = sha256(" ".join(digests).encode()).hexdigest()[:16]
        return [f"{digest} in {together}" for digest in digests]
