"""Which bytes tensors cover: what a call writes lies apart from all else that it is given, and from itself.

Strides decide, exactly: the views of an interleaved cache lie between each other in memory and share no byte. Nothing waits for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kvq_core.errors import ArgumentError

MOST_SEEN = 256
"""Lists of addresses that an :class:`Apart` remembers."""


@dataclass(frozen=True)
class Extent:
    """The bytes of a tensor: runs of ``width``, repeated ``count`` times at ``step`` for each of ``dims``, small steps first."""

    width: int
    dims: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, x: torch.Tensor) -> Extent:
        if x.numel() == 0:
            return cls(0, ())
        width = x.element_size()
        dims: list[tuple[int, int]] = []
        steps = sorted((stride * x.element_size(), count) for count, stride in zip(x.shape, x.stride(), strict=True) if count > 1)
        for step, count in steps:
            if step == width and not dims:
                width *= count
            else:
                dims.append((step, count))
        return cls(width, tuple(dims))

    @functools.cached_property
    def end(self) -> int:
        return self.width + sum(step * (count - 1) for step, count in self.dims)

    @property
    def nested(self) -> bool:
        """Whether each step is at least as long as all that it repeats: no byte is covered twice then."""
        reach = self.width
        for step, count in self.dims:
            if step < reach:
                return False
            reach += step * (count - 1)
        return True


@functools.lru_cache(maxsize=1024)
def shares_bytes(a: Extent, b: Extent, offset: int) -> bool:
    """Whether the two have a byte in common if ``b`` starts ``offset`` bytes after ``a``."""
    if not a.width or not b.width or offset >= a.end or -offset >= b.end:
        return False
    # A run of a less a run of b starts at: -offset, and any multiple of each step within its range.
    ranges: dict[int, tuple[int, int]] = {}
    for step, count in a.dims:
        low, high = ranges.get(step, (0, 0))
        ranges[step] = low, high + count - 1
    for step, count in b.dims:
        low, high = ranges.get(step, (0, 0))
        ranges[step] = low - count + 1, high
    terms = sorted(ranges.items())

    def reachable(terms: list[tuple[int, tuple[int, int]]], at: int) -> bool:
        """Whether some multiples of the steps bring ``at`` to where the two runs meet."""
        if not terms:
            return -a.width < at < b.width
        *rest, (step, (low, high)) = terms
        if step == 0:
            return reachable(rest, at)
        least = sum(inner * first for inner, (first, _) in rest)
        most = sum(inner * last for inner, (_, last) in rest)
        first = max(low, -((a.width - 1 + at + most) // step))
        last = min(high, (b.width - 1 - at - least) // step)
        return any(reachable(rest, at + step * times) for times in range(first, last + 1))

    return reachable(terms, -offset)


class Apart:
    """Whether what a call writes lies apart from all else, by the addresses of tensors whose shapes, strides and dtypes are known."""

    def __init__(self, tensors: Sequence[torch.Tensor], written: Sequence[int]) -> None:
        self._extents = [Extent.of(x) for x in tensors]
        self._written = written
        self._seen: set[int] = set()

    def clashes(self, addresses: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Pairs (written, another) that share bytes."""
        for i in self._written:
            mine, start = self._extents[i], addresses[i]
            for j, other in enumerate(self._extents):
                # A pair of written ones comes once, named by the later of the two.
                if j == i or (j > i and j in self._written) or start >= addresses[j] + other.end or addresses[j] >= start + mine.end:
                    continue
                if shares_bytes(mine, other, addresses[j] - start):
                    yield i, j

    def __call__(self, addresses: Sequence[int]) -> bool:
        known = hash(tuple(addresses))
        if known in self._seen:
            return True
        if any(self.clashes(addresses)):
            return False
        if len(self._seen) >= MOST_SEEN:
            self._seen.clear()
        self._seen.add(known)
        return True


def shares_storage(x: torch.Tensor, others: Iterable[object]) -> bool:
    """Whether the memory that ``x`` is a part of reaches into that of another tensor: quick to tell, and enough to rule out a clash."""
    mine = x.untyped_storage()
    start, end = mine.data_ptr(), mine.data_ptr() + mine.nbytes()
    for other in others:
        if isinstance(other, torch.Tensor):
            storage = other.untyped_storage()
            if storage.data_ptr() < end and start < storage.data_ptr() + storage.nbytes():
                return True
    return False


def check_apart(names: Sequence[str], arguments: Sequence[object], written: frozenset[str]) -> Apart:
    """The check for later calls with such arguments.

    Raises:
        ArgumentError: what is ``written`` covers a byte twice, or one that another tensor has.
    """
    found = [(name, x) for name, x in zip(names, arguments, strict=False) if isinstance(x, torch.Tensor)]
    places = [index for index, (name, _) in enumerate(found) if name in written]
    apart = Apart([x for _, x in found], places)
    for index in places:
        if not apart._extents[index].nested:
            name, x = found[index]
            raise ArgumentError(name, f"shape {tuple(x.shape)}, strides {x.stride()}", "strides that keep its elements apart")
    for i, j in apart.clashes([x.data_ptr() for _, x in found]):
        raise ArgumentError(found[i][0], f"memory that {found[j][0]} has as well", "memory of its own: it is written")
    return apart
