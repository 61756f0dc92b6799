"""kvq's conformance suite, shipped so that a mode written elsewhere is held to the same tests as ours.

It needs pytest and hypothesis: ``pip install "./packages/kvq-core[testing]"`` in a checkout. ::

    # conftest.py of a mode that has kernels, before anything imports triton
    from kvq_core.testing.places import choose_interpreter
    choose_interpreter()

    # test_int3.py
    from kvq_core.testing import BackendTests

    class TestInt3(BackendTests):
        mode = "int3"

Each test runs in up to three *places* (:mod:`~kvq_core.testing.places`): ``eager`` (plain torch on the CPU), ``interpret`` (the Triton
kernels, interpreted on the CPU) and ``gpu`` (the kernels compiled; marker ``gpu``). What is attended to is a
:class:`~kvq_core.testing.cases.Case`, built into poisoned pages by :mod:`~kvq_core.testing.scene`, and judged against float64 attention
(:mod:`~kvq_core.testing.oracle`) within a derived error budget (:mod:`~kvq_core.testing.budgets`).
"""

import pytest

_PARTS = (
    "codec_tests",
    "determinism_tests",
    "extreme_tests",
    "fuzz_tests",
    "input_tests",
    "lse_tests",
    "memory_tests",
    "read_tests",
    "subject",
    "suite",
    "torch_tests",
    "write_tests",
)
# Otherwise a failed assert of the suite says nothing but AssertionError where it is installed from a wheel.
pytest.register_assert_rewrite(*(f"{__name__}.{part}" for part in _PARTS))

from kvq_core.testing.cases import Case  # noqa: E402
from kvq_core.testing.suite import BackendTests, ComposedTests, TwoScaleTests  # noqa: E402

__all__ = ["BackendTests", "Case", "ComposedTests", "TwoScaleTests"]
