"""What a snapshot of a cache holds: its pages and sequences, what its keys are smoothed with, and its exact rows."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from kvq_core import __version__
from kvq_core.backend import QuantKVBackend
from kvq_core.cache import snapshot
from kvq_core.cache.layout import Geometry
from kvq_core.cache.pages import Pages, contents
from kvq_core.cache.sequences import SAVED, SequenceTable
from kvq_core.cache.snapshot import Header, Snapshot
from kvq_core.errors import KVQError, SnapshotError
from kvq_core.registry import get_backend
from kvq_core.residual.rows import ResidualRows
from kvq_core.smoothing.calibration import FIRST_PREFILL, ModelSmoothing
from kvq_core.smoothing.layers import LayerSmoothings


@dataclass(frozen=True)
class Parts:
    """All that a cache is made of."""

    backend: QuantKVBackend
    geometry: Geometry
    pages: Pages
    table: SequenceTable
    smoothings: LayerSmoothings
    exact: ResidualRows | None


C = TypeVar("C")


def save(path: str | os.PathLike[str], parts: Parts) -> None:
    """Write all of ``parts``, atomically. Raises :class:`OSError` as :func:`kvq_core.cache.snapshot.save` does."""
    package = type(parts.backend).__module__.partition(".")[0]
    versions = {"kvq_core": __version__, package: str(getattr(sys.modules.get(package), "__version__", "unknown"))}
    tensors = parts.pages.tensors | {
        name: torch.tensor(values, dtype=torch.int64, device="cpu") for name, values in parts.table.saved().items()
    }
    fingerprint = residual = None
    smoothing = parts.smoothings.found
    if smoothing is not None:
        tensors, fingerprint = tensors | smoothing.tensors(), smoothing.fingerprint
    if parts.exact is not None:
        tensors, residual = tensors | parts.exact.saved(_lengths(parts.table)), parts.exact.options
    waiting = FIRST_PREFILL if parts.smoothings.waiting else None
    header = Header(parts.backend.mode, versions, parts.geometry, parts.table.next_id, fingerprint, residual, waiting)
    snapshot.save(path, header, tensors)


def restored(file: Snapshot, make: Callable[..., tuple[C, Parts]], wanted: QuantKVBackend | None, smoothing: ModelSmoothing | None) -> C:
    """The cache that was saved, in one that ``make(backend, **arguments)`` returns with its parts.

    Raises:
        SnapshotError: it is not of backend ``wanted`` or not smoothed with ``smoothing``, if these are given; its mode is not installed;
            it is damaged, or does not fit what its header states.
    """
    header = file.header
    try:
        backend = wanted or get_backend(header.mode)
        if backend.mode != header.mode:
            raise file.error(f"it holds mode {header.mode}, not {backend.mode} as asked for")
        for name, (dtype, shape) in contents(backend, header.geometry).items():
            file.expect(name, dtype, shape)
        for name in SAVED:
            file.expect(name, torch.int64)
        arguments = vars(header.geometry) | (header.residual or {})
        found = file.smoothing(smoothing)
        cache, parts = make(backend, **arguments, smoothing=header.waiting or found)
        if header.waiting is not None and found is not None:
            parts.smoothings.restore(found)
        for name, tensor in parts.pages.tensors.items():
            file.fill(name, tensor)
        parts.pages.check_scales()
        parts.table.restore({name: file.tensor(name, torch.int64).tolist() for name in SAVED}, header.next_id)
        if parts.exact is not None:
            parts.exact.restore(file, _lengths(parts.table))
        file.check_header()
    except SnapshotError:
        raise
    except KVQError as cause:
        raise file.error(f"cannot restore mode {header.mode}, written by {header.packages}: {cause}") from cause
    return cache


def _lengths(table: SequenceTable) -> dict[int, int]:
    return {seq: table.get(seq).length for seq in table.ids}
