"""What kernels are compiled for, and that Triton's cache on disk tells kernels apart by all of it."""

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kvq_core.kernels import config, formats

pytestmark = pytest.mark.quick
PARTS = {"shape": config.Shape, "tile": config.Tile, "features": config.Features}
CONSTANTS = (config.ReadConfig, *PARTS.values(), config.WriteConfig, config.CombineTile, formats.Format, formats.PlaneFormat)


def with_ones(kind: Any, **others: Any) -> Any:
    """An instance of a class of constants whose fields are ``others``, the rest 1."""
    return kind(**{field.name: 1 for field in fields(kind)} | others)


def kernel(C):  # type: ignore[no-untyped-def]  # noqa: N803
    pass


def on_disk(constant: Any) -> str:
    """What Triton would look for in its cache, for a kernel with this compile-time argument."""
    return ASTSource(JITFunction(kernel), {"C": "constexpr"}, {"C": constant}).hash()


@pytest.mark.parametrize("kind", CONSTANTS)
def test_another_version_s_kernels_are_not_found(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Properties decide what a kernel is as fields do, and Triton by itself does not see the code of either."""
    constant = with_ones(kind)
    here = on_disk(constant)
    assert here == on_disk(replace(constant)) != on_disk(replace(constant, **{fields(kind)[0].name: 2}))
    monkeypatch.setattr(formats, "SOURCE", "an earlier version's")
    assert on_disk(constant) != here


@pytest.mark.parametrize(("part", "field"), [(part, field.name) for part, kind in PARTS.items() for field in fields(kind)])
def test_every_field_of_a_part_is_part_of_a_kernel(part: str, field: str) -> None:
    parts = {name: with_ones(kind) for name, kind in PARTS.items()}
    read = with_ones(config.ReadConfig, **parts)
    other = replace(read, **{part: replace(parts[part], **{field: 2})})
    again = replace(read, **{part: replace(parts[part])})
    assert on_disk(read) == on_disk(again) != on_disk(other)
    assert hash(read) == hash(again) and read == again != other and json.dumps(read) != json.dumps(other)


def test_a_hook_s_source_is_part_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton sees the source of what a kernel names, but not of the jit functions among its constants."""

    def format_of(source: str) -> formats.Format:
        hook = JITFunction(kernel)
        hook._unsafe_update_src(f"def kernel(C):\n    {source}\n")
        plane = formats.PlaneFormat("test", ways=2, unpack=hook)
        return formats.Format(plane, plane)

    assert on_disk(format_of("pass")) == on_disk(format_of("pass")) != on_disk(format_of("return C"))
