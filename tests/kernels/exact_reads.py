"""A read that must be float64 attention, and what its launches are compiled for."""

from typing import Any

import pytest
import test_int3

import test_backends
from kvq_core import get_backend
from kvq_core.call import ops
from kvq_core.plan import Table
from kvq_core.testing import places, scene
from kvq_core.testing.cases import Case
from kvq_core.testing.launches import noted_constants
from kvq_core.testing.scene import Scene

SUITES = {suite.mode: suite for tests in (test_backends, test_int3) for name, suite in vars(tests).items() if name.startswith("Test")}
EMPTY_TABLE = Table("", {})


def without_padding(built: Scene) -> dict[str, Any]:
    """The read's rows without the scene's padding rows, which would hide that all sequences are alike."""
    return built.without_padding()


def read_exactly(mode: str, case: Case, place: str, monkeypatch: pytest.MonkeyPatch, table: Table = EMPTY_TABLE) -> list[dict[str, Any]]:
    """The constants of a read's launches, planned by ``table`` first. Fails unless the result is float64 attention within the suite's
    error budgets."""
    where = places.enter(place, monkeypatch)
    built = scene.build(case, get_backend(mode), where.device).fill()
    own = without_padding(built)
    # A call like an earlier one would replay its launches, and note none: entering a table forgets them.
    with ops.planning_with(table), noted_constants() as constants:
        out = built.read(**own)
    SUITES[mode]().assert_exact(built.backend, built, where, out, **own)
    return constants
