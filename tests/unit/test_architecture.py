"""Which module may import which, read off the syntax tree, and what an import of each package drags in."""

import ast
import functools
import graphlib
import importlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODE_PACKAGES = ("kvq_int2", "kvq_int3", "kvq_int4", "kvq_int8fp8")
FRAMEWORKS = ("kvq_transformers", "kvq_vllm")
MAX_LINES = 400
ABSENT = (
    # vLLM imports its plug-ins whether they are used or not.
    ("import kvq_core, kvq_vllm", {"torch", "triton", "vllm", "numpy", "click", "tabulate", "tqdm", *MODE_PACKAGES}),
    # Where kernels are to be interpreted, that is said before triton is imported, by what is in ``testing``.
    ("from kvq_core import *; from kvq_core.testing import BackendTests, places", {"triton", *MODE_PACKAGES}),
    (f"import {', '.join(MODE_PACKAGES)}", {"triton"}),
)
"""Imports, one after the other, and what is not there then."""
PROJECT = tomllib.loads((ROOT / "packages/kvq-core/pyproject.toml").read_text())["project"]
REQUIRED = {extra: {re.split(r"[^\w.-]", one)[0] for one in packages} for extra, packages in PROJECT["optional-dependencies"].items()}


@functools.cache
def sources() -> dict[str, tuple[Path, ast.Module]]:
    """Each module's file and tree."""
    found = {}
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        name = ".".join(path.relative_to(ROOT).parts[3:]).removesuffix(".py").removesuffix(".__init__")
        found[name] = path.relative_to(ROOT), ast.parse(path.read_text())
    return found


@functools.cache
def imports(module: str) -> list[tuple[int, str]]:
    """Line and absolute target of every import of a module: under TYPE_CHECKING and inside functions too."""
    path, tree = sources()[module]
    package = module.split(".")[: None if path.name == "__init__.py" else -1]
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1], *filter(None, [node.module])] if node.level else [node.module or ""]
            found += [(node.lineno, ".".join([*base, alias.name])) for alias in node.names]
    return found


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def is_allowed(module: str, target: str) -> bool:
    """A mode: the core, torch and triton. The core: safetensors too, in its command line what prints and (extra ``plots``) draws, in its
    shipped test suite numpy, what prints and what the extra ``testing`` brings. A framework's package: the core, torch and the framework;
    kernels and modes are the core's business.
    """
    own, other = module.partition(".")[0], target.partition(".")[0]
    declared = {own, "kvq_core", "torch", *sys.stdlib_module_names} | ({own.removeprefix("kvq_")} if own in FRAMEWORKS else {"triton"})
    if own == "kvq_core":
        declared |= {"safetensors", "fast_hadamard_transform"}  # the latter only if installed
    if within(module, "kvq_core.evaluation.huggingface"):
        declared |= {"transformers", "tokenizers", "kvq_transformers"} | REQUIRED["models"]  # only if installed
    if within(module, "kvq_core.cli"):
        declared |= {"click", "tabulate", "tqdm", "huggingface_hub"} | REQUIRED["plots"]  # the last two only if installed
    if within(module, "kvq_core.testing"):
        declared |= REQUIRED["testing"] | {"numpy", "tabulate", "tqdm"}
    of_kernels = within(target, "kvq_core.kernels")
    return (
        other in declared
        and (of_kernels or other != "kvq_core" or not within(module, "kvq_core.kernels"))
        # Modes take of the kernels what a third party's may take.
        and (own not in MODE_PACKAGES or not of_kernels or within(target, "kvq_core.kernels.api"))
        and (within(module, "kvq_core.testing") or not within(target, "kvq_core.testing"))
    )


@pytest.mark.quick
def test_the_rules_see_the_files() -> None:
    assert {"kvq_core", "kvq_core.backend", *MODE_PACKAGES, *FRAMEWORKS} <= sources().keys()
    targets = {target for _, target in imports("kvq_core.registry")}
    assert {"os", "importlib.metadata.entry_points", "kvq_core.errors.ArgumentError", "kvq_core.backend.QuantKVBackend"} <= targets
    for module, target in (("kernels.mma", "kvq_core.plan"), ("plan", "numpy"), ("plan", "kvq_int4"), ("plan", "kvq_core.testing.places")):
        assert not is_allowed(f"kvq_core.{module}", target)


@pytest.mark.quick
def test_files_stay_readable() -> None:
    lengths = {path: len((ROOT / path).read_text().splitlines()) for path, _ in sources().values()}
    assert {path: length for path, length in lengths.items() if length > MAX_LINES} == {}


def test_every_import_is_allowed() -> None:
    found = [(module, line, target) for module in sources() for line, target in imports(module)]
    assert [(module, line, target) for module, line, target in found if not is_allowed(module, target)] == []


def test_a_mode_of_another_package_imports_public_names_only() -> None:
    """What ``kvq-int3``, the example, takes from kvq is listed by a package, or documented in the API reference by its module."""
    reference = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for target in (target for module in sources() if within(module, "kvq_int3") for _, target in imports(module)):
        package, _, name = target.rpartition(".")
        if within(package, "kvq_core"):
            assert name in getattr(importlib.import_module(package), "__all__", ()) or f":: {target}" in reference, target


def test_imports_run_in_no_circle() -> None:
    """Those that run when a module is imported: not under TYPE_CHECKING, not in functions."""
    graph: dict[str, set[str]] = {}
    for module, (_, tree) in sources().items():
        later = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        later += [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
        lines = {line for node in later for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
        # ``from package.module import name``: the module, or a module of that name.
        found = {target if target in sources() else target.rpartition(".")[0] for line, target in imports(module) if line not in lines}
        graph[module] = (found & sources().keys()) - {module}
    graphlib.TopologicalSorter(graph).prepare()


def test_what_an_import_drags_in() -> None:
    report = "print(json.dumps([*{name.partition('.')[0] for name in sys.modules}]))"
    program = "\n".join(["import json, sys", *(f"{imported}\n{report}" for imported, _ in ABSENT)])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for (imported, absent), told in zip(ABSENT, done.stdout.splitlines(), strict=True):
        assert not absent & {*json.loads(told)}, imported


def test_users_meet_errors_not_asserts() -> None:
    """``python -O`` drops asserts. The shipped test suite may use them, and files of jit functions (where they are Triton's)."""
    files = [found for module, found in sources().items() if not within(module, "kvq_core.testing")]
    plain = [(path, tree) for path, tree in files if "\n@triton.jit" not in (ROOT / path).read_text()]
    assert not [(path, node.lineno) for path, tree in plain for node in ast.walk(tree) if isinstance(node, ast.Assert)]
