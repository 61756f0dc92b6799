"""Threads that call the doors of several modes at once on one stream, with no GPU: ``python tests/unit/dry_threads.py``.

Prints as JSON, with kvq's locks and without them, how many launches a thread made at least and what went wrong: calls between whose launch
and merge another thread used the workspace that they share, and launches that began while Triton was choosing for another thread. Each
launch lets other threads go first, as Triton's launcher does.
"""

import contextlib
import functools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from in_threads import in_threads
from kvq_core import get_backend
from kvq_core.call import ops
from kvq_core.launch import attention, replay, workspace
from kvq_core.testing import dry_launch, scene
from kvq_core.testing.cases import Case
from kvq_core.testing.dry_launch import Started, launching_for

CPU = torch.device("cpu")
MODES = ("none", "int8_per_token_head", "fp8_per_tensor", "int4_per_token_head")
LENGTHS = ((600, 200), (1800, 10), (400, 300))
ROUNDS = 3

Call = Callable[[], None]


def calls_of(mode: str, number: int) -> list[Call]:
    """Both doors over a few batches, most of which are split; tensors of this thread's own."""
    backend, calls = get_backend(mode), []
    for lengths in LENGTHS:
        case = Case(query_lens=(1, 1 + number % 2), seq_lens=lengths, head_size=64, dtype=torch.bfloat16, num_kv_heads=1)
        made = scene.build(case, backend, CPU, seed=number)
        calls.append(functools.partial(backend.reshape_and_cache, **made.write_arguments()))
        calls.append(functools.partial(backend.unified_attention, out=made.fresh_out()["rows"], **made.read_arguments()))
    return calls * ROUNDS


@contextlib.contextmanager
def watched() -> Iterator[tuple[list[tuple[int, Started]], list[int]]]:
    """(thread and launch, in order; for each ``JITFunction.run`` how many were inside it)."""
    starts: list[tuple[int, Started]] = []
    inside, counts = 0, []
    launcher, run = dry_launch._Launcher.__call__, JITFunction.run

    def slow(launching: Any, *arguments: Any) -> None:
        time.sleep(0)
        driver, noted = launching._driver, []  # a list of this launch's own: the driver's has those of all threads
        launching._driver = SimpleNamespace(started=noted)
        try:
            launcher(launching, *arguments)
        finally:
            launching._driver = driver
        starts.extend((threading.get_ident(), started) for started in noted)

    def counted(kernel: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal inside
        inside += 1
        counts.append(inside)
        try:
            return run(kernel, *arguments, **options)
        finally:
            inside -= 1

    dry_launch._Launcher.__call__, JITFunction.run = slow, counted  # type: ignore[method-assign]
    try:
        yield starts, counts
    finally:
        dry_launch._Launcher.__call__, JITFunction.run = launcher, run  # type: ignore[method-assign]


def interleaved(starts: list[tuple[int, Started]]) -> int:
    """Launches that used a workspace between another thread's launch into it and that one's merge."""
    places = [range(x.data_ptr(), x.data_ptr() + x.nbytes) for kept in workspace._WORKSPACES._kept.values() for x in kept]
    wrong, owner = 0, None
    for thread, started in starts:
        if not any(isinstance(value, int) and any(value in place for place in places) for value in started.values):
            continue
        wrong += owner not in (None, thread)
        owner = None if started.kernel == "combine_kernel" else thread
    return wrong


def raced(every: list[list[Call]]) -> dict[str, int]:
    """What goes wrong when each thread makes calls of its own."""
    ops.forget_repeats()
    with watched() as (starts, counts), launching_for("sm_90"):  # a device of its own, so that Triton chooses anew
        in_threads([lambda calls=calls: [call() for call in calls] for calls in every])  # type: ignore[misc]
    by_thread = Counter(thread for thread, _ in starts)
    return {
        "launches": min(by_thread.values()),
        "interleaved": interleaved(starts),
        "overlaps": sum(count > 1 for count in counts),
    }


def main() -> None:
    # As on a GPU, where threads start on one stream; on the CPU each would have a workspace of its own.
    workspace._place = lambda device, stream: (device, 0)
    every = [calls_of(mode, number) for number, mode in enumerate(MODES * 2)]
    locked = raced(every)
    replay._CHOOSING = contextlib.nullcontext()
    replay.sole_use = attention.sole_use = lambda *place: contextlib.nullcontext()
    print(json.dumps({"locked": locked, "unlocked": raced(every)}))


if __name__ == "__main__":
    main()
