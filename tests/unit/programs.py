"""Programs beside the tests, for what a process whose kernels are interpreted cannot do: ``python tests/unit/NAME.py``."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def environment(**further: str) -> dict[str, str]:
    """This process's, but for what changes how kvq's kernels run."""
    unset = ("TRITON_INTERPRET", "KVQ_DEBUG", "KVQ_BATCH_INVARIANT")
    return {name: value for name, value in os.environ.items() if name not in unset} | further


def told_by(name: str, *options: str) -> Any:
    """What the program of that name prints as JSON."""
    done = subprocess.run([sys.executable, str(FOLDER / f"{name}.py"), *options], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
