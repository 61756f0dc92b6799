"""The kernels' own PTX, interpreted: the same bits as the plain Triton beside it, which other GPUs and the interpreter take; prefetches."""

from dataclasses import replace

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

MODES = sorted(set(FIRST_PARTY) - {"none"})
DECODE = Case(query_lens=(1, 1), seq_lens=(65, 33), head_size=128, queries_per_kv=4, num_kv_heads=1, dtype=torch.bfloat16)
PREFILL = Case(query_lens=(20,), seq_lens=(50,), head_size=64, queries_per_kv=2, num_kv_heads=1, dtype=torch.bfloat16, softcap=20.0)


# From sm_89 on there are conversions of fp8.
@pytest.mark.parametrize(("mode", "arch"), [(mode, arch) for mode in MODES for arch in ("sm_80", "sm_89")[: 1 + mode.startswith("fp8")]])
@pytest.mark.parametrize("case", [DECODE, PREFILL, replace(DECODE, query_lens=(1, 3), head_size=80)], ids=str)
def test_the_same_bits(mode: str, case: Case, arch: str, interpreted: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:

    def results(use_asm: bool) -> tuple[torch.Tensor, ...]:
        monkeypatch.setattr("kvq_core.launch.device.installed_facts", lambda device: DeviceFacts(4, use_asm, arch))
        built = scene.build(case, get_backend(mode), interpreted)
        built.write()
        return built.pages.integers("key_cache"), built.pages.integers("value_cache"), built.read()

    wanted = results(use_asm=False)
    with interpreted_ptx() as log:
        got = results(use_asm=True)
    assert len(set(log)) >= 2, "codes are made and unpacked"
    for name, one, other in zip(("key_cache", "value_cache", "out"), got, wanted, strict=True):
        assert torch.equal(one, other), name


def rows_of(built: Scene, slots: list[int]) -> set[int]:
    """Where the rows of these slots begin, and again each 64 bytes, in each field of the pages."""
    size = built.case.block_size
    fields = [built.pages.integers(name) for name in built.pages.fields]
    rows = [field[slot // size, slot % size, head] for field in fields for slot in slots for head in range(built.case.num_kv_heads)]
    return {at for row in rows for at in range(row.data_ptr(), row.data_ptr() + row.numel() * row.element_size(), 64)}


@pytest.mark.parametrize(
    ("mode", "seq_len", "prefetches"), [("int4", 100, True), ("int2", 100, True), ("none", 100, False), ("int4", 1000, False)]
)
def test_short_sequences_are_prefetched(
    mode: str, seq_len: int, prefetches: bool, interpreted: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On five multiprocessors, 100 keys are four splits of one tile each: into L2 go the rows of all keys whose blocks exist."""
    monkeypatch.setattr("kvq_core.launch.device.installed_facts", lambda device: DeviceFacts(5, True, "sm_90"))
    case = Case(query_lens=(1,), seq_lens=(seq_len,), head_size=128, queries_per_kv=4, dtype=torch.bfloat16)
    built = scene.build(case, get_backend(mode), interpreted).fill()
    table = built.block_table.clone()
    table[0, 1], table[0, 3] = -7, 1 << 30
    with interpreted_ptx() as log, ops.planning_with(EMPTY_TABLE):
        built.read(block_table=table)
    left = [slot for key, slot in enumerate(built.slots.tolist()) if key // case.block_size not in (1, 3)]
    # In place of keys beyond the last, and of those of missing blocks, those of a block that exists.
    may = rows_of(built, [*left, *range(case.block_size)]) if prefetches else set()
    assert (rows_of(built, left) if prefetches else set()) <= log.prefetched <= may
