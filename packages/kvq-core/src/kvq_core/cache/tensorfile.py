"""safetensors files, read and written by ordinary reads and writes.

The safetensors package maps a file into memory, where a file that another process cuts takes the reader down (SIGBUS), and writes by way of
a temporary file of its own. A file here appears under its name only when it is complete, and whatever is wrong with one that is read is a
:class:`SnapshotError`.

Format: 8 bytes, little endian, the size of the JSON header; the header ``{name: {"dtype", "shape", "data_offsets"}, "__metadata__": {str:
str}}``; the tensors' bytes, one after the other.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, NoReturn

import torch

from kvq_core.errors import ArgumentError, SnapshotError

_DTYPES: Final = {"U8": torch.uint8, "I32": torch.int32, "I64": torch.int64, "F32": torch.float32}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA: Final = "__metadata__"
_LARGEST_HEADER: Final = 100_000_000
_MOST_DIMENSIONS: Final = 8
_CHUNK: Final = 1 << 24
_LONGEST_STEM: Final = 100


class Entry(NamedTuple):
    """A tensor of the file: its bytes are ``first:end`` of those behind the header."""

    dtype: str
    shape: tuple[int, ...]
    first: int
    end: int


def write(path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write contiguous CPU tensors, atomically: a reader of ``path`` finds the old file or the whole new one.

    The file's permissions are those of any new file. A symbolic link stays, and what it names is written.

    Raises:
        OSError: it cannot be written, or ``path`` is there and no regular file.
    """
    target = Path(os.path.realpath(_checked_path(path)))
    with suppress(FileNotFoundError):
        mode = os.stat(target).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, "not a regular file", str(target))
    # Cut, since file systems limit the bytes of a name, and the target's may be at the limit.
    name = os.fsencode(target.name)[:_LONGEST_STEM].decode(errors="ignore")
    part = target.with_name(f".{name}.{os.getpid()}.{os.urandom(4).hex()}.part")
    try:
        with open(part, "xb") as file:
            ordered = _write_header(file, tensors, metadata)
            for tensor in ordered:
                file.write(_bytes(tensor))
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(part)


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of a contiguous CPU tensor's bytes."""
    return zlib.crc32(_bytes(tensor))


def parse_json(text: str) -> Any:
    """What ``text`` says; ValueError if it is no JSON, has a key twice or numbers that JSON does not have, or is nested too deep."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no JSON")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key comes twice")
        return found

    try:
        return json.loads(text, parse_constant=refuse, object_pairs_hook=unique)
    except RecursionError as cause:
        raise ValueError("nested too deep") from cause


def name_of(dtype: torch.dtype) -> str:
    """What the format calls ``dtype``."""
    return _NAMES[dtype]


class TensorFile:
    """An open safetensors file: its ``metadata``, and its tensors by name."""

    def __init__(self, path: str, file: BinaryIO) -> None:
        self._path, self._file = path, file
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise self.error("no regular file")
        size = int.from_bytes(self._read(8), "little")
        if size > min(_LARGEST_HEADER, state.st_size - 8):
            raise self.damaged(f"a header of {size} bytes in a file of {state.st_size}")
        self._data = 8 + size
        try:
            header = parse_json(self._read(size).decode())
            self.metadata = _strings(header.pop(_METADATA, {}))
            self.entries = {name: _entry(entry) for name, entry in header.items()}
        except (ValueError, TypeError, KeyError, AttributeError) as cause:
            raise self.damaged(f"its header: {type(cause).__name__} {cause}") from cause
        end = 0
        for entry in sorted(self.entries.values(), key=lambda entry: (entry.first, entry.end)):
            if entry.first != end:
                raise self.damaged(f"its tensors leave a gap or overlap at byte {end}")
            end = entry.end
        if self._data + end != state.st_size:
            raise self.damaged(f"{state.st_size} bytes, but its header speaks of {self._data + end}")

    def error(self, what: str) -> SnapshotError:
        """The error to raise about this file."""
        return SnapshotError(f"{self._path}: {what}")

    def damaged(self, why: str) -> SnapshotError:
        return self.error(f"damaged, or no safetensors file: {why}")

    def empty(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized CPU tensor for :meth:`read_into`."""
        entry = self.entries[name]
        if entry.dtype != name_of(dtype):
            raise self.error(f"tensor {name!r} is {entry.dtype}, need {name_of(dtype)}")
        return torch.empty(entry.shape, dtype=dtype, device="cpu")

    def read_into(self, name: str, target: torch.Tensor) -> int:
        """Fill ``target``, contiguous, of the entry's dtype and shape and on any device; the bytes' CRC-32."""
        entry, crc = self.entries[name], 0
        self._file.seek(self._data + entry.first)
        flat = target.view(-1).view(torch.uint8)
        staged = torch.empty(min(_CHUNK, len(flat)), dtype=torch.uint8, device="cpu")
        for first in range(0, len(flat), _CHUNK):
            chunk = staged[: len(flat) - first]
            raw = chunk.numpy().data
            if self._file.readinto(raw) != len(raw):  # type: ignore[attr-defined]
                raise self.damaged(f"it ended within tensor {name!r}")
            crc = zlib.crc32(raw, crc)
            flat[first : first + len(chunk)].copy_(chunk)
        return crc

    def _read(self, count: int) -> bytes:
        read = self._file.read(count)
        if len(read) != count:
            raise self.damaged("it ended within its header")
        return read


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[TensorFile]:
    """Open a file to read.

    Raises:
        SnapshotError: it is damaged, or no safetensors file.
        OSError: it is not there, or cannot be read.
    """
    name = _checked_path(path)

    def without_waiting(name: str, flags: int) -> int:
        # A pipe would wait for someone to write.
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))

    with open(name, "rb", opener=without_waiting) as file:
        yield TensorFile(name, file)


def _checked_path(path: Any) -> str:
    try:
        name = os.fsdecode(path)
        if b"\0" not in os.fsencode(name):
            return name
    except (TypeError, ValueError):
        pass
    raise ArgumentError("path", repr(path), "a path")


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def _write_header(file: BinaryIO, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> list[torch.Tensor]:
    """The tensors in the order in which their bytes are to follow: larger items first, so that each lies on a multiple of its size."""
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    ordered = sorted(tensors.items(), key=lambda named: (-named[1].itemsize, named[0]))
    end = 0
    for name, tensor in ordered:
        first, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [first, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    return [tensor for _, tensor in ordered]


def _strings(metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise TypeError(f"{_METADATA} is no object of strings")
    return metadata


def _entry(raw: Any) -> Entry:
    """An entry of the header; an error if it is not one, or has another number of bytes than its shape."""
    shape, (first, end) = raw["shape"], raw["data_offsets"]
    if len(shape) > _MOST_DIMENSIONS or any(type(number) is not int or number < 0 for number in (*shape, first, end)):
        raise ValueError(f"a shape of {shape}, bytes {first} to {end}")
    entry = Entry(str(raw["dtype"]), tuple(shape), first, end)
    if entry.dtype in _DTYPES and math.prod(shape) * _DTYPES[entry.dtype].itemsize != end - first:
        raise ValueError(f"{entry.dtype} {shape} in {end - first} bytes")
    return entry
