"""The merge of split keys: it is attention, however many programs share a row's channels."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import test_backends

from kvq_core import get_backend, ops
from kvq_core.kernels.args import MergeTile
from kvq_core.launch import Launched
from kvq_core.plans import Entry, Merge, Table
from kvq_core.testing import places, scene
from kvq_core.testing.cases import Case

SUITES = {suite.mode: suite for name, suite in vars(test_backends).items() if name.startswith("Test")}
LONG = Case(query_lens=(1,), seq_lens=(2300,), head_size=128, num_kv_heads=1, queries_per_kv=4)
CASES: tuple[Case, ...] = (
    LONG,
    # Rows of no pieces, one and many.
    Case(query_lens=(1, 0, 1, 1), seq_lens=(900, 0, 40, 500), head_size=128, queries_per_kv=2, sinks=True, dtype=torch.bfloat16),
    Case(query_lens=(2, 2), seq_lens=(900, 333), head_size=96, queries_per_kv=3, window=400, dtype=torch.float32),
    replace(LONG, head_size=64, output=torch.float8_e4m3fn, smoothing="mean"),
    replace(LONG, head_size=256, queries_per_kv=1, softcap=9.0),
    replace(LONG, head_size=64, head_size_v=128, alibi=True),
)


@contextmanager
def merging(monkeypatch: pytest.MonkeyPatch, choice: Merge) -> Iterator[set[int]]:
    """Calls in the ``with`` block are merged so. Gives the numbers of slices of their launches."""
    slices: set[int] = set()
    start = Launched.start

    def noted(self: Launched, kernel: Any, grid: Any, *arguments: Any, **constants: Any) -> None:
        if isinstance(constants.get("TILE"), MergeTile):
            slices.add(constants["TILE"].slices)
        start(self, kernel, grid, *arguments, **constants)

    with monkeypatch.context() as patch, ops.planning_with(Table("", {"merge": (Entry({}, choice),)})):
        patch.setattr(Launched, "start", noted)
        yield slices


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[..., set[int]]:
    """Fails unless a mode reads a case as float64 attention does, within the suite's budgets; gives the slices of its merges."""

    def run(mode: str, case: Case, place: str, choice: Merge) -> set[int]:
        where = places.enter(place, monkeypatch)
        built = scene.build(case, get_backend(mode), where.device).fill()
        # Without the scene's padding rows, which would make one kind of rows a mixed batch.
        own = {"q": built.q[: sum(case.query_lens)]}
        with merging(monkeypatch, choice) as slices:
            out = built.read(**own)
        SUITES[mode]().assert_exact(built.backend, built, where, out, **own)
        return slices

    return run


@pytest.mark.parametrize("place", places.params("interpret", "gpu"))
@pytest.mark.parametrize("slices", [2, 8])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("mode", sorted(SUITES))
def test_a_row_in_slices(mode: str, case: Case, slices: int, place: str, check: Callable[..., set[int]]) -> None:
    choice = Merge(few=1, pieces=32, blocks=2, slices=slices, warps=4)
    most = {"int4_per_token_head": 4}.get(mode, 8)  # of a rotated row, no more than it has streams
    assert check(mode, case, place, choice) == {min(slices, most)}


@pytest.mark.parametrize("place", places.params("interpret", "gpu"))
@pytest.mark.parametrize("mode", ["none", "int8_per_token_head", "int4_per_token_head", "int2_per_token_head"])
def test_eight_rows_together(mode: str, place: str, check: Callable[..., set[int]]) -> None:
    """Slices are of rows that are merged one by one: others have the same programs as ever, and of slices nothing to do."""
    assert check(mode, LONG, place, Merge(few=64, pieces=32, blocks=1, slices=2, warps=4)) == {2}
