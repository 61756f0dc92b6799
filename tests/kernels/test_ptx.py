"""The kernels' own PTX, interpreted: it gives the same bits as the plain Triton beside it, which other GPUs and the interpreter take."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvq_core import get_backend
from kvq_core.call import ops
from kvq_core.launch.device import DeviceFacts
from kvq_core.plan import Decode, Entry, Table
from kvq_core.registry import FIRST_PARTY
from kvq_core.testing import scene
from kvq_core.testing.cases import Case
from kvq_core.testing.interpret import ptx
from kvq_core.testing.interpret.gluon import interpreted_gluon
from kvq_core.testing.interpret.ptx import interpreted_ptx
from kvq_core.testing.mbarriers import reused_mbarriers, unordered_arrivals

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


def test_short_sequences_are_prefetched(interpreted: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """On five multiprocessors, 100 keys are four splits of one tile each: all rows of keys go into L2, and none of unpacked pages."""
    monkeypatch.setattr("kvq_core.launch.device.installed_facts", lambda device: DeviceFacts(5, True, "sm_90"))
    for mode in ("int4", "none"):
        built = scene.build(replace(DECODE, query_lens=(1,), seq_lens=(100,)), get_backend(mode), interpreted).fill()
        with interpreted_ptx() as log, ops.planning_with(Table("", {})):
            built.read()
        codes = built.pages.integers("key_cache")
        rows = {codes[slot // 16, slot % 16, 0].data_ptr() for slot in built.slots.tolist()}
        assert rows & log.prefetched == (rows if mode == "int4" else set())


def test_keys_past_the_last_whole_tile_are_prefetched(interpreted: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two-bit codes, where those keys come first: all rows of K and V from there on. For keys that there are not, block 0's are."""
    monkeypatch.setattr("kvq_core.launch.device.installed_facts", lambda device: DeviceFacts(1, True, "sm_90"))
    wide = Decode(keys=128, warps=1, stages=5, programs_per_sm=2, registers=None, min_keys=64, loops=2)
    for mode, first in (("int2", 256), ("int4", 300)):
        built = scene.build(replace(DECODE, query_lens=(1,), seq_lens=(300,)), get_backend(mode), interpreted).fill()
        with interpreted_ptx() as log, ops.planning_with(Table("", {"decode": (Entry({}, wide),)})):
            built.read()
        for name in ("key_cache", "value_cache"):
            codes = built.pages.integers(name)
            rows = {n: codes[slot // 16, slot % 16, 0].data_ptr() for n, slot in enumerate(built.slots.tolist()) if slot >= 16}
            assert [n for n, row in rows.items() if row in log.prefetched] == [n for n in rows if n >= first], (mode, name)


@pytest.mark.quick
@pytest.mark.parametrize("factors", [(1.0, 1.0), (0.25, 1.0), (1.0, 0.25), (0.0, 0.5)])
def test_products_that_a_warp_skips(factors: tuple[float, float]) -> None:
    """Where both of a thread's rows, which take turns by two numbers, are times 1."""
    with interpreted_gluon("kvq_core.kernels.sm90.softmax") as (softmax,):
        asm = softmax.skippable("mul.f32", "0f3F800000", 8)
    numbers = np.random.default_rng(0).standard_normal((8, 32), np.float32)
    by_number = np.array([factors[i // 2 % 2] for i in range(8)], np.float32)[:, None] + np.zeros_like(numbers)
    got = ptx.run(asm, [*(x.view(np.uint32) for x in (*numbers, *numbers, *by_number))], 8, first=0)
    assert np.array_equal(np.stack(got).view(np.float32), numbers * by_number)


ARRIVAL = "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r1];"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("unordered", "code"),
    [
        (0, f"st.shared.b32 [%r2], %r3;\nbar.sync 1, 128;\n{ARRIVAL}"),
        (1, f"bar.sync 1, 128;\nst.shared.b32 [%r2], %r3;\nfence.proxy.async.shared::cta;\n{ARRIVAL}"),
        (1, f"wgmma.wait_group.sync.aligned 0;\n{ARRIVAL}"),
        (2, f"@%p2 ld.shared.v2.b32 {{%r4, %r5}}, [%r6];\n{ARRIVAL}\n{ARRIVAL}\nbarrier.sync 1;\n{ARRIVAL}"),
        (0, "ld.shared.b32 %r2, [%r3];\ncp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r1];"),
        # The next round's arrival is before the barrier; or the barrier is on one of two ways only; or no way leads there.
        (1, f"bar.sync 1, 128;\n$L1:\n{ARRIVAL}\nstmatrix.sync.aligned.m8n8.x1.shared.b16 [%r2], {{%r3}};\n@%p2 bra $L1;\nret;"),
        (1, f"ld.shared.b32 %r2, [%r3];\n@%p2 bra $L1;\nbar.sync 1, 128;\n$L1:\n{ARRIVAL}"),
        (0, f"bra.uni $L1;\nld.shared.b32 %r2, [%r3];\n$L2:\n{ARRIVAL}\nret;\n$L1:\nbar.sync 1, 128;\nbra.uni $L2;"),
    ],
)
def test_arrivals_that_an_access_reaches(unordered: int, code: str) -> None:
    assert unordered_arrivals(code) == unordered


@pytest.mark.quick
@pytest.mark.parametrize(
    ("reused", "access"),
    [
        (1, "st.shared.v4.b32 [global_smem+64], {%r60, %r61, %r59, %r62};"),
        (0, "@%p1 mbarrier.inval.shared::cta.b64 [%r2];\nst.shared.b32 [global_smem+64], %r60;"),
        (0, "@%p1 ld.shared.b64 %rd5, [global_smem+72];"),
    ],
)
def test_mbarriers_whose_memory_is_used(reused: int, access: str) -> None:
    begin = "mov.b32 %r1, global_smem;\nadd.s32 %r2, %r1, 64;\n@%p1 mbarrier.init.shared::cta.b64 [%r2], 2;\n"
    assert reused_mbarriers(begin + access) == reused
