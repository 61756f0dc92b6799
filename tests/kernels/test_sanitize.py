"""compute-sanitizer's output is counted by kernel, a run without a verdict is reported, and the slice computes the right results."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvq_core.environment import cuda_tool
from kvq_core.testing import sanitize
from kvq_core.testing.sanitize import ELSEWHERE, FOUND, errors_of, judge, table
from kvq_core.testing.sanitizer_slice import REPORT

MEMCHECK = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 2 bytes
=========     at attend+0x1a40 in read.py:60
=========     by thread (3,0,0) in block (1,0,0)
=========     Access to 0x7f2c3a800200 is out of bounds
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: launch in launcher.so
=========
========= Invalid __global__ write of size 4 bytes
=========     at 0x90 in write
=========     by thread (0,0,0) in block (0,0,0)
=========
========= Invalid __global__ read of size 2 bytes
=========     at attend+0x1a40 in read.py:60
=========
========= ERROR SUMMARY: 3 errors
"""
RACECHECK = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at combine_kernel+0x2f0 in splits.py:60
=========     and Read access at combine_kernel+0x310 in splits.py:61 [64 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
INITCHECK = """\
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at attend+0x600 in tiles.py:210
=========
========= ERROR SUMMARY: 5 errors
"""
CLEAN = "========= COMPUTE-SANITIZER\n" + REPORT + '{"attend": 19, "write": 14}\n========= ERROR SUMMARY: 0 errors\n'


def test_errors_are_counted_by_kernel() -> None:
    assert errors_of(MEMCHECK) == ({"attend": 2, "write": 1}, True)
    assert errors_of(RACECHECK) == ({"combine_kernel": 1}, True)
    assert errors_of(INITCHECK) == ({"attend": 1, ELSEWHERE: 4}, True)
    assert errors_of(CLEAN) == ({}, True)


def test_outcomes() -> None:
    assert judge("memcheck", "int4", 0, CLEAN).clean
    assert judge("memcheck", "int4", 0, CLEAN).launches == {"attend": 19, "write": 14}
    bad = judge("memcheck", "int4", FOUND, CLEAN.replace("ERROR SUMMARY: 0 errors", "") + MEMCHECK)
    assert not bad.clean and not bad.trouble and bad.errors == {"attend": 2, "write": 1}
    # Not clean: a status for errors of which none was parsed, a slice that failed, and a tool without a summary.
    assert judge("racecheck", "int4", FOUND, CLEAN).errors == {ELSEWHERE: 1}
    assert "status 1" in judge("memcheck", "int4", 1, "Traceback ...").trouble
    assert "no summary" in judge("memcheck", "int4", 0, REPORT + "{}").trouble
    assert judge("", "int4", 0, REPORT + "{}").clean
    rows = table([bad])
    assert "memcheck" in rows and "attend" in rows and "14" in rows


def test_the_binary_is_found_where_toolkits_put_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    binary = tmp_path / "bin" / "compute-sanitizer"
    binary.parent.mkdir()
    binary.write_text("#!/bin/sh\n")
    assert cuda_tool("compute-sanitizer") != str(binary), "it cannot be run"
    binary.chmod(0o755)
    assert cuda_tool("compute-sanitizer") == str(binary)


def test_without_the_tool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sanitize, "cuda_tool", lambda name: None)
    assert sanitize.main(["none"]) == 2
    assert "need compute-sanitizer" in capsys.readouterr().err


def test_the_slice_gives_the_right_results() -> None:
    """In the interpreter, where no tool watches: what it launches and that it compares."""
    command = [sys.executable, "-W", "ignore", "-m", "kvq_core.testing.sanitizer_slice", "none", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert judge("", "none", 0, done.stdout).launches == {"write": 15, "attend": 21, "combine_kernel": 9}
