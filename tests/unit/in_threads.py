"""Work done at once."""

import threading
from collections.abc import Callable
from typing import Any


def in_threads(works: list[Callable[[], Any]]) -> list[Any]:
    """What each returns, all run at once, a thread each."""
    gate, results = threading.Barrier(len(works)), [None] * len(works)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            gate.wait()
            results[index] = works[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
