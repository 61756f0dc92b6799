"""Programs beside the tests, for what a process whose kernels are interpreted cannot do: ``python tests/unit/NAME.py``."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def environment(**further: str) -> dict[str, str]:
    """This process's, but for what changes how kvq's kernels run."""
    unset = ("TRITON_INTERPRET", "KVQ_DEBUG", "KVQ_BATCH_INVARIANT")
    return {name: value for name, value in os.environ.items() if name not in unset} | further


def told_by(name: str, *options: str) -> Any:
    """What the program of that name prints as JSON."""
    command = [sys.executable, str(Path(__file__).with_name(f"{name}.py")), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
