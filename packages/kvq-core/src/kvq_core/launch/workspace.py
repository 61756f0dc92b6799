"""The buffers that split attention leaves its partials in, and long prompts their staged tiles: kept per device and stream, grown, never
freed.

Never freed, because a captured CUDA graph may go on using a buffer after a larger one has taken its place; growing by half at least
bounds what that costs. Two streams never share one, so that concurrent calls do not meet. Threads on one stream (each starts on the same
default stream) do share: whoever uses a workspace holds :func:`sole_use` until the last launch that reads it is made, so that no other
thread's launch comes between.

Memory made during a capture belongs to the graph's pool: the graph rewrites it at every replay, on whatever stream that runs, and takes it
along when it dies. So what is kept never comes from there. A capture on a stream whose buffer is large enough (it was warmed up) bakes
that one in and allocates nothing. Any other capture gets a buffer for the one call, which no later call sees: the pool holds its memory
for as long as the graph lives, and hands it out again only to what the same stream captures afterwards, as with every temporary tensor.

An engine that attends on one stream at a time can :func:`reserve` one buffer for all streams of a device, before it measures what memory
is left: graphs it captures on another stream then bake that one in, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from itertools import accumulate

import torch

Make = Callable[[torch.device, int], torch.Tensor]
_PROVIDED: ContextVar[Make | None] = ContextVar("_PROVIDED", default=None)
_ALIGNMENT = 64
"""Elements that parts of a buffer start at a multiple of."""


def _capturing(device: torch.device) -> bool:
    """Whether the current stream of ``device`` is being captured into a CUDA graph."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


_Place = tuple[torch.device, int]


def _place(device: torch.device, stream: int | None) -> _Place:
    """Whose workspace it is: the stream's; on the CPU, where nothing is put off, the thread's."""
    if device.type != "cuda":
        return device, threading.get_ident()
    return device, torch.cuda.current_stream(device).cuda_stream if stream is None else stream


class _Workspaces:
    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._kept: dict[_Place, list[torch.Tensor]] = {}
        self._uses: dict[_Place, AbstractContextManager[object]] = {}
        self._reserved: dict[torch.device, torch.Tensor] = {}

    def reserve(self, device: torch.device, size: int) -> int:
        with self._lock:
            held = self._reserved.get(device)
            if held is None or held.numel() < size:
                # The outgrown one stays: a graph may use it.
                self._kept.setdefault((device, -1), []).append(_buffer(size, device))
                held = self._reserved[device] = self._kept[device, -1][-1]
            return held.nbytes

    def use(self, device: torch.device, stream: int | None = None) -> AbstractContextManager[object]:
        place = (device, -1) if device in self._reserved else _place(device, stream)
        found = self._uses.get(place)
        # Reentrant, since a hook of Triton's that sees a launch may attend, too.
        return self._uses.setdefault(place, threading.RLock()) if found is None else found

    def num_bytes(self, device: torch.device) -> int:
        with self._lock:
            return sum(buffer.nbytes for kept in self._kept.values() for buffer in kept if buffer.device == device)

    def get(self, device: torch.device, size: int, stream: int | None = None) -> torch.Tensor:
        """A float32 buffer of at least ``size`` elements for the current stream of ``device`` (``stream``, if the caller knows it)."""
        with self._lock:
            reserved = self._reserved.get(device)
            if reserved is not None and reserved.numel() >= size:
                return reserved
            kept = self._kept.setdefault(_place(device, stream), [])
            if kept and kept[-1].numel() >= size:
                return kept[-1]
            if _capturing(device):
                return torch.empty(size, dtype=torch.float32, device=device)
            grown = max(size, kept[-1].numel() * 3 // 2 if kept else 0, 1 << 16)
            kept.append(_buffer(grown, device))
            return kept[-1]


def _buffer(size: int, device: torch.device) -> torch.Tensor:
    """Uninitialized float32 memory of the allocator's ordinary pool.

    While torch.compile warms a CUDA graph up, without capturing yet, what this thread allocates comes from the graph's own pool, whose
    checks refuse memory that stays. Another thread's allocations do not. That thread takes this one's stream along: memory of another
    stream's may be in use there still, by work that was launched before it was freed.
    """
    if device.type != "cuda":
        with torch.inference_mode(False):
            return torch.empty(size, dtype=torch.float32, device=device)
    stream = torch.cuda.current_stream(device)

    def allocate() -> torch.Tensor:
        with torch.cuda.stream(stream):
            return torch.empty(size, dtype=torch.float32, device=device)

    with ThreadPoolExecutor(1) as outside:
        return outside.submit(allocate).result()


_WORKSPACES = _Workspaces()


def kept_buffer(device: torch.device, size: int, stream: int | None = None) -> torch.Tensor:
    """A float32 buffer of at least ``size`` elements for the current stream: what :func:`workspace` cuts up."""
    make = _PROVIDED.get()
    return _WORKSPACES.get(device, size, stream) if make is None else make(device, size)


@contextmanager
def provided(make: Make) -> Iterator[None]:
    """Within the block this thread's calls get their buffers from ``make(device, elements)``."""
    before = _PROVIDED.set(make)
    try:
        yield
    finally:
        _PROVIDED.reset(before)


def reserve(device: torch.device, size: int) -> int:
    """Keep one buffer of ``size`` float32 elements for all streams of ``device``; returns its bytes. Only one of them may attend at a time.

    Calls that need more get buffers of their own, as without it.
    """
    return _WORKSPACES.reserve(_indexed(device), size)


def _indexed(device: torch.device) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device


def kept_bytes(device: torch.device) -> int:
    """Bytes of all workspaces on ``device`` (with its index, if there are several), outgrown ones included."""
    return _WORKSPACES.num_bytes(torch.device(device.type, 0) if device.type == "cuda" and device.index is None else device)


def sole_use(device: torch.device, stream: int | None = None) -> AbstractContextManager[object]:
    """To hold from the first launch that fills the current stream's workspace to the last one that reads it."""
    return _WORKSPACES.use(device, stream)


def buffers(device: torch.device, sizes: Sequence[int]) -> tuple[int, tuple[torch.Tensor, ...]]:
    """(elements of the buffer behind them, uninitialized float32 buffers of so many elements for the current stream)."""
    starts = [0, *accumulate(map(_aligned, sizes))]
    buffer = kept_buffer(device, starts[-1])
    return starts[-1], tuple(buffer[start : start + size] for start, size in zip(starts, sizes, strict=False))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def workspace_size(row_blocks: int, rows: int, head_size_v: int) -> int:
    """Elements of the buffer behind such a workspace."""
    return _aligned(2 * row_blocks) + rows * (head_size_v + 2)


def workspace(
    device: torch.device, row_blocks: int, rows: int, head_size_v: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Uninitialized buffers for the current stream.

    plan [row_blocks * 2] int32, acc [rows * head_size_v], max [rows] and sum [rows] float32.
    """
    noted = _aligned(2 * row_blocks)
    acc = noted + rows * head_size_v
    buffer = kept_buffer(device, workspace_size(row_blocks, rows, head_size_v))
    return buffer[:noted].view(torch.int32), buffer[noted:acc], buffer[acc : acc + rows], buffer[acc + rows : acc + 2 * rows]
