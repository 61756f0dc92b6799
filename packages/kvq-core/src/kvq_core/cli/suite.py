"""The benchmark suite, as the wheel carries it or as it lies in a checkout, and what it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from kvq_core.errors import KVQError


class CannotRunError(KVQError):
    """The benchmarks cannot run here."""


def suite() -> Path:
    """The folder of the benchmark suite: a wheel has it inside the package, a checkout at its root.

    Raises:
        CannotRunError: it is in neither place.
    """
    package = Path(__file__).resolve().parents[1]
    for place in (package / "bench", *(parent / "benchmarks" for parent in package.parents)):
        if (place / "run.py").is_file():
            return place
    raise CannotRunError(f"the benchmark suite is not beside {package}; need an installed wheel of kvq-core, or kvq's repository")


def run_suite(script: str, command: str, *arguments: str) -> NoReturn:
    """Run a script of the suite in a process of its own, and end with its exit status. Errors are told as those of ``command``."""
    raise SystemExit(subprocess.run([sys.executable, str(suite() / script), "--name", command, *arguments]).returncode)


def need_gpu(what: str, instead: str) -> None:
    """Refuse to go on without a GPU: ``what`` needs one, and without one there is ``instead``.

    Raises:
        CannotRunError: torch sees none.
    """
    import torch

    from kvq_core.environment import why_no_gpu

    if not torch.cuda.is_available():
        raise CannotRunError(f"{what}, and torch sees none here ({why_no_gpu()}); {instead}")
