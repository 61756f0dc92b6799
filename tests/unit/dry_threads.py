"""Threads that call the doors of several modes at once on one stream, with no GPU: ``python tests/unit/dry_threads.py``.

Prints as JSON, with kvq's locks and without them, how many launches there were and what went wrong: calls between whose launch and merge
another thread used the workspace that they share, launches that began while Triton was choosing for another thread, and threads whose
launches were not those of a process with one thread. Each launch lets other threads go first, as Triton's launcher does. ``kept_plan``:
whether a call keeps its plan when another thread turns the batch-invariant switch in the middle of it.
"""

import contextlib
import functools
import json
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from in_threads import in_threads
from kvq_core import get_backend
from kvq_core.call import ops
from kvq_core.call.spec import Attention
from kvq_core.launch import attention, replay, workspace
from kvq_core.plan import planner
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


def keeps_its_plan() -> bool:
    """Whether calls under the switch launch the same after one during which the switch was turned."""
    made = scene.build(Case(query_lens=(1, 1), seq_lens=(1800, 10), head_size=64, dtype=torch.bfloat16), get_backend("int4"), CPU)
    reading, out, validate, seen = made.read_arguments(), made.fresh_out()["rows"], Attention.validate, []

    def turned(attention: Attention, backend: Any) -> None:
        planner.set_batch_invariant(False)
        validate(attention, backend)

    with launching_for("sm_90") as dry:
        for check in (validate, turned, validate):
            if len(seen) < 2:
                ops.forget_repeats()
            Attention.validate = check  # type: ignore[method-assign]
            dry.started = []
            with planner.batch_invariant():
                made.backend.unified_attention(out=out, **reading)
            seen.append(dry.started)
    return seen[0] == seen[1] == seen[2]


def raced(every: list[list[Call]]) -> dict[str, int]:
    """What goes wrong when each thread makes calls of its own."""
    alone = []
    for _ in range(2):  # the workspace has grown by the second time
        alone = []
        with launching_for("sm_90") as dry:
            for calls in every:
                dry.started = []
                for call in calls:
                    call()
                alone.append(dry.started)
    ops.forget_repeats()
    with watched() as (starts, counts), launching_for("sm_90"):  # a device of its own, so that Triton chooses anew
        in_threads([lambda calls=calls: [call() for call in calls] for calls in every])  # type: ignore[misc]
    by_thread = [[started for thread, started in starts if thread == one] for one in {thread for thread, _ in starts}]
    return {
        "launches": len(starts),
        "interleaved": interleaved(starts),
        "overlaps": sum(count > 1 for count in counts),
        "strange": len(every) - sum(launches in alone for launches in by_thread),
    }


def main() -> None:
    kept_plan = keeps_its_plan()
    # As on a GPU, where threads start on one stream; on the CPU each would have a workspace of its own.
    workspace._place = lambda device, stream: (device, 0)
    every = [calls_of(mode, number) for number, mode in enumerate(MODES * 2)]
    locked = raced(every)
    ops.forget_repeats()
    replay._CHOOSING = contextlib.nullcontext()
    replay.sole_use = attention.sole_use = lambda *place: contextlib.nullcontext()
    print(json.dumps({"locked": locked, "unlocked": raced(every), "kept_plan": kept_plan}))


if __name__ == "__main__":
    main()
