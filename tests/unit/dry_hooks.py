"""Calls with Triton's hooks set, launched into the void and compiled: ``python tests/unit/dry_hooks.py``.

Prints as JSON, for every mode with all hooks of ``triton.knobs.runtime`` and one of a kernel's own set, and for one mode with each alone:
how many launches there were, how often each hook was called, of how many kernels they were told the constants, and whether the launches
were those of a process without hooks. And the constants that hooks are told of one mode's kernels, compiled for sm_90 with all hooks set.
"""

import contextlib
import functools
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from triton import knobs

from kvq_core import get_backend, list_backends
from kvq_core.call import ops
from kvq_core.kernels.combine import combine_kernel
from kvq_core.launch.offline import compiling_for
from kvq_core.testing import scene
from kvq_core.testing.cases import Case
from kvq_core.testing.compile_matrix import TARGETS
from kvq_core.testing.dry_launch import Started, launching_for

CPU = torch.device("cpu")
OF_A_KERNEL = "combine_kernel"
HOOKS = (*(name for name in vars(type(knobs.runtime)) if name.endswith("_hook")), OF_A_KERNEL)
CASES = (
    Case(query_lens=(1,) * 3, seq_lens=(512,) * 3, dtype=torch.bfloat16),
    Case(query_lens=(1, 300), seq_lens=(900, 400), dtype=torch.bfloat16),
)


@contextlib.contextmanager
def hooked(names: tuple[str, ...]) -> Iterator[tuple[Counter[str], list[Any]]]:
    """Within the block, these hooks are set. Yields how often each was called, and the specialization data that they were given."""
    calls, told = Counter(dict.fromkeys(names, 0)), []

    def hook(name: str) -> Any:
        def call(*positional: Any, **by_name: Any) -> object:
            calls[name] += 1
            if "compile" in by_name:
                told.append(json.loads(by_name["compile"]["specialization_data"]))
            return ("key", "hash") if name == "add_stages_inspection_hook" and not positional else None

        return call

    with contextlib.ExitStack() as stack:
        for name in names:
            if name == OF_A_KERNEL:
                combine_kernel.add_pre_run_hook(hook(name))
                stack.callback(combine_kernel.pre_run_hooks.clear)
                continue
            before, one = getattr(knobs.runtime, name), hook(name)
            if before is None:
                setattr(knobs.runtime, name, one)
                stack.callback(setattr, knobs.runtime, name, None)
            else:
                before.add(one)
                stack.callback(before.remove, one)
        yield calls, told


@functools.cache
def calls_of(mode: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What the doors are given, of each case."""
    made = [scene.build(case, get_backend(mode), CPU) for case in CASES]
    return [(one.write_arguments(), one.read_arguments() | {"out": one.fresh_out()["rows"]}) for one in made]


def launches(mode: str, names: tuple[str, ...]) -> tuple[list[Started], Counter[str], int]:
    """(what writes and reads launch, each twice, with these hooks set; how often each was called, and of how many kernels' constants)."""
    backend = get_backend(mode)
    with launching_for("sm_90") as dry, hooked(names) as (calls, told):
        dry.started = []
        for writing, reading in calls_of(mode):
            for _ in range(2):
                backend.reshape_and_cache(**writing)
                backend.unified_attention(**reading)
    ops.forget_repeats()
    started = [(one.kernel, one.grid) for one in dry.started]
    return started, calls, len([data for data in told if json.dumps(data["constant_vals"]).count("head_size_v") == 1])


def compiled(mode: str) -> list[Any]:
    writing, reading = calls_of(mode)[0]
    with hooked(HOOKS) as (_, told), compiling_for(TARGETS["sm_90"].device("sm_90")):
        get_backend(mode).reshape_and_cache(**writing)
        get_backend(mode).unified_attention(**reading)
    return [(data["name"], data["constant_vals"]) for data in told]


def main() -> None:
    seen, plains = [], {entry.mode: launches(entry.mode, ())[0] for entry in list_backends()}
    for mode, names in (*(("int4_per_token_head", (name,)) for name in HOOKS), *((mode, HOOKS) for mode in plains)):
        started, calls, told = launches(mode, names)
        merges = [kernel for kernel, _ in started].count("combine_kernel")
        seen.append(
            {"mode": mode, "launches": len(started), "merges": merges, "same": started == plains[mode], "calls": calls, "told": told}
        )
    print(json.dumps({"hooks": HOOKS, "seen": seen, "compiled": compiled("int2_per_token_head")}))


if __name__ == "__main__":
    main()
