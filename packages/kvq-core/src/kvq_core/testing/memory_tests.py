"""Addresses beyond 32 bits: caches and rows whose ends are more than 2^31 elements and 2^32 bytes apart. On a GPU, which has the room."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from filelock import FileLock

from kvq_core.testing import layouts, scene
from kvq_core.testing.cases import Case
from kvq_core.testing.places import Place
from kvq_core.testing.scene import Scene
from kvq_core.testing.subject import Subject

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend

_CASE = Case(query_lens=(1, 20, 3), seq_lens=(300, 41, 18), queries_per_kv=4)
# Scales are four bytes each: 2^31 of them end beyond 2^33 bytes.
_WIDE_BLOCKS = replace(_CASE, layout="interleaved", padding=2**28)
_MANY_BLOCKS = replace(_CASE, padding=0)
_HEAD_STRIDE = 2**30 + 64
# The largest test takes 46 GiB at its peak; with those of 15 other processes beside it, 72 GiB were in use on a GPU of 79.
_NEEDED_BYTES = 76 << 30

on_gpu = pytest.mark.parametrize("place", [pytest.param("gpu", marks=pytest.mark.gpu)], indirect=True)


def far_scene(case: Case, backend: QuantKVBackend, device: torch.device, least_bytes: int) -> Scene:
    """A scene whose sequences lie at both ends of a cache in which K alone spans ``least_bytes``."""
    block = layouts.regions(case, backend, 1)[0][0]
    return scene.build(case, backend, device, spare_blocks=least_bytes // block + 1, ends=True)


def furthest(built: Scene, name: str) -> int:
    """The largest offset, in elements, of a row of the field ``name`` that is in use."""
    block, offset = built.slots // built.case.block_size, built.slots % built.case.block_size
    strides = built.pages.fields[name].strides
    return int((block * strides[0] + offset * strides[1]).max()) if len(built.slots) else 0


class MemoryTests(Subject):
    @pytest.fixture
    def room(self) -> Iterator[None]:
        """Most of a large GPU for one test at a time, whatever runs in other processes."""
        if not torch.cuda.is_available() or torch.cuda.mem_get_info()[1] < _NEEDED_BYTES:
            pytest.skip(f"needs a GPU with {_NEEDED_BYTES >> 30} GiB")
        number = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
        with FileLock(Path(tempfile.gettempdir()) / f"kvq-memory-tests-{number}.lock"):
            yield
            gc.collect()
            torch.cuda.empty_cache()

    @pytest.mark.gpu
    @pytest.mark.timeout(900)  # a test may wait for the room
    @pytest.mark.usefixtures("room")
    @on_gpu
    @pytest.mark.parametrize("case", [_WIDE_BLOCKS, _MANY_BLOCKS], ids=["wide blocks", "many blocks"])
    def test_cache_beyond_32_bits(self, backend: QuantKVBackend, place: Place, case: Case) -> None:
        """What a write or read would reach with an offset cut to 32 bits lies in the same buffer, and is watched."""
        wide = case.layout == "interleaved"
        # Under "many blocks" codes alone have 2^31 elements, whatever their size: their scales would take more memory than there is.
        itemsize = backend.key_half.cache_dtype(case.dtype).itemsize
        # Of halves with rows of two sizes, K may be the larger one.
        sizes = [half.packed_head_size(self.size(backend, case.head_size)) for half in (backend.key_half, backend.value_half)]
        least = max(2**32, 2**31 * itemsize) * max(1, sizes[0] // sizes[1]) + 2**20
        built = far_scene(self.sized(backend, case), backend, place.device, 2**33 + 2**29 if wide else least)
        for name, field in built.pages.fields.items():
            if wide or name.endswith(("key_cache", "value_cache")):
                assert furthest(built, name) > 2**31 and furthest(built, name) * field.dtype.itemsize > 2**32
        built.write()
        for half, x in (("key", built.stored_key), ("value", built.value)):
            self.assert_encoded(built, half, x, built.slots, str(case))
        self.assert_read(backend, built, place)
        # The same with another launch plan: each sequence by one program, and by an engine's segments.
        self.assert_read(backend, built, place, seq_threshold_3D=0)
        self.assert_read(backend, built, place, [0], seq_threshold_3D=8, **built.scratch(4))

    @pytest.mark.gpu
    @pytest.mark.timeout(900)  # a test may wait for the room
    @pytest.mark.usefixtures("room")
    @on_gpu
    def test_rows_beyond_32_bits(self, backend: QuantKVBackend, place: Place) -> None:
        """Heads of q, out, key and value that lie so far apart that a head's number times the stride needs more than 32 bits."""
        case = replace(_CASE, num_kv_heads=4, queries_per_kv=1)
        built = self.build(backend, case, place)
        near = [built.key, built.value, built.q]
        built.key, built.value, built.q = (_apart(x) for x in near)
        built.write()
        for half, x in zip(("key", "value"), near, strict=False):
            self.assert_encoded(built, half, x, built.slots, str(case))
        for longest, threshold in ((20, None), (20, 0)):
            arguments = built.read_arguments() | {"max_seqlen_q": longest, "seq_threshold_3D": threshold}
            out = _apart(torch.zeros(*built.q.shape[:2], built.case.value_size, dtype=case.dtype, device=place.device))
            backend.unified_attention(out=out, **arguments)
            self.assert_exact(backend, built, place, out.contiguous())


def _apart(x: torch.Tensor) -> torch.Tensor:
    """``x`` [rows, heads, size] with :data:`_HEAD_STRIDE` elements from head to head."""
    rows, heads, size = x.shape
    far = torch.empty((heads - 1) * _HEAD_STRIDE + rows * size, dtype=x.dtype, device=x.device)
    view = far.as_strided(x.shape, (size, _HEAD_STRIDE, 1))
    view.copy_(x)
    return view
