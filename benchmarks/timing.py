"""How long a call takes: on the device by CUDA-graph replay with a cold cache, and on the host by the clock, called eagerly.

The median of device-event times around single replays. Where a call's working set is a few times the L2, replays evict each other's
data; smaller ones are preceded, outside the events, by a read of a buffer larger than any L2 (a read, so that no dirty lines are left
for the call to write back).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

Call = Callable[[], object]

MEASURE_US = 50_000.0
LEAST_REPEATS, MOST_REPEATS = 7, 200
FLUSH_BYTES = 256 << 20
COLD_SETS = 4
"""Working sets of this many times the L2 leave nothing of use in it."""
HOST_CALLS = 20
READ_TILE = 16384
"""Values that a program of the pure read loads at once."""


@dataclass(frozen=True)
class Timing:
    """Median microseconds on the device, and of one eager call on the host; ``method``: ``graph``, or ``eager`` where capture failed."""

    device_us: float
    host_us: float
    repeats: int
    method: str


def repeats_for(once_us: float) -> int:
    """How often to repeat a call of this length: :data:`MEASURE_US` in all, within limits."""
    return int(min(max(MEASURE_US / max(once_us, 1e-3), LEAST_REPEATS), MOST_REPEATS))


class Timer:
    """Times calls on one CUDA device; holds the buffer that flushes its cache."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.l2_bytes = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 50 << 20))
        self._flush = torch.zeros(max(FLUSH_BYTES, COLD_SETS * self.l2_bytes) // 4, dtype=torch.float32, device=device)
        self._sink = torch.zeros((), device=device)

    def flush(self) -> None:
        """Fill the L2 with something else."""
        torch.sum(self._flush, dim=0, out=self._sink)

    def measure(self, call: Call, working_set: int, *, allow_eager: bool = False) -> Timing:
        """Time ``call``, which touches ``working_set`` bytes.

        ``allow_eager``: where it cannot be captured, time eager calls instead of failing. Raises what the call raises.
        """
        call()
        call()
        torch.cuda.synchronize(self.device)
        host = self.host(call)
        run, method = call, "eager"
        try:
            run, method = self._captured(call), "graph"
        except Exception:
            if not allow_eager:
                raise
            torch.cuda.synchronize(self.device)
        cold = working_set >= COLD_SETS * self.l2_bytes
        once = self._median(run, 3, flush=not cold)
        repeats = repeats_for(once)
        return Timing(self._median(run, repeats, flush=not cold), host, repeats, method)

    def temporary(self, call: Call) -> int | None:
        """Bytes that ``call`` takes from the allocator: its workspace, and what it returns. ``None`` if it cannot be captured.

        Within a CUDA graph, since eager calls find the workspace of those before.
        """
        call()
        torch.cuda.synchronize(self.device)
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                torch.cuda.reset_peak_memory_stats(self.device)
                before = torch.cuda.memory_allocated(self.device)
                call()
                return torch.cuda.max_memory_allocated(self.device) - before
        except Exception:  # what the timing itself makes of it, it will say
            torch.cuda.synchronize(self.device)
            return None

    def host(self, call: Call) -> float:
        """Median microseconds that an eager call keeps the host, the device being free to lag behind."""
        torch.cuda.synchronize(self.device)
        times = []
        for _ in range(HOST_CALLS):
            begin = time.perf_counter()
            call()
            times.append((time.perf_counter() - begin) * 1e6)
        torch.cuda.synchronize(self.device)
        return statistics.median(times)

    def _captured(self, call: Call) -> Call:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graph.replay()
        torch.cuda.synchronize(self.device)
        return graph.replay

    def _median(self, run: Call, repeats: int, *, flush: bool) -> float:
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        # One untimed flush first: the host gets ahead of the device, so that no gap between an event and its replay is counted.
        self.flush()
        for begin, end in events:
            if flush:
                self.flush()
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize(self.device)
        return statistics.median(float(begin.elapsed_time(end)) * 1e3 for begin, end in events)

    # -- what the numbers are judged by ---------------------------------------------------------------------------------

    def floor(self) -> float:
        """Microseconds that replaying a graph of one trivial kernel measures: what every figure here contains."""
        one = torch.zeros(1, device=self.device)
        return self.measure(lambda: one.add_(1), 4).device_us

    def read_bandwidth(self, size: int = 2 << 30) -> float:
        """Bytes a second of a kernel that only reads a large tensor; a smaller one where memory is short."""
        free = torch.cuda.mem_get_info(self.device)[0]
        count = min(size, free // 4) // READ_TILE // 4
        source = torch.zeros(count * READ_TILE, dtype=torch.int32, device=self.device)
        found = torch.empty(count, dtype=torch.int32, device=self.device)
        read = partial(_read_kernel[(count,)], source, found, READ_TILE, num_warps=8)
        return source.nbytes / self.measure(read, source.nbytes).device_us * 1e6


@triton.jit
def _read_kernel(source, found, values: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest of a program's values: what is read must end up somewhere."""
    tile = tl.program_id(0).to(tl.int64) * values + tl.arange(0, values)
    tl.store(found + tl.program_id(0), tl.max(tl.load(source + tile), axis=0))
