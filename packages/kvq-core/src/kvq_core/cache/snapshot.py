"""A cache in a file: its raw buffers and bookkeeping as safetensors, with a JSON header under the metadata key ``kvq``.

Each tensor's CRC-32 stands in the header, and one of what the header says, since safetensors itself notices a truncated file but not a
changed byte.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

import torch

from kvq_core.cache import tensorfile
from kvq_core.cache.layout import Geometry
from kvq_core.cache.tensorfile import TensorFile
from kvq_core.call.spec import FLOATS
from kvq_core.smoothing.calibration import FIRST_PREFILL, ModelSmoothing, tensor_dtype

FORMAT_VERSION: Final = 1
SMOOTHED_VERSION: Final = 2
"""Of snapshots whose keys are smoothed: who only knows the first version must not take them for the keys themselves."""
RESIDUAL_VERSION: Final = 3
"""Of snapshots with exact rows of a residual window, smoothed or not."""
WAITING_VERSION: Final = 4
"""Of snapshots with layers that wait for the keys to find their smoothing in, with exact rows or without."""
_KEY: Final = "kvq"
_DTYPES: Final = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}
_CHECKED: Final = ("mode", "geometry", "next_id", "smoothing", "checksums")
"""What of the header its own checksum is of: all that the bytes' meaning depends on."""
_RESIDUAL: Final = ("residual_length", "sink_tokens", "max_sequences")
"""Counts among what a header says of exact rows."""
_LARGEST_ID: Final = 2**62


@dataclass(frozen=True)
class Header:
    """What a snapshot says about itself. ``packages`` are the versions that wrote it, for the reader's information."""

    mode: str
    packages: dict[str, str]
    geometry: Geometry
    next_id: int
    smoothing: str | None = None
    """The fingerprint of what keys were smoothed with."""
    residual: dict[str, Any] | None = None
    """``residual_length``, ``sink_tokens``, ``max_sequences`` and ``residual_mode``, if exact rows are kept."""
    waiting: str | None = None
    """How layers without a smoothing find theirs: :data:`FIRST_PREFILL`; ``None``: not at all."""

    def to_json(self, checksums: Mapping[str, int]) -> str:
        geometry = asdict(self.geometry) | {"dtype": str(self.geometry.dtype).removeprefix("torch.")}
        stated = dict(zip(_CHECKED, (self.mode, geometry, self.next_id, self.smoothing, dict(checksums)), strict=True))
        version = SMOOTHED_VERSION if self.smoothing else FORMAT_VERSION
        if self.residual is not None:
            stated["residual"], version = self.residual, RESIDUAL_VERSION
        if self.waiting is not None:
            stated["waiting"], version = self.waiting, WAITING_VERSION
        return json.dumps({"format_version": version, "packages": self.packages, **stated, "checksum": _checksum(stated)})


