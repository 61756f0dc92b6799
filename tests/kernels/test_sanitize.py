"""compute-sanitizer's output is counted by kernel, a run without a verdict is reported, and the slice computes the right results."""

import subprocess
import sys

import pytest

from kvq_core.testing import sanitize
from kvq_core.testing.delays import delayed
from kvq_core.testing.sanitize import ELSEWHERE, FOUND, compare, in_words, judge
from kvq_core.testing.sanitizer_slice import REPORT

START = "========= COMPUTE-SANITIZER\n" + REPORT + '{"launches": {"attend": 19, "write": 14}, "results": "5e"}\n'
CLEAN = START + "========= ERROR SUMMARY: 0 errors\n"
MEMCHECK = f"""{START}
========= Invalid __global__ read of size 2 bytes
=========     at attend+0x1a40 in read.py:60
=========     by thread (3,0,0) in block (1,0,0)
========= Invalid __global__ write of size 4 bytes
=========     at 0x90 in write
========= ERROR SUMMARY: 3 errors
"""
RACECHECK = f"""{START}
========= Error: Race reported between Write access at combine_kernel+0x2f0 in splits.py:60
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


@pytest.mark.parametrize(
    ("status", "said", "errors", "trouble"),
    [
        (0, CLEAN, {}, ""),
        (FOUND, MEMCHECK, {"attend": 1, "write": 1, ELSEWHERE: 1}, ""),
        (FOUND, RACECHECK, {"combine_kernel": 1}, ""),
        (FOUND, CLEAN, {ELSEWHERE: 1}, ""),  # a status for errors of which none was parsed
        (1, "Traceback ...", {}, "status 1"),
        (0, START, {}, "no summary"),
    ],
)
def test_outcomes(status: int, said: str, errors: dict[str, int], trouble: str) -> None:
    found = judge("memcheck", "int4", status, said)
    assert found.errors == errors and trouble in found.trouble and bool(found.trouble) == bool(trouble)
    assert len(found.words) == sum(errors.values()) - errors.get(ELSEWHERE, 0)
    assert found.clean == (said == CLEAN and status == 0)


def test_a_kind_of_error_is_told_once() -> None:
    found = judge("memcheck", "int4", FOUND, MEMCHECK + MEMCHECK)
    assert found.words == (
        "Invalid __global__ read of size 2 bytes; at attend+0x1a40 in read.py:60",
        "Invalid __global__ write of size 4 bytes; at 0x90 in write",
    )


@pytest.mark.parametrize(("results", "clean"), [("5e", True), ("5f", False)])
def test_delays_must_not_change_a_bit(results: str, clean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize, "run_slice", lambda tool, mode, sanitizer: judge(tool, mode, 0, START.replace("5e", results)))
    found = compare("delays 1", "int4", "", judge("", "int4", 0, START))
    assert found.clean == clean and not found.trouble
    # What runs it again draws its seed again.
    assert ("int4 --tool delays --seeds 2" in in_words(found)) == (not clean)


def test_delays_are_beside_what_meets() -> None:
    meets = "bar.sync 1, 128;", "mbarrier.arrive.shared::cta.b64 _, [%r1];", "wgmma.wait_group.sync.aligned 0;", "griddepcontrol.wait;"
    alone = "add.s32 %r2, %r2, 1;", "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r3}, %rd1, %rd2, 1, 1, 1, 0, 0;"
    for line in (*meets, *alone):
        many = [delayed(line, seed) for seed in range(20)]
        assert delayed(line, 3) == many[3] and all(line in one.splitlines() for one in many)
        assert (len(set(many)) > 10) == (line in meets) == any("nanosleep" in one for one in many)
    # Products begin right after their fence.
    assert all(delayed("wgmma.fence.sync.aligned;", seed).endswith("wgmma.fence.sync.aligned;\n") for seed in range(20))


def test_the_slice_gives_the_right_results() -> None:
    """In the interpreter, where no tool watches: what it launches and that it compares."""
    command = [sys.executable, "-W", "ignore", "-m", "kvq_core.testing.sanitizer_slice", "none", "--device", "cpu", "--short"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert judge("", "none", 0, done.stdout).launches == {"write": 29, "attend": 33, "combine_kernel": 15}
