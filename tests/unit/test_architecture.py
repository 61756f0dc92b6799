"""Which module may import which, read off the syntax tree, and what an import of each package drags in."""

import ast
import functools
import graphlib
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODE_PACKAGES = ("kvq_int2", "kvq_int3", "kvq_int4", "kvq_int8fp8")
FRAMEWORKS = ("kvq_transformers", "kvq_vllm")
MAX_LINES = 400


@functools.cache
def source_files() -> list[Path]:
    return sorted(ROOT.glob("packages/*/src/**/*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).parts[3:]
    return ".".join(parts).removesuffix(".py").removesuffix(".__init__")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@functools.cache
def imports(path: Path) -> list[tuple[int, str]]:
    """Line and absolute target of every import of a file: under TYPE_CHECKING and inside functions too."""
    package = module_name(path).split(".") if path.name == "__init__.py" else module_name(path).split(".")[:-1]
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1], *filter(None, [node.module])] if node.level else [node.module or ""]
            found += [(node.lineno, ".".join([*base, alias.name])) for alias in node.names]
    return found


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


@pytest.mark.quick
def test_the_rules_see_the_files() -> None:
    names = {module_name(path) for path in source_files()}
    assert {"kvq_core", "kvq_core.backend", *MODE_PACKAGES, *FRAMEWORKS} <= names
    targets = {target for _, target in imports(ROOT / "packages/kvq-core/src/kvq_core/registry.py")}
    assert {"os", "importlib.metadata.entry_points", "kvq_core.errors.ArgumentError", "kvq_core.backend.QuantKVBackend"} <= targets
    assert not is_kernels_own("kvq_core.kernels.mma", "kvq_core.plan") and not is_declared("kvq_core.plan", "numpy")


@pytest.mark.quick
def test_files_stay_readable() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in source_files()}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


@functools.cache
def required(extra: str) -> set[str]:
    """What ``kvq-core[extra]`` requires beside ``kvq-core``."""
    project = tomllib.loads((ROOT / "packages/kvq-core/pyproject.toml").read_text())["project"]
    return {re.split(r"[^\w.-]", requirement)[0] for requirement in project["optional-dependencies"][extra]}


def is_declared(module: str, target: str) -> bool:
    """A mode: the core, torch and triton. The core: safetensors too, in its command line what prints and (extra ``plots``) draws, in its
    shipped test suite numpy, what prints and what the extra ``testing`` brings. A framework's package: the core, torch and the framework;
    kernels and modes are the core's business.
    """
    own = module.partition(".")[0]
    declared = {own, "kvq_core", "torch", *sys.stdlib_module_names}
    declared |= {own.removeprefix("kvq_")} if own in FRAMEWORKS else {"triton"}
    if own == "kvq_core":
        declared |= {"safetensors", "fast_hadamard_transform"}  # the latter only if installed
    if within(module, "kvq_core.evaluation.huggingface"):
        declared |= {"transformers", "tokenizers", "kvq_transformers"} | required("models")  # only if installed
    if within(module, "kvq_core.cli"):
        declared |= {"click", "tabulate", "tqdm", "huggingface_hub"} | required("plots")  # the last two only if installed
    if within(module, "kvq_core.testing"):
        declared |= required("testing") | {"numpy", "tabulate", "tqdm"}
    return target.partition(".")[0] in declared


def is_no_mode_nor_framework(module: str, target: str) -> bool:
    """Of the core, but for what evaluates a framework's model, if it is installed."""
    others = MODE_PACKAGES if within(module, "kvq_core.evaluation.huggingface") else (*MODE_PACKAGES, *FRAMEWORKS)
    return not within(module, "kvq_core") or target.partition(".")[0] not in others


def is_kernels_own(module: str, target: str) -> bool:
    return not within(module, "kvq_core.kernels") or not within(target, "kvq_core") or within(target, "kvq_core.kernels")


def is_not_the_test_suite(module: str, target: str) -> bool:
    return within(module, "kvq_core.testing") or not within(target, "kvq_core.testing")


def is_public_of_kernels(module: str, target: str) -> bool:
    """Modes take of the kernels what a third party's may take."""
    own = module.split(".")[0] not in MODE_PACKAGES
    return own or not within(target, "kvq_core.kernels") or within(target, "kvq_core.kernels.api")


@pytest.mark.parametrize("allowed", [is_declared, is_no_mode_nor_framework, is_kernels_own, is_public_of_kernels, is_not_the_test_suite])
def test_every_import_is_allowed(allowed: Callable[[str, str], bool]) -> None:
    found = [(path, line, target) for path in source_files() for line, target in imports(path)]
    assert [f"{path.relative_to(ROOT)}:{line}: {target}" for path, line, target in found if not allowed(module_name(path), target)] == []


def test_imports_run_in_no_circle() -> None:
    """Those that run when a module is imported: not under TYPE_CHECKING, not in functions."""
    names = {module_name(path) for path in source_files()}
    graph: dict[str, set[str]] = {}
    for path in source_files():
        tree = tree_of(path)
        later = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        later += [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
        lines = {line for node in later for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
        targets = {target for line, target in imports(path) if line not in lines}
        # ``from package.module import name``: the module, or a module of that name.
        found = {target if target in names else target.rpartition(".")[0] for target in targets}
        graph[module_name(path)] = (found & names) - {module_name(path)}
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize(
    ("program", "absent"),
    [
        # vLLM imports its plug-ins whether they are used or not.
        ("import kvq_core, kvq_vllm", {"torch", "triton", "vllm", "numpy", "click", "tabulate", "tqdm", *MODE_PACKAGES}),
        # Where kernels are to be interpreted, that is said before triton is imported, by what is in ``testing``.
        ("from kvq_core import *\nfrom kvq_core.testing import BackendTests, places", {"triton", *MODE_PACKAGES}),
        (f"import {', '.join(MODE_PACKAGES)}", {"triton"}),
    ],
)
def test_what_an_import_drags_in(program: str, absent: set[str]) -> None:
    report = f"{program}\nimport json, sys\nprint(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not absent & set(json.loads(done.stdout))


def test_users_meet_errors_not_asserts() -> None:
    """``python -O`` drops asserts. The shipped test suite may use them, and files of jit functions (where they are Triton's)."""
    found = []
    for path in source_files():
        if not within(module_name(path), "kvq_core.testing") and "\n@triton.jit" not in path.read_text():
            found += [f"{path.relative_to(ROOT)}:{node.lineno}" for node in ast.walk(tree_of(path)) if isinstance(node, ast.Assert)]
    assert not found
