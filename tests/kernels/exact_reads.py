"""What tests of one way to read share: a read that must be attention, and what its launches were compiled for."""

from typing import Any

import pytest

import test_backends
from kvq_core import get_backend
from kvq_core.call import ops
from kvq_core.plan import Table
from kvq_core.testing import places, scene
from kvq_core.testing.cases import Case
from kvq_core.testing.launches import noted_constants
from kvq_core.testing.scene import Scene

SUITES = {suite.mode: suite for name, suite in vars(test_backends).items() if name.startswith("Test")}
NOBODY_S = Table("", {})


def rows_alone(built: Scene) -> dict[str, Any]:
    """Without the scene's padding rows, so that a batch of one kind is seen to be one."""
    return {"q": built.q[: sum(built.case.query_lens)]}


def read_exactly(mode: str, case: Case, place: str, monkeypatch: pytest.MonkeyPatch, table: Table = NOBODY_S) -> list[dict[str, Any]]:
    """The constants of a read's launches, planned by ``table`` first. Fails unless it reads as float64 attention does, within the suite's
    error budgets."""
    where = places.enter(place, monkeypatch)
    built = scene.build(case, get_backend(mode), where.device).fill()
    own = rows_alone(built)
    # A call like an earlier one would repeat its launches, and note none: planning by a table forgets them.
    with ops.planning_with(table), noted_constants() as constants:
        out = built.read(**own)
    SUITES[mode]().assert_exact(built.backend, built, where, out, **own)
    return constants
