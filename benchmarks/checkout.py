"""Run from a source checkout that is not installed: its packages on the path, their modes registered from their own pyproject files."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def use() -> None:
    """Make ``kvq_core`` and every mode of this checkout available, unless they are installed."""
    sources = [str(path) for path in sorted(ROOT.glob("packages/*/src"))]
    if importlib.util.find_spec("kvq_core") is None:
        sys.path[:0] = sources
    from kvq_core import has_backend, register_backend

    for file in sorted(ROOT.glob("packages/*/pyproject.toml")):
        points = tomllib.loads(file.read_text())["project"].get("entry-points", {}).get("kvq.backends", {})
        for mode, value in points.items():
            if has_backend(mode):
                continue
            module, _, name = value.partition(":")
            if str(file.parent / "src") not in sys.path:
                sys.path.insert(0, str(file.parent / "src"))
            register_backend(getattr(importlib.import_module(module), name))
