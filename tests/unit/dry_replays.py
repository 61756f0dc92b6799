"""Calls that vary one thing each, launched into the void with and without repeats: ``python tests/unit/dry_replays.py``.

Prints as JSON how many variations there were, whether launches can be repeated with this Triton, how many calls were, and which variations
went wrong: their launches (kernel, what Triton specialized it on, grid, stream, every value) or error were not those of a process that
repeats nothing. ``unaligned``: how many go wrong where calls are not known by the alignment of their tensors.
"""

import contextlib
import itertools
import json
from collections.abc import Iterator
from typing import Any

import torch
from triton import knobs

from kvq_core import get_backend
from kvq_core.call import ops, replay_cache
from kvq_core.launch import replay
from kvq_core.plan import planner
from kvq_core.testing import scene
from kvq_core.testing.cases import Case
from kvq_core.testing.dry_launch import DryDriver, launching_for

CPU = torch.device("cpu")
MODES = ("int4_per_token_head", "fp8_per_tensor")
COMMON: dict[str, Any] = {"head_size": 64, "dtype": torch.bfloat16}
EVERY: dict[str, Any] = {"sinks": True, "alibi": True, "mm_prefix": (((3, 20),), ())}
CASES = {
    "split": Case(query_lens=(1,) * 3, seq_lens=(512,) * 3, **COMMON),
    "mixed": Case(query_lens=(1, 40), seq_lens=(200, 64), **COMMON),
    "options": Case(query_lens=(2,) * 2, seq_lens=(300,) * 2, window=100, softcap=30.0, qq_bias=8, **EVERY, **COMMON),
    # Launches of one call with parts of its workspace at one address: partial results, then staged tiles.
    "staged": Case(query_lens=(1, 1024), seq_lens=(2100, 1030), queries_per_kv=4, **COMMON | {"head_size": 128}),
    "staged, rotary mean": Case(query_lens=(1024,), seq_lens=(1030,), smoothing="rotary", queries_per_kv=4, **COMMON | {"head_size": 128}),
    "one of each": Case(query_lens=(1,), seq_lens=(16,), num_kv_heads=1, queries_per_kv=1, **COMMON),
}
Variation = tuple[str, dict[str, Any]]


def moved(x: torch.Tensor, *, by: int = 0, strides: tuple[int, ...] | None = None) -> torch.Tensor:
    """A copy ``by`` elements past an aligned address, with the same or other strides."""
    strides = strides or x.stride()
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True)) if x.numel() else 0
    flat = torch.zeros((span + by) * x.element_size() + 16, dtype=torch.uint8)
    flat = flat[-flat.data_ptr() % 16 :]
    return flat[: (span + by) * x.element_size()].view(x.dtype).as_strided(x.shape, strides, by)


def variations(arguments: dict[str, Any], all_options: dict[str, Any]) -> Iterator[Variation]:
    yield "nothing", {}
    for name, x in arguments.items():
        if isinstance(x, torch.Tensor):
            others = {"elsewhere": moved(x), "on meta": x.to("meta"), "missing": None}
            others |= {f"moved by {by}": moved(x, by=by) for by in (1, 2, 16 // x.element_size())}
            others |= {f"as {dtype}": torch.zeros_like(x, dtype=dtype) for dtype in (torch.float16, torch.int64, torch.uint8)}
            for dim, stride in enumerate(x.stride()):
                for other in (2 * stride, stride + 1):
                    others[f"with stride {other} in {dim}"] = moved(x, strides=(*x.stride()[:dim], other, *x.stride()[dim + 1 :]))
                others[f"shorter in {dim}"] = x.narrow(dim, 0, max(x.shape[dim] - 1, 0))
                others[f"longer in {dim}"] = torch.cat([x, x.narrow(dim, 0, 1)], dim) if x.shape[dim] else x
        elif isinstance(x, bool):
            others = {"turned": not x}
        elif isinstance(x, int | float):
            others = {f"= {value}": type(x)(value) for value in (0, 1, 2, 3, 16, 100, -1, -2, x + 1)}
        else:
            others = {"given": all_options[name]} if name in all_options else {}
        yield from ((f"{name} {what}", {name: other}) for what, other in others.items())
    tensors = [name for name, x in arguments.items() if isinstance(x, torch.Tensor)]
    yield "everything elsewhere", {name: moved(arguments[name]) for name in tensors}
    for a, b in itertools.pairwise(tensors):
        if arguments[a].shape == arguments[b].shape and arguments[a].dtype == arguments[b].dtype:
            yield f"{a} is {b}", {a: arguments[b]}


def outcome(dry: DryDriver, call: Any, arguments: dict[str, Any]) -> object:
    """What the call launched, or its error."""
    dry.started = []
    try:
        call(**arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return dry.started


@contextlib.contextmanager
def environment(dry: DryDriver, name: str) -> Iterator[None]:
    """Something besides the arguments that launches depend on."""
    debug = knobs.runtime.debug
    dry.stream = 7 if name == "stream" else 0
    knobs.runtime.debug = name == "debug"
    with planner.batch_invariant(name == "batch invariant"):
        yield
    dry.stream, knobs.runtime.debug = 0, debug


def check(dry: DryDriver, mode: str, call: Any, base: dict[str, Any], options: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """(variation, whether what it launched, twice, between two calls without it, was right)."""
    every = [(label, change, "") for label, change in variations(base, options)]
    every += [(kind, {}, kind) for kind in ("stream", "debug", "batch invariant")]
    for label, change, kind in every:
        arguments = base | change
        ops.forget_repeats()
        with environment(dry, kind):
            right = outcome(dry, call, arguments)
        ops.forget_repeats()
        first = outcome(dry, call, base)
        with environment(dry, kind):
            seen = [outcome(dry, call, arguments) for _ in range(2)]
        seen_base = outcome(dry, call, base)
        fits = all(one == right for one in seen) and first == seen_base
        yield f"{mode}: {kind or label}", fits


Call = tuple[str, str, Any, dict[str, Any], dict[str, Any]]


def doors() -> Iterator[Call]:
    """(case, mode, door, its arguments, those of a call with all options)."""
    for mode in MODES:
        backend = get_backend(mode)
        options = scene.build(CASES["options"], backend, CPU).read_arguments()
        for name, case in CASES.items():
            if mode != MODES[0] and name != "split":
                continue  # the others differ in their scales only
            made = scene.build(case, backend, CPU)
            num_rows = sum(case.query_lens)
            reading = made.read_arguments() | {"q": made.q[:num_rows], "out": made.fresh_out(num_rows)["rows"]}
            yield name, mode, backend.unified_attention, reading, options
            if name == "split":
                yield name, mode, backend.reshape_and_cache, made.write_arguments(), options
                yield name, mode, backend.unified_attention, reading | made.scratch(4), options


def main() -> None:
    repeated = 0
    again = replay.Replay.__call__

    def counted(self: replay.Replay, addresses: list[int]) -> bool:
        nonlocal repeated
        done = again(self, addresses)
        repeated += done
        return done

    replay.Replay.__call__ = counted  # type: ignore[method-assign]
    every = list(doors())
    with launching_for("sm_90") as dry:
        found = [(f"{name}, {label}", fits) for name, *door in every for label, fits in check(dry, *door)]
        wrong = [variation for variation, fits in found if not fits]
        seen = {"tried": len(found), "known": replay.triton_is_known(), "repeated": repeated, "wrong": wrong}
        replay_cache.ALIGNMENT = 1
        seen["unaligned"] = sum(not fits for _, fits in check(dry, *every[0][1:]))
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
