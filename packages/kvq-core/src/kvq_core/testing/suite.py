"""The conformance suite: subclass :class:`BackendTests`, name the mode, and pytest does the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest
import torch

from kvq_core.testing.codec_tests import CodecTests
from kvq_core.testing.determinism_tests import DeterminismTests
from kvq_core.testing.extreme_tests import ExtremeTests
from kvq_core.testing.fuzz_tests import FuzzTests
from kvq_core.testing.lse_tests import LSETests
from kvq_core.testing.memory_tests import MemoryTests
from kvq_core.testing.ordered_tests import OrderedTests
from kvq_core.testing.read_tests import ReadTests
from kvq_core.testing.subject import Subject
from kvq_core.testing.torch_tests import TorchTests
from kvq_core.testing.write_tests import WriteTests

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend


class DoorTests(ExtremeTests, WriteTests, ReadTests, DeterminismTests, OrderedTests, LSETests, MemoryTests, TorchTests, FuzzTests):
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


class TwoScaleTests(Subject):
    """Of a mode that fits one scale to a row as a key and another to it as a value: keys keep their length, values have no bias."""

    largest_factor: ClassVar[float]
    """How much longer the scale may make levels than the row that they are fitted to is."""
    scale_bits: ClassVar[int] = 24
    """Significant bits of the scales."""

    @pytest.mark.quick
    @pytest.mark.parametrize("size", [64, 80, 128, 256])
    def test_keys_are_as_long_and_values_without_bias(self, backend: QuantKVBackend, size: int) -> None:
        x = torch.randn(64, size, generator=torch.Generator().manual_seed(size)) * torch.logspace(-20, 15, 64)[:, None]
        x[1::4] += x[1::4].abs().amax(-1, keepdim=True)
        x[2::4, 5] *= 100
        length = x.double().square().sum(-1)
        # Of rows and the levels they take: what the bound leaves where levels fit a row badly, and 1 elsewhere.
        level = backend.decode(backend.encode(x)[0], torch.ones(64)).double()
        cosine = (level * x).sum(-1) / level.norm(dim=-1) / length.sqrt()
        of_key, of_value = ((self.largest_factor * share).clamp(max=1) for share in (cosine, cosine.square()))
        assert float((of_value < 1).double().mean()) < 0.5
        key, value = (backend.decode(*encode(x)).double() for encode in (backend.encode, backend.encode_value))
        tolerance = 5e-6 + 2.0**-self.scale_bits
        torch.testing.assert_close(key.norm(dim=-1), length.sqrt() * of_key, rtol=tolerance, atol=0)
        torch.testing.assert_close((value * x).sum(-1), length * of_value, rtol=tolerance, atol=0)
