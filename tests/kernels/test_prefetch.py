"""What a short sequence's programs ask the L2 for, and that nobody else asks: from the kernels' own PTX, interpreted."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from exact_reads import NOBODY_S
from kvq_core import get_backend
from kvq_core.call import ops
from kvq_core.launch.device import DeviceFacts
from kvq_core.registry import FIRST_PARTY
from kvq_core.testing import scene
from kvq_core.testing.cases import Case
from kvq_core.testing.interpret.ptx import interpreted_ptx
from kvq_core.testing.scene import Scene

PACKED = sorted(set(FIRST_PARTY) - {"none"})
ONE = Case(query_lens=(1,), seq_lens=(100,), head_size=128, queries_per_kv=4, dtype=torch.bfloat16)
"""Planned for five multiprocessors: four shares of a tile of 32 keys for each kv head, so that all keys are some program's first tile."""
OTHERS: dict[str, tuple[str, Case]] = {
    "unpacked": ("none", ONE),
    "two sequences": ("int4_per_token_head", replace(ONE, query_lens=(1, 1), seq_lens=(60, 60))),
    "shares of 64 keys": ("int4_per_token_head", replace(ONE, seq_lens=(200,))),
    "shares of two tiles": ("int8_per_token_head", replace(ONE, seq_lens=(200,))),
    "more shares than programs": ("int4_per_token_head", replace(ONE, seq_lens=(3000,))),
    "sixteen rows": ("int4_per_token_head", replace(ONE, queries_per_kv=16)),
    "two keys in a row of lanes": ("int2_per_token_head", replace(ONE, head_size=64)),
    "a sequence that is not split": ("int4_per_token_head", replace(ONE, seq_lens=(20,))),
}


def read(mode: str, case: Case, device: torch.device, monkeypatch: pytest.MonkeyPatch, **changed: Any) -> tuple[Scene, set[int]]:
    """What was read from, and the addresses that were asked for."""
    monkeypatch.setattr("kvq_core.launch.device.installed_facts", lambda device: DeviceFacts(5, True, "sm_90"))
    built = scene.build(case, get_backend(mode), device).fill()
    with interpreted_ptx() as log, ops.planning_with(NOBODY_S):
        built.read(**{name: change(built) for name, change in changed.items()})
    return built, log.prefetched


def rows_of(built: Scene, slots: list[int]) -> set[int]:
    """Where the rows of these slots begin, and again each 64 bytes, in each field of the pages."""
    size = built.case.block_size
    places = [(slot // size, slot % size, head) for slot in slots for head in range(built.case.num_kv_heads)]
    found = set()
    for name in built.pages.fields:
        field = built.pages.integers(name)
        for row in (field[place] for place in places):
            found.update(range(row.data_ptr(), row.data_ptr() + row.numel() * row.element_size(), 64))
    return found


@pytest.mark.parametrize("mode", PACKED)
def test_each_key_of_a_first_tile_is_asked_for(mode: str, interpreted: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    built, requested = read(mode, ONE, interpreted, monkeypatch)
    assert rows_of(built, built.slots.tolist()) <= requested
    # In place of keys beyond the last, those of a block that exists.
    assert requested <= rows_of(built, [*built.slots.tolist(), *range(ONE.block_size)])


@pytest.mark.parametrize("mode", PACKED)
def test_blocks_that_do_not_exist_are_not_asked_for(mode: str, interpreted: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def holed(built: Scene) -> torch.Tensor:
        table = built.block_table.clone()
        table[0, 1], table[0, 3] = -7, 1 << 30
        return table

    built, requested = read(mode, ONE, interpreted, monkeypatch, block_table=holed)
    left = [slot for key, slot in enumerate(built.slots.tolist()) if key // ONE.block_size not in (1, 3)]
    assert rows_of(built, left) <= requested <= rows_of(built, [*left, *range(ONE.block_size)])


@pytest.mark.parametrize("why", OTHERS)
def test_others_ask_for_nothing(why: str, interpreted: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    mode, case = OTHERS[why]
    _, requested = read(mode, case, interpreted, monkeypatch)
    assert requested == set()
