"""Which kernels a call launches, and what they are compiled for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def noted_launches() -> Iterator[list[str]]:
    """The names of the kernels that are launched in the block, in order; not those of calls that repeat an earlier one's launches."""
    names: list[str] = []
    with _told(lambda kernel, options: names.append(kernel.__name__)):
        yield names


@contextmanager
def noted_constants() -> Iterator[list[dict[str, Any]]]:
    """The constants and Triton's options, by name, of each of :func:`noted_launches`."""
    constants: list[dict[str, Any]] = []
    with _told(lambda kernel, options: constants.append(options)):
        yield constants


@contextmanager
def _told(listen: Callable[[Any, dict[str, Any]], None]) -> Iterator[None]:
    """``listen`` is told each launch's kernel and options, before it."""
    from kvq_core.launch.replay import LaunchRecord  # imports triton

    start = LaunchRecord.start

    def telling(self: LaunchRecord, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        listen(kernel, options)
        start(self, kernel, grid, *arguments, **options)

    LaunchRecord.start = telling  # type: ignore[method-assign]
    try:
        yield
    finally:
        LaunchRecord.start = start  # type: ignore[method-assign]
