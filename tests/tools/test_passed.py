"""A suite in parts: ``--passed`` of the workspace's conftest.py."""

import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parents[2] / "conftest.py"
TESTS = """
import pytest

@pytest.fixture
def bad_end():
    yield
    assert False

@pytest.mark.parametrize("name", ["a", "b c", "d[0]"])
def test_good(name): pass

def test_bad(): assert False

def test_good_with_a_bad_end(bad_end): pass
"""


def test_what_has_passed_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = [gpu, matrix]")
    for last_line, workers in (("1 failed, 4 passed, 1 error", "2"), ("1 failed, 1 passed, 3 deselected, 1 error", "0")):
        given = ("-q", "-n", workers, "-p", "no:cacheprovider", "--rootdir", ".", "--passed", "passed", ".")
        ran = subprocess.run([sys.executable, "-m", "pytest", *given], capture_output=True, text=True, cwd=tmp_path)
        assert ran.stdout.splitlines()[-1].startswith(last_line), ran.stdout + ran.stderr
    assert len((tmp_path / "passed").read_text().splitlines()) == 3
