"""``kvq bench``: where it finds the suite, what it hands on, and that a wheel carries the suite. The suite has tests of its own."""

import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from kvq_core.cli import suite
from kvq_core.cli.app import app

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.quick


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["bench", *arguments], prog_name="kvq")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert "Traceback" not in done.stderr
    return done.exit_code, done.stderr


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A machine that seems to have a GPU: the commands that would run there, each ending with status 3."""
    commands: list[list[str]] = []

    def start(command: list[str]) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=3)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(suite.subprocess, "run", start)
    return commands


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, said = run("--quick")
    assert status == 2 and "torch sees none here (" in said and "kvq eval" in said


def test_bad_input_is_refused_before_anything_runs(started: list[list[str]]) -> None:
    assert run("--modes", "int9")[0] == 2
    status, said = run("--compare", "/no/such.json")
    assert status == 2 and "'/no/such.json' does not exist" in said
    assert not started


def test_options_and_status_are_handed_on(started: list[list[str]], tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text("{}")
    status, _ = run("--modes", "int4,int8", "--settings", "decode", "--out", "new", "--compare", str(old), "--no-peers", "--quick")
    ((python, script, *given),) = started
    assert (status, python, Path(script)) == (3, sys.executable, ROOT / "benchmarks" / "run.py")
    import run as benchmarks

    options = benchmarks.arguments(given)
    assert (options.modes, options.settings, options.quick, options.no_peers) == (["int4", "int8"], "decode", True, True)
    assert (options.out, options.compare) == (Path("new"), old)


def test_a_package_without_the_suite_says_what_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, started: list[list[str]]) -> None:
    monkeypatch.setattr(suite, "__file__", str(tmp_path / "kvq_core" / "cli" / "suite.py"))
    status, said = run()
    assert status == 2 and "the benchmark suite is not beside" in said and not started


def test_the_wheel_carries_the_suite(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT / "packages" / "kvq-core", check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stat().st_size < 1_000_000
    with zipfile.ZipFile(wheel) as content:
        content.extractall(tmp_path / "site")
    carried = tmp_path / "site" / "kvq_core" / "bench"
    assert {file.name for file in carried.glob("*.py")} == {file.name for file in (ROOT / "benchmarks").glob("*.py")}
    plans = ROOT / "packages" / "kvq-core" / "src" / "kvq_core" / "plan"
    assert {file.name for file in (tmp_path / "site" / "kvq_core" / "plan").iterdir()} >= {file.name for file in plans.glob("*.*")}
    done = subprocess.run([sys.executable, str(carried / "run.py"), "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "--settings" in done.stdout, done.stderr
