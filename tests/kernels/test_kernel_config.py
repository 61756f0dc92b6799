"""What kernels are compiled for, and that Triton's cache on disk tells kernels apart by all of it."""

import ast
import json
from dataclasses import fields, replace
from pathlib import Path
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


def kernel(C): ...  # type: ignore[no-untyped-def]  # noqa: N803


def on_disk(constant: Any) -> str:
    """What Triton would look for in its cache, for a kernel with this compile-time argument."""
    return ASTSource(JITFunction(kernel), {"C": "constexpr"}, {"C": constant}).hash()


def test_every_field_is_part_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """And this version's source: properties decide what a kernel is as fields do, and Triton does not see the code of either."""
    parts = {name: with_ones(kind) for name, kind in PARTS.items()}
    read = with_ones(config.ReadConfig, **parts)
    others = [(with_ones(kind), replace(with_ones(kind), **{fields(kind)[0].name: 2})) for kind in CONSTANTS]
    for part, kind in PARTS.items():
        others += [(read, replace(read, **{part: replace(parts[part], **{field.name: 2})})) for field in fields(kind)]
    here = [on_disk(one) for one, _ in others]
    for seen, (one, other) in zip(here, others, strict=True):
        again = replace(one)
        assert seen == on_disk(again) != on_disk(other) and hash(one) == hash(again) and one == again != other
        assert json.dumps(one) != json.dumps(other)
    monkeypatch.setattr(formats, "SOURCE", "an earlier version's")
    assert not {on_disk(one) for one, _ in others} & set(here)


def test_the_source_is_of_all_modules_that_say_what_a_kernel_is() -> None:
    """What the constants' files import of kernels' files, but for what makes the key."""
    imported = {
        node.module.rpartition(".")[2] + ".py"
        for name in formats.SOURCES
        for node in ast.walk(ast.parse(Path(formats.__file__).with_name(name).read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("kvq_core.")
    }
    assert imported - {"cache_keys.py"} <= set(formats.SOURCES)


def test_a_hook_s_source_is_part_of_a_kernel() -> None:
    """Triton sees the source of what a kernel names, but not of the jit functions among its constants."""

    def format_of(source: str) -> formats.Format:
        hook = JITFunction(kernel)
        hook._unsafe_update_src(f"def kernel(C):\n    {source}\n")
        plane = formats.PlaneFormat("test", ways=2, unpack=hook)
        return formats.Format(plane, plane)

    assert on_disk(format_of("pass")) == on_disk(format_of("pass")) != on_disk(format_of("return C"))
