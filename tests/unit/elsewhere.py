"""Work done elsewhere: in threads, and in processes that interpret no kernels."""

import functools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

UNSET = ("TRITON_INTERPRET", "KVQ_DEBUG", "KVQ_BATCH_INVARIANT")
"""What changes how kvq's kernels run."""


def in_threads(works: list[Callable[[], Any]]) -> list[Any]:
    """What each returns, all run at once, a thread each."""
    gate = threading.Barrier(len(works))

    def run(work: Callable[[], Any]) -> Any:
        gate.wait()
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(run, works))


def apart(work: Callable[..., Any]) -> Callable[..., Any]:
    """Have ``work``, a function or a test of a module beside this one, run in a process of its own. What it returns comes back as JSON."""

    @functools.wraps(work)
    def run(*arguments: object) -> Any:
        module = Path(work.__code__.co_filename).stem
        program = f"import json, {module}; print(json.dumps({module}.{work.__name__}.__wrapped__(*{arguments!r})))"
        environment = {name: value for name, value in os.environ.items() if name not in UNSET}
        done = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parent, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run
