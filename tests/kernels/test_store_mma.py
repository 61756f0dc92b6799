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
from kvq_core.launch import dispatch
from kvq_core.launch.offline import Device, planning_for
from kvq_core.launch.replay import LaunchRecord
from kvq_core.plan import Entry, Table, Write
from kvq_core.plan.lookup import listening
from kvq_core.testing import places, scene
from kvq_core.testing.cases import Case
from kvq_core.testing.interpret.gluon import interpreted_gluon
from kvq_core.testing.places import Place
from sm90_device import H200, HOPPER, shipped_tables_and_a_known_triton  # noqa: F401 - an autouse fixture

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


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The modules of the kernels that are launched."""
    seen: set[str] = set()
    start = LaunchRecord.start

    def noting(self: Any, kernel: Any, *arguments: Any, **options: Any) -> None:
        seen.add(kernel.fn.__module__)
        start(self, kernel, *arguments, **options)

    monkeypatch.setattr(LaunchRecord, "start", noting)
    return seen


@pytest.mark.parametrize(
    ("choice", "case"), [*((choice, ROWS) for choice in CHOICES), *((CHOICES[1], case) for case in SUPPORTED[1:])], ids=str
)
@pytest.mark.parametrize("mode", MODES)
def test_written_rows(mode: str, choice: Write, case: Case, place: Place, launched: set[str]) -> None:
    built = scene.build(case, get_backend(mode), place.device)
    with ops.planning_with(table_of(place, choice)):
        SUITES[mode]().assert_write(built, f"{case}, {choice}")
    assert launched == {f"kvq_{mode[:4]}.store_mma"}


@pytest.mark.parametrize("mode", MODES)
def test_extreme_rows(mode: str, place: Place, launched: set[str]) -> None:
    """None is worse than zero, and NaN leaves the rows beside it alone."""
    with ops.planning_with(table_of(place, CHOICES[1])):
        built = scene.build(ROWS, get_backend(mode), place.device)
        built.write()
        clean = {name: built.stored(name) for name in built.pages.fields}
        built.key[3, 1, 5], built.value[3, 1, 5] = torch.nan, torch.inf
        built.write()
        others = torch.ones(built.key.shape[:2], dtype=torch.bool, device=place.device)
        others[3, 1] = False
        assert all(torch.equal(built.stored(name)[others], rows[others]) for name, rows in clean.items())
        assert launched == {f"kvq_{mode[:4]}.store_mma"}
        SUITES[mode]().test_no_finite_row_is_worse_than_zero_through_the_doors(get_backend(mode), place, 128, torch.bfloat16)


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
