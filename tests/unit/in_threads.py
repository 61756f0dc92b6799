"""Work done at once."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def in_threads(works: list[Callable[[], Any]]) -> list[Any]:
    """What each returns, all run at once, a thread each."""
    gate = threading.Barrier(len(works))

    def run(work: Callable[[], Any]) -> Any:
        gate.wait()
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(run, works))
