"""Which rows a short sequence's programs prefetch into L2, and that other reads prefetch nothing: from the kernels' interpreted PTX."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from exact_reads import EMPTY_TABLE
from kvq_core import get_backend
from kvq_core.call import ops
from kvq_core.launch.device import DeviceFacts
from kvq_core.registry import FIRST_PARTY
from kvq_core.testing import scene
from kvq_core.testing.cases import Case
from kvq_core.testing.interpret.ptx import interpreted_ptx
from kvq_core.testing.scene import Scene

PACKED = sorted(set(FIRST_PARTY) - {"none", "int3_per_token_head"})
"""int3's tiles have 64 keys, for which nothing is prefetched."""
ONE = Case(query_lens=(1,), seq_lens=(100,), head_size=128, queries_per_kv=4, dtype=torch.bfloat16)
"""Planned for five multiprocessors: four splits of a tile of 32 keys for each kv head, so all keys are in some program's first tile."""
OTHERS: dict[str, tuple[str, Case]] = {
    "unpacked": ("none", ONE),
    "two sequences": ("int4_per_token_head", replace(ONE, query_lens=(1, 1), seq_lens=(60, 60))),
    "splits of 64 keys": ("int4_per_token_head", replace(ONE, seq_lens=(200,))),
    "splits of two tiles": ("int8_per_token_head", replace(ONE, seq_lens=(200,))),
    "more splits than programs": ("int4_per_token_head", replace(ONE, seq_lens=(3000,))),
    "sixteen rows": ("int4_per_token_head", replace(ONE, queries_per_kv=16)),
    "two keys in a row of lanes": ("int2_per_token_head", replace(ONE, head_size=64)),
    "a sequence that is not split": ("int4_per_token_head", replace(ONE, seq_lens=(20,))),
}


def read(mode: str, case: Case, device: torch.device, monkeypatch: pytest.MonkeyPatch, **changed: Any) -> tuple[Scene, set[int]]:
    """What was read from, and the prefetched addresses."""
    monkeypatch.setattr("kvq_core.launch.device.installed_facts", lambda device: DeviceFacts(5, True, "sm_90"))
    built = scene.build(case, get_backend(mode), device).fill()
    with interpreted_ptx() as log, ops.planning_with(EMPTY_TABLE):
        built.read(**{name: change(built) for name, change in changed.items()})
    return built, log.prefetched


def rows_of(built: Scene, slots: list[int]) -> set[int]:
    """Where the rows of these slots begin, and again each 64 bytes, in each field of the pages."""
    size = built.case.block_size
    rows = [(slot // size, slot % size, head) for slot in slots for head in range(built.case.num_kv_heads)]
    found = set()
    for name in built.pages.fields:
        field = built.pages.integers(name)
        for row in (field[index] for index in rows):
            found.update(range(row.data_ptr(), row.data_ptr() + row.numel() * row.element_size(), 64))
    return found


@pytest.mark.parametrize("missing", [{}, {1: -7, 3: 1 << 30}], ids=["all blocks", "missing blocks"])
@pytest.mark.parametrize("mode", PACKED)
def test_keys_of_first_tiles_are_prefetched(
    mode: str, missing: dict[int, int], interpreted: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def holed(built: Scene) -> torch.Tensor:
        table = built.block_table.clone()
        for column, block in missing.items():
            table[0, column] = block
        return table

    built, prefetched = read(mode, ONE, interpreted, monkeypatch, block_table=holed)
    left = [slot for key, slot in enumerate(built.slots.tolist()) if key // ONE.block_size not in missing]
    # In place of keys beyond the last, and of those of missing blocks, those of a block that exists.
    assert rows_of(built, left) <= prefetched <= rows_of(built, [*left, *range(ONE.block_size)])


@pytest.mark.parametrize("why", OTHERS)
def test_other_reads_prefetch_nothing(why: str, interpreted: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    mode, case = OTHERS[why]
    _, prefetched = read(mode, case, interpreted, monkeypatch)
    assert prefetched == set()
