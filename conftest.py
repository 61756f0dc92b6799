"""Settings for every test of the workspace."""

import gc
import os
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

# Workers share the cores, and torch's threads in each would only wait for those of the others. Read when torch is imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# The interpreter is slow and its first call slower: time says nothing about an example. The same examples run every time.
settings.register_profile("kvq", deadline=None, derandomize=True, max_examples=30)
settings.load_profile("kvq")

ASKED_TO_INTERPRET = os.environ.get("TRITON_INTERPRET")

GPU_TIMEOUT = 180
"""Seconds. Kernels compile in two or three and run in none: what takes longer hangs."""
GPU_KEPT = 1 << 30
"""Bytes of the GPU that a process may keep for its next test. It shares them with others."""


@cache
def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


class Passed:
    """Adds the tests that pass to a file, so that a suite can go on where a limit ended it."""

    def __init__(self, file: Path) -> None:
        self.file, self.called = file, set[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.called.add(report.nodeid)
        elif report.when == "teardown" and report.passed and report.nodeid in self.called:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(f"{report.nodeid}\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--passed", type=Path, metavar="FILE", help="leave out the tests that FILE names, and add those that pass")


def pytest_configure(config: pytest.Config) -> None:
    # Of several processes the one that all report to.
    if config.option.passed and not hasattr(config, "workerinput"):
        config.option.passed.touch()
        config.pluginmanager.register(Passed(config.option.passed))


def pytest_report_header() -> str:
    return "GPU: yes" if has_gpu() else "GPU: none, so that tests marked gpu are left out"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Under ``-m quick``, import no file without such a test: what those need (transformers, say) takes longer than the tests."""
    if config.option.markexpr == "quick" and collection_path.suffix == ".py":
        return "mark.quick" not in collection_path.read_text(encoding="utf-8") or None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give the GPU's tests their timeout, or leave them out where there is none; asked for by name they are skipped, and say why.

    The whole compile matrix is left out, too, where nobody asks for it."""
    if "matrix" not in config.option.markexpr:
        whole = [item for item in items if item.get_closest_marker("matrix")]
        config.hook.pytest_deselected(items=whole)
        items[:] = [item for item in items if not item.get_closest_marker("matrix")]
    if config.option.passed:
        passed = set(config.option.passed.read_text(encoding="utf-8").splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
        items[:] = [item for item in items if item.nodeid not in passed]
    # What compiles for a minute begins first: begun last, one worker would wait for the other.
    items.sort(key=lambda item: item.path.name != "test_compile_matrix.py")
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    for item in gpu:
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(GPU_TIMEOUT))
    if not has_gpu() and "gpu" not in config.option.markexpr:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not has_gpu():
        pytest.skip("needs an NVIDIA GPU")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Give back what a large problem took of the GPU, or every process comes to hold as much as its largest."""
    if item.get_closest_marker("gpu") and has_gpu():
        import torch

        if torch.cuda.memory_reserved() > GPU_KEPT:
            torch.cuda.empty_cache()


def pytest_collection_finish() -> None:
    """Refuse to skip every test of a GPU because some module, when imported, asked for the interpreter.

    And spare the garbage collector, at each of its rounds, the hundreds of thousands of objects that modules and tests are made of."""
    if has_gpu() and os.environ.get("TRITON_INTERPRET") != ASKED_TO_INTERPRET:
        raise pytest.UsageError("importing the tests set TRITON_INTERPRET, under which no kernel runs on this GPU: have none set it")
    gc.freeze()
