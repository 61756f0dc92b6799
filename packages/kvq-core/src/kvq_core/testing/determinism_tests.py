"""The same inputs give the same bits: run to run, whatever lies in the workspace, and under the switch whatever else is in the batch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kvq_core.plan.invariance import batch_invariant
from kvq_core.testing import places
from kvq_core.testing.cases import LARGE, Case
from kvq_core.testing.places import Place
from kvq_core.testing.scene import Scene
from kvq_core.testing.spaces import leftovers
from kvq_core.testing.subject import Subject

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend

_SPLIT = Case(query_lens=(1, 3, 0), seq_lens=(140, 9, 3), num_kv_heads=1, queries_per_kv=1)
_PREFILL = Case(query_lens=(18, 1), seq_lens=(20, 9), num_kv_heads=1, queries_per_kv=1, sinks=True)
_INVARIANT = (
    Case(query_lens=(1, 3, 1), seq_lens=(70, 33, 300), num_kv_heads=1),
    Case(query_lens=(1, 1), seq_lens=(2100, 40), num_kv_heads=1, queries_per_kv=1),
    Case(query_lens=(20, 1, 17), seq_lens=(33, 300, 60), num_kv_heads=1),
)
_INVARIANT_LARGE = (Case(query_lens=(1, 4, 300, 1, 1), seq_lens=(9000, 4100, 2600, 70, 1), head_size=128, dtype=torch.bfloat16),)
_MIXED = Case(query_lens=(1, 18, 2, 1), seq_lens=(40, 20, 17, 1), num_kv_heads=1, queries_per_kv=1)
_LONG_KEYS: dict[str, Any] = {
    "query_lens": (1, 1, 4, 300, 1, 16, 1),
    "seq_lens": (70000, 20000, 4100, 2600, 900, 70, 1),
    "dtype": torch.bfloat16,
}
_MIXED_LARGE = (
    Case(**_LONG_KEYS, head_size=128),
    Case(**_LONG_KEYS, head_size=64, window=5000),
    Case(**_LONG_KEYS, head_size=96, sinks=True, queries_per_kv=7),
)
"""On a GPU a sequence's keys come in 35 chunks, 10, 3, 2 and 1; the batches are as many as several kinds of combine kernels take."""


class DeterminismTests(Subject):
    @places.each((_SPLIT, _PREFILL), large=LARGE[:5])
    def test_leftovers_do_not_matter(self, backend: QuantKVBackend, place: Place, case: Case) -> None:
        """Write and read again and again, the workspace full of NaN, of large integers, of noise: the same bytes and bits."""
        seen = []
        every = (0xFF, 0, 0x7F, "noise", "noise")
        for filling in every[:2] if place.name == "interpret" else every:
            built = self.build(backend, case, place)
            with leftovers(partial(_fill, filling)):
                built.write()
                out = built.read()
            seen.append((_bytes(out), built.pages.raw.clone()))
        for out, pages in seen[1:]:
            assert torch.equal(out, seen[0][0]), "the result has other bits"
            assert torch.equal(pages, seen[0][1]), "the pages have other bytes"

    @places.each(_INVARIANT, large=_INVARIANT_LARGE)
    def test_batch_invariance(self, backend: QuantKVBackend, place: Place, case: Case) -> None:
        """Under the switch a sequence's result has the same bits alone, in its batch, and in another order."""
        built = self.build(backend, case, place).fill()
        with batch_invariant(True):
            together = built.read()
            self.assert_exact(backend, built, place, together)
            parts = list(together.split(list(case.query_lens)))
            for seq in range(case.num_seqs):
                assert torch.equal(built.read([seq]), parts[seq]), f"sequence {seq} alone"
            backwards = built.read(list(range(case.num_seqs))[::-1])
            assert torch.equal(backwards, torch.cat(parts[::-1]))

    @places.each((_MIXED,), large=_MIXED_LARGE)
    def test_results_in_random_batches(self, backend: QuantKVBackend, place: Place, case: Case) -> None:
        """Alone, or anywhere in a batch of any size, next to any others, some of them its own copies, in a table as wide as they need."""
        drawn = random.Random(7)
        built = self.build(backend, case, place).fill()
        with batch_invariant(True):
            alone = [_read(built, [seq]) for seq in range(case.num_seqs)]
            for size in (2, 6, 3) if place.name != "gpu" else (2, 3, 4, 5, 8, 17, 64, 200, 3, 40, 130, 2):
                seqs = drawn.choices(range(case.num_seqs), k=size)
                parts = _read(built, seqs).split([case.query_lens[seq] for seq in seqs])
                for place_in_batch, (seq, got) in enumerate(zip(seqs, parts, strict=True)):
                    assert torch.equal(got, alone[seq]), f"sequence {seq}, at place {place_in_batch} of {seqs}"

    @places.each((_MIXED,), large=(replace(_MIXED_LARGE[0], head_size=64), replace(_MIXED_LARGE[0], head_size=16)))
    def test_bytes_in_random_writes(self, backend: QuantKVBackend, place: Place, case: Case) -> None:
        """Rows written in one call, or in random pieces of any size, are the same bytes under the switch."""
        drawn = random.Random(5)
        whole, parts = (self.build(backend, case, place) for _ in range(2))
        total = sum(case.seq_lens)
        with batch_invariant(True):
            whole.write()
            first = 0
            while first < total:
                rows = slice(first, first + drawn.choice((1, 2, 7, total // 9 + 1)))
                parts.write(key=parts.key[rows], value=parts.value[rows], slot_mapping=parts.slots[rows])
                first = rows.stop
        for name in whole.pages.fields:
            assert torch.equal(_bytes(whole.stored(name)), _bytes(parts.stored(name))), f"{name} depends on what else was written"


def _read(built: Scene, seqs: Sequence[int]) -> torch.Tensor:
    """The rows of ``seqs``, by a block table of exactly the columns that the longest of them needs."""
    case = built.case
    width = max(-(-case.seq_lens[seq] // case.block_size) for seq in seqs)
    return built.read(seqs, block_table=built.block_table[list(seqs), :width].contiguous())


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def _fill(filling: int | str, space: torch.Tensor) -> None:
    data = space.view(torch.uint8)
    if isinstance(filling, str):
        data.copy_(torch.randint(256, data.shape, dtype=torch.uint8))
    else:
        data.fill_(filling)
