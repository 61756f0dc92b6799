"""The conformance suite: subclass :class:`BackendTests`, name the mode, and pytest does the rest."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from kvq_core.testing.codec_tests import CodecTests
from kvq_core.testing.determinism_tests import DeterminismTests
from kvq_core.testing.extreme_tests import ExtremeTests
from kvq_core.testing.fuzz_tests import FuzzTests
from kvq_core.testing.input_tests import InputTests
from kvq_core.testing.lse_tests import LSETests
from kvq_core.testing.memory_tests import MemoryTests
from kvq_core.testing.read_tests import ReadTests
from kvq_core.testing.subject import Subject
from kvq_core.testing.torch_tests import TorchTests
from kvq_core.testing.write_tests import WriteTests


class DoorTests(ExtremeTests, WriteTests, ReadTests, DeterminismTests, InputTests, LSETests, MemoryTests, TorchTests, FuzzTests):
    """What a mode's two doors must pass."""

    # The interpreter computes with numpy, which speaks of every inf and NaN that the tests put there.
    pytestmark: ClassVar[list[pytest.MarkDecorator]] = [pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")]


class ComposedTests(DoorTests):
    """Every test that a mode composed of two must pass, beside those of each: name it, and the tests of both."""

    key_tests: ClassVar[type[Subject]]
    value_tests: ClassVar[type[Subject]]

    def of_half(self, half: str) -> Subject:
        return self.key_tests() if half == "key" else self.value_tests()

    def operand_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.key_tests().operand_dtype(dtype)


class BackendTests(CodecTests, DoorTests):
    """Every test that a mode must pass.

    Set ``mode``; override ``space``, ``round_trip_bound``, ``rounding``, ``operand_dtype`` and ``scale_tolerance`` of
    :class:`~kvq_core.testing.subject.Subject` where your mode's mathematics says more than the defaults.
    """
