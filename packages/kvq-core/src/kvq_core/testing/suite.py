"""The conformance suite: subclass :class:`BackendTests`, name the mode, and pytest does the rest."""

from __future__ import annotations

from typing import ClassVar

import pytest

from kvq_core.testing.codec_tests import CodecTests
from kvq_core.testing.determinism_tests import DeterminismTests
from kvq_core.testing.extreme_tests import ExtremeTests
from kvq_core.testing.fuzz_tests import FuzzTests
from kvq_core.testing.input_tests import InputTests
from kvq_core.testing.lse_tests import LSETests
from kvq_core.testing.memory_tests import MemoryTests
from kvq_core.testing.read_tests import ReadTests
from kvq_core.testing.torch_tests import TorchTests
from kvq_core.testing.write_tests import WriteTests


class BackendTests(
    CodecTests, ExtremeTests, WriteTests, ReadTests, DeterminismTests, InputTests, LSETests, MemoryTests, TorchTests, FuzzTests
):
    """Every test that a mode must pass.

    Set ``mode``; override ``space``, ``round_trip_bound``, ``rounding``, ``operand_dtype`` and ``scale_tolerance`` of
    :class:`~kvq_core.testing.subject.Subject` where your mode's mathematics says more than the defaults.
    """

    # The interpreter computes with numpy, which speaks of every inf and NaN that the tests put there.
    pytestmark: ClassVar[list[pytest.MarkDecorator]] = [pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")]
