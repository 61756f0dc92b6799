"""A test that cannot fail is a defect: each mutant of mutants.py must fail the test it names, and the controls must pass them all.

So must the mutants of kvq's own sources, some of them here; and valid modes, whatever their packing and head sizes, must pass.
"""

import ast
import contextlib
import io
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest

import mutants
import odd_modes
import source_mutants

SOME_MUTANTS = (
    "last block lost",
    "window a key too narrow",
    "accumulator not rescaled",
    "last of many splits lost",
    "slot after the last one",
    "int8 encoded towards zero",
    "planes need not match",
    "batch not validated",
)
CAUGHT_BY = {name: mode.caught_by for name, mode in mutants.BACKENDS.items()}  # type: ignore[attr-defined]


@dataclass
class Run:
    """A pytest plugin that runs the tests whose ids hold all words of one of ``wanted``, and counts."""

    wanted: list[tuple[str, ...]]
    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """What their failures say."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        def named(item: pytest.Item) -> bool:
            return "gpu" not in item.nodeid and any(all(word in item.nodeid for word in words) for words in self.wanted)

        items[:] = [item for item in items if named(item)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.failed.append(crash.message if crash else str(report.longrepr))
        elif report.passed and report.when == "call":
            self.passed.append(report.nodeid)


def run(name: str, wanted: list[tuple[str, ...]], *more: str, modes: ModuleType = mutants) -> tuple[Run, str]:
    """Run tests of the suite of one of ``modes``, in a pytest within this one."""
    seen, said, file = Run(wanted), io.StringIO(), Path(str(modes.__file__))
    # Without this project's configuration: its plugins are at work outside already. The last two would run the garbage collector.
    plain = ["-c", "/dev/null", "--rootdir", str(file.parent), "--import-mode=importlib", "-q", "--tb=line", "--assert=plain"]
    plugins = ("cacheprovider", "xdist", "timeout", "warnings", "unraisableexception", "threadexception")
    off = [flag for plugin in plugins for flag in ("-p", f"no:{plugin}")]
    with contextlib.redirect_stdout(said):
        pytest.main([*plain, *off, "-o", f"python_classes=Test{name}", *more, str(file)], plugins=[seen])
    return seen, said.getvalue()


@pytest.mark.parametrize("name", [name for name, words in CAUGHT_BY.items() if words])
def test_mutant_is_caught(name: str) -> None:
    seen, said = run(name, [CAUGHT_BY[name]], "--maxfail=1")
    assert seen.failed, f"{len(seen.passed)} tests passed with this mistake in the mode:\n{said[-2000:]}"
    assert seen.failed[0].startswith(("AssertionError", "assert ")), f"the mutant itself fails: {seen.failed[0]}"


@pytest.mark.parametrize("name", [name for name, words in CAUGHT_BY.items() if not words])
def test_control_passes(name: str) -> None:
    """Mutants fail for their mistake, and not for being mutants."""
    seen, said = run(name, [words for words in CAUGHT_BY.values() if words])
    assert not seen.failed, said[-3000:]
    assert len(seen.passed) > 50


@pytest.mark.parametrize("name", [mode.__name__ for mode in odd_modes.MODES])
def test_modes_of_any_packing_and_head_size_pass(name: str) -> None:
    seen, said = run(name, [("eager",), ("test_contract",), ("test_packed_head_size",)], "-m", "quick", modes=odd_modes)
    assert not seen.failed, said[-3000:]
    assert len(seen.passed) > 20


def test_mutants_of_the_sources_are_caught() -> None:
    """``python tests/kernels/source_mutants.py`` runs them all."""
    command = [sys.executable, source_mutants.__file__, "--only", *SOME_MUTANTS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(SOME_MUTANTS)} mutants, 0 not caught" in done.stderr


@pytest.mark.quick
def test_source_mutants_still_apply_and_the_page_lists_them() -> None:
    """The text that a mutant edits occurs exactly once, and the file is still Python; each of ``SOME_MUTANTS`` names one."""
    for mutant in source_mutants.MUTANTS:
        ast.parse(mutant.mutated())
    for words in SOME_MUTANTS:
        assert [words in mutant.name for mutant in source_mutants.MUTANTS].count(True) == 1, words
    page = (source_mutants.ROOT / "docs" / "dev" / "mutants.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| (.+?) \| `(.+?)` \| (\w+) \| (\w+) \|", page, re.MULTILINE)
    assert listed == [(mutant.name, mutant.file, mutant.mode, mutant.catcher) for mutant in source_mutants.MUTANTS]
