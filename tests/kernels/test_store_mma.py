"""Writes by the Gluon kernels in the tensor core's layout (``kernels.sm90.store_mma``): which rows take them, with the bytes of ``encode``.

Interpreted Gluon has no layouts: that nothing moves between threads shows in the golden counts.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from exact_reads import SUITES
from kvq_core import get_backend
from kvq_core.call import ops
from kvq_core.hadamard import single_rht
from kvq_core.launch import dispatch
from kvq_core.launch.offline import Device, planning_for
from kvq_core.launch.replay import LaunchRecord
from kvq_core.plan import Entry, Table, Write
from kvq_core.plan.lookup import listening
from kvq_core.testing import places, scene
from kvq_core.testing.cases import Case
from kvq_core.testing.interpret.gluon import interpreted_gluon
from kvq_core.testing.places import Place
from sm90_device import H200, HOPPER, use_shipped_tables_and_a_known_triton

MODES = ("int4_per_token_head", "int2_per_token_head")
KERNELS = ("kvq_core.kernels.sm90.store_mma", "kvq_int4.store_mma", "kvq_int2.store_mma")
CHOICES = tuple(Write(rows, warps, 1) for rows, warps in ((8, 1), (16, 1), (16, 2), (32, 4), (64, 4)))

ROWS = Case(query_lens=(1, 5), seq_lens=(37, 18), head_size=128, num_kv_heads=3, dtype=torch.bfloat16)
SUPPORTED: tuple[Case, ...] = (
    ROWS,
    replace(ROWS, head_size=64, dtype=torch.float16, layout="token_major", rows="fused"),
    replace(ROWS, num_kv_heads=1, seq_lens=(1, 6), block_size=32, layout="paired", rows="transposed"),
    replace(ROWS, num_kv_heads=8, head_size=64, smoothing="mean", layout="interleaved"),
    replace(ROWS, dtype=torch.float16, smoothing="balanced", block_size=64),
)


@pytest.fixture(autouse=True)
def shipped_tables_and_a_known_triton(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use_shipped_tables_and_a_known_triton(request, monkeypatch)


@pytest.fixture(params=places.params("interpret", "gpu"))
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    found = places.enter(request.param, monkeypatch)
    if found.name == "gpu":
        yield found
        return
    monkeypatch.setattr(dispatch, "machine_of", lambda device: HOPPER)
    with interpreted_gluon(*KERNELS):
        yield found


def table_of(place: Place, choice: Write) -> Table:
    return Table("sm_90" if place.name == "gpu" else "", {"write": (Entry({}, choice),)})


@pytest.mark.parametrize(
    ("choice", "case"), [*((choice, ROWS) for choice in CHOICES), *((CHOICES[1], case) for case in SUPPORTED[1:])], ids=str
)
@pytest.mark.parametrize("mode", MODES)
def test_written_rows(mode: str, choice: Write, case: Case, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    start = LaunchRecord.start

    def noting(self: Any, kernel: Any, *arguments: Any, **options: Any) -> None:
        seen.append(kernel.fn.__module__)
        start(self, kernel, *arguments, **options)

    monkeypatch.setattr(LaunchRecord, "start", noting)
    built = scene.build(case, get_backend(mode), place.device)
    with ops.planning_with(table_of(place, choice)):
        SUITES[mode]().assert_write(built, f"{case}, {choice}")
    assert seen == [f"kvq_{mode[:4]}.store_mma"]


@pytest.mark.parametrize("mode", MODES)
def test_bytes_are_the_triton_kernel_s(mode: str, place: Place) -> None:
    """Rows of all sizes, NaN and infinity. Sums in another order move one code in thousands by a step, a scale by two units in the last
    place."""
    generator = torch.Generator().manual_seed(0)
    case = replace(ROWS, query_lens=(60, 1), seq_lens=(60, 1))
    both = []
    for choice in (Write(16, 1, 0), Write(16, 1, 1)):
        built = scene.build(case, get_backend(mode), place.device)
        for x, seed in ((built.key, 1), (built.value, 2)):
            sizes = torch.randint(-60, 60, x.shape[:2], generator=generator.manual_seed(seed))
            x *= torch.exp2(sizes)[..., None].to(x)
            x[3, 1], x[4, 0, 17], x[5, 2, 100] = 0, torch.nan, torch.inf
            x[6, :2] = single_rht(torch.linspace(1, 2, 128) * torch.tensor([[1], [-1]]), inverse=True).to(x)
        with ops.planning_with(table_of(place, choice)):
            built.write()
        both.append(built)
    triton, gluon = both
    finite = torch.ones(triton.key.shape[:2], dtype=torch.bool, device=place.device)
    finite[4, 0] = finite[5, 2] = False
    for half in ("key", "value"):
        wanted, got = (built.stored(f"{half}_cache")[finite].view(torch.uint8) for built in (triton, gluon))
        assert (wanted != got).float().mean() < 1e-3
        wanted, got = (built.stored(f"{half[0]}_scale_cache")[finite] for built in (triton, gluon))
        torch.testing.assert_close(got, wanted, rtol=4e-6, atol=0)


def asked(mode: str, case: Case, device: Device = H200) -> bool:
    """Whether rows are planned as ones that the Gluon kernel supports."""
    built = scene.build(case, get_backend(mode), torch.device("cpu"))
    with ops.planning_with(Table("sm_90", {})), planning_for(device), listening() as questions:
        built.write()
    (facts,) = [facts for kind, facts in questions if kind == "write"]
    return bool(facts["store_mma"])


@pytest.mark.quick
def test_supported_rows() -> None:
    assert all(asked(mode, case) for mode in MODES for case in SUPPORTED)
    others = [{"head_size": 96}, {"head_size": 256}, {"head_size_v": 64}, {"dtype": torch.float32}]
    assert [change for change in others if any(asked(mode, replace(ROWS, **change)) for mode in MODES)] == []
    assert not asked(MODES[0], ROWS, replace(H200, arch="sm_89", target=89))
    assert not any(asked(mode, ROWS) for mode in ("none", "int8_per_token_head", "fp8_per_token_head")), "nothing is rotated"
