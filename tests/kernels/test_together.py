"""Neighbouring keys whose block is looked up once: reads by tiles of many keys a thread, in blocks of many sizes, are attention."""

from dataclasses import replace

import pytest
import torch

from exact_reads import SUITES, read_exactly
from kvq_core.plan import Decode, Entry, Table
from kvq_core.testing.cases import Case

CASE = Case(query_lens=(1, 1, 1), seq_lens=(700, 3, 301), head_size=128, num_kv_heads=2, queries_per_kv=2)
WIDE = Decode(keys=128, warps=1, stages=2, programs_per_sm=2, registers=None, min_keys=64, loops=2)
READS: dict[str, tuple[Case, Decode, int]] = {
    "four keys a thread": (CASE, WIDE, 4),
    "blocks of a tile": (replace(CASE, block_size=128), WIDE, 4),
    "blocks of more than a tile": (replace(CASE, block_size=256, layout="paired", dtype=torch.bfloat16), WIDE, 4),
    "blocks that no tile is a multiple of": (replace(CASE, block_size=24, layout="interleaved"), WIDE, 4),
    "as many keys a thread as a block has": (replace(CASE, block_size=8), replace(WIDE, keys=256, warps=1), 8),
    "two keys a thread, a window": (replace(CASE, window=333, sinks=True), replace(WIDE, keys=64), 2),
    "a key a thread": (CASE, replace(WIDE, keys=32), 1),
    "two warps": (CASE, replace(WIDE, warps=2), 2),
    "one sequence": (replace(CASE, query_lens=(1,), seq_lens=(1500,), block_size=32), WIDE, 4),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("mode", sorted(SUITES))
def test_together(mode: str, read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_together(mode, read, "interpret", monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("mode", ["int4_per_token_head", "int2_per_token_head"])
def test_together_on_a_gpu(mode: str, read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The modes whose tiles have several keys a thread in kvq's own tables."""
    assert_together(mode, read, "gpu", monkeypatch)


def assert_together(mode: str, read: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, choice, together = READS[read]
    table = Table("sm_90" if place == "gpu" else "", {"decode": (Entry({}, choice),)})
    constants = [one["C"] for one in read_exactly(mode, case, place, monkeypatch, table) if "C" in one]
    assert {one.keys_an_id for one in constants} == {together} and {one.loops for one in constants} == {2}