def save(path: str | os.PathLike[str], header: Header, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a snapshot, atomically: a reader of ``path`` finds the old file or the whole new one."""
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    checksums = {name: tensorfile.checksum(tensor) for name, tensor in stored.items()}
    tensorfile.write(path, stored, {_KEY: header.to_json(checksums)})


class Snapshot:
    """An open snapshot: its :class:`Header`, and its tensors, each checked as it is read."""

    def __init__(self, file: TensorFile) -> None:
        self._file, self.error = file, file.error
        self.header, self._checksums = self._read_header()

    def expect(self, name: str, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> None:
        """Raise :class:`SnapshotError` unless tensor ``name`` is there, of that dtype and shape (``None``: any one-dimensional)."""
        entry = self._file.entries.get(name)
        if entry is None:
            raise self.error(f"tensor {name!r} is missing")
        wanted = tensorfile.name_of(dtype)
        if (len(entry.shape) != 1 if shape is None else entry.shape != shape) or entry.dtype != wanted:
            raise self.error(f"tensor {name!r} is {entry.dtype} {entry.shape}, but the header asks for {wanted} {shape or '[n]'}")

    def fill(self, name: str, target: torch.Tensor) -> None:
        """Read a tensor that was expected as ``target`` is; :class:`SnapshotError` if its bytes are not those that were saved."""
        if self._file.read_into(name, target) != self._checksums.get(name):
            raise self.error(f"tensor {name!r} is damaged: its checksum differs from the header's")

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of any shape, on the CPU, as :meth:`fill` reads it."""
        found = self._file.empty(name, dtype)
        self.fill(name, found)
        return found

    def smoothing(self, wanted: ModelSmoothing | None) -> ModelSmoothing | None:
        """What the keys in it are smoothed with.

        Raises:
            SnapshotError: it is not ``wanted``, if that is given, or not what the header says.
        """
        held = self.header.smoothing
        if wanted is not None and wanted.fingerprint != held:
            raise self.error(f"its keys are smoothed with {held or 'nothing'}, not with {wanted.fingerprint} as asked for")
        if held is None:
            return None
        names = [name for name in self._file.entries if name.startswith("smoothing.")]
        found = ModelSmoothing.of_tensors({name: self.tensor(name, tensor_dtype(name)) for name in names})
        if found.fingerprint != held:
            raise self.error("its smoothing is not the one that its header names")
        return found

    def _read_header(self) -> tuple[Header, dict[str, int]]:
        text = self._file.metadata.get(_KEY)
        if text is None:
            raise self.error("no kvq header: not a saved PagedKVCache")
        try:
            raw = tensorfile.parse_json(text)
            version = raw["format_version"]
        except (ValueError, KeyError, TypeError) as cause:
            raise self.error("its kvq header is damaged") from cause
        if type(version) is not int or not FORMAT_VERSION <= version <= WAITING_VERSION:
            raise self.error(f"it has format version {version!r}, this kvq reads versions {FORMAT_VERSION} to {WAITING_VERSION}")
        try:
            stored = {field.name: raw["geometry"][field.name] for field in fields(Geometry)}
            geometry = Geometry(**stored | {"dtype": _DTYPES[stored["dtype"]]})
            checksums = dict(raw["checksums"])
            smoothing = None if version != SMOOTHED_VERSION and raw.get("smoothing") is None else str(raw["smoothing"])
            residual = waiting = None
            if version == RESIDUAL_VERSION or (version == WAITING_VERSION and "residual" in raw):
                rows = raw["residual"]
                residual = {name: _count(rows[name]) for name in _RESIDUAL} | {"residual_mode": _text(rows["residual_mode"])}
            if version == WAITING_VERSION and (waiting := raw["waiting"]) != FIRST_PREFILL:
                raise ValueError(f"waiting {waiting!r}")
            packages = {name: _text(package) for name, package in raw["packages"].items()}
            next_id = raw["next_id"]
            if type(next_id) is not int or not 0 <= next_id <= _LARGEST_ID:
                raise ValueError(f"next_id {next_id!r}")
            stated = {name: raw.get(name) for name in _CHECKED}
            stated |= {name: raw[name] for name, found in (("residual", residual), ("waiting", waiting)) if found is not None}
            self._intact = "checksum" not in raw or raw["checksum"] == _checksum(stated)
            return Header(_text(raw["mode"]), packages, geometry, next_id, smoothing, residual, waiting), checksums
        except (ValueError, KeyError, TypeError, AttributeError) as cause:
            raise self.error(f"its kvq header is damaged: {type(cause).__name__} {cause}") from cause

    def check_header(self) -> None:
        """Raise :class:`SnapshotError` if the header is not as it was written. Last: what is wrong with it in detail says more."""
        if not self._intact:
            raise self.error("its kvq header is damaged: its checksum differs")


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[Snapshot]:
    """Open a snapshot to read. Damage is a :class:`SnapshotError`, a file that cannot be read an :class:`OSError`."""
    with tensorfile.opened(path) as file:
        yield Snapshot(file)


def _checksum(stated: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(stated, sort_keys=True).encode())


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no string")
    return value
