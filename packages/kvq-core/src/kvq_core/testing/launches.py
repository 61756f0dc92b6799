"""Which kernels a call launches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def noted_launches() -> Iterator[list[str]]:
    """The names of the kernels that are launched in the block, in order; not those of calls that repeat an earlier one's launches."""
    from kvq_core.launched import Launched  # imports triton

    names: list[str] = []
    start = Launched.start

    def noting(self: Launched, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        names.append(kernel.__name__)
        start(self, kernel, grid, *arguments, **options)

    Launched.start = noting  # type: ignore[method-assign]
    try:
        yield names
    finally:
        Launched.start = start  # type: ignore[method-assign]
