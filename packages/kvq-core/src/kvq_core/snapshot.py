"""A cache in a file: its raw buffers and bookkeeping as safetensors, with a JSON header under the metadata key ``kvq``.

The file appears under its name only when it is complete. Each tensor's CRC-32 stands in the header, since safetensors itself notices a
truncated file but not a changed byte.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvq_core.calibration import ModelSmoothing
from kvq_core.errors import SnapshotError
from kvq_core.layout import Geometry
from kvq_core.spec import FLOATS

FORMAT_VERSION: Final = 1
SMOOTHED_VERSION: Final = 2
"""Of snapshots whose keys are smoothed: who only knows the first version must not take them for the keys themselves."""
_KEY: Final = "kvq"
_DTYPES: Final = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}
_ON_DISK: Final = {torch.uint8: "U8", torch.int32: "I32", torch.int64: "I64", torch.float32: "F32"}


@dataclass(frozen=True)
class Header:
    """What a snapshot says about itself. ``packages`` are the versions that wrote it, for the reader's information."""

    mode: str
    packages: dict[str, str]
    geometry: Geometry
    next_id: int
    smoothing: str | None = None
    """The fingerprint of what keys were smoothed with."""

    def to_json(self, checksums: Mapping[str, int]) -> str:
        geometry = asdict(self.geometry) | {"dtype": str(self.geometry.dtype).removeprefix("torch.")}
        return json.dumps(
            {
                "format_version": SMOOTHED_VERSION if self.smoothing else FORMAT_VERSION,
                "mode": self.mode,
                "packages": self.packages,
                "geometry": geometry,
                "next_id": self.next_id,
                "smoothing": self.smoothing,
                "checksums": dict(checksums),
            }
        )


def save(path: str | os.PathLike[str], header: Header, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a snapshot, atomically: a reader of ``path`` finds the old file or the whole new one."""
    target = Path(path)
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    checksums = {name: _checksum(tensor) for name, tensor in stored.items()}
    part = target.with_name(f".{target.name}.{os.getpid()}.{os.urandom(4).hex()}.part")
    try:
        save_file(stored, part, metadata={_KEY: header.to_json(checksums)})
        with open(part, "rb") as written:
            os.fsync(written.fileno())
        os.replace(part, target)
    except SafetensorError as cause:
        raise OSError(f"cannot write {target}: {cause}") from cause
    finally:
        with suppress(FileNotFoundError):
            os.unlink(part)


class Snapshot:
    """An open snapshot: its :class:`Header`, and its tensors, each checked as it is read."""

    def __init__(self, path: Path, file: Any) -> None:
        self._path, self._file = path, file
        self._names = frozenset(file.keys())
        self.header, self._checksums = self._read_header()

    def error(self, what: str) -> SnapshotError:
        """The error to raise about this file."""
        return SnapshotError(f"{self._path}: {what}")

    def expect(self, name: str, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> None:
        """Raise :class:`SnapshotError` unless tensor ``name`` is there, of that dtype and shape (``None``: any one-dimensional)."""
        if name not in self._names:
            raise self.error(f"tensor {name!r} is missing")
        entry = self._file.get_slice(name)
        got, kind = tuple(entry.get_shape()), entry.get_dtype()
        if (len(got) != 1 if shape is None else got != shape) or kind != _ON_DISK[dtype]:
            raise self.error(f"tensor {name!r} is {kind} {got}, but the header asks for {_ON_DISK[dtype]} {shape or '[n]'}")

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, or :class:`SnapshotError` if its bytes are not those that were saved."""
        loaded: torch.Tensor = self._file.get_tensor(name)
        if _checksum(loaded) != self._checksums.get(name):
            raise self.error(f"tensor {name!r} is damaged: its checksum differs from the header's")
        return loaded

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
        found = ModelSmoothing.of_tensors({name: self.tensor(name) for name in self._names if name.startswith("smoothing.")})
        if found.fingerprint != held:
            raise self.error("its smoothing is not the one that its header names")
        return found

    def _read_header(self) -> tuple[Header, dict[str, int]]:
        text = (self._file.metadata() or {}).get(_KEY)
        if text is None:
            raise self.error("no kvq header: not a saved PagedKVCache")
        try:
            raw = json.loads(text)
            version = raw["format_version"]
        except (ValueError, KeyError, TypeError) as cause:
            raise self.error("its kvq header is damaged") from cause
        if version not in (FORMAT_VERSION, SMOOTHED_VERSION):
            raise self.error(f"it has format version {version!r}, this kvq reads versions {FORMAT_VERSION} and {SMOOTHED_VERSION}")
        try:
            stored = {field.name: raw["geometry"][field.name] for field in fields(Geometry)}
            geometry = Geometry(**stored | {"dtype": _DTYPES[stored["dtype"]]})
            checksums = {str(name): int(value) for name, value in raw["checksums"].items()}
            smoothing = str(raw["smoothing"]) if version == SMOOTHED_VERSION else None
            return Header(str(raw["mode"]), dict(raw["packages"]), geometry, int(raw["next_id"]), smoothing), checksums
        except (ValueError, KeyError, TypeError, AttributeError) as cause:
            raise self.error(f"its kvq header is damaged: {type(cause).__name__} {cause}") from cause


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[Snapshot]:
    """Open a snapshot to read. Damage becomes :class:`SnapshotError`; a file that is not there stays a :class:`FileNotFoundError`."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield Snapshot(Path(path), file)
    except SafetensorError as cause:
        raise SnapshotError(f"{os.fspath(path)}: damaged, or no safetensors file: {cause}") from cause


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data)
