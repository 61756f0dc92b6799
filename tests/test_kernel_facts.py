"""What kernels are compiled for, and that Triton's cache on disk tells kernels apart by all of it."""

from dataclasses import fields, replace
from typing import Any

import pytest
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kvq_core.kernels import facts

pytestmark = pytest.mark.quick
CONSTANTS = (facts.ReadConfig, facts.WriteConfig, facts.MergeTile)


def kernel(C):  # type: ignore[no-untyped-def]  # noqa: N803
    pass


def on_disk(constant: Any) -> str:
    """What Triton would look for in its cache, for a kernel with this compile-time argument."""
    return ASTSource(JITFunction(kernel), {"C": "constexpr"}, {"C": constant}).hash()


@pytest.mark.parametrize("kind", CONSTANTS)
def test_another_version_s_kernels_are_not_found(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Properties decide what a kernel is as fields do, and Triton by itself does not see the code of either."""
    constant = kind(**{field.name: 1 for field in fields(kind)})
    here = on_disk(constant)
    assert here == on_disk(replace(constant)) != on_disk(replace(constant, **{fields(kind)[0].name: 2}))
    monkeypatch.setattr(facts, "SOURCE", "an earlier version's")
    assert on_disk(constant) != here
