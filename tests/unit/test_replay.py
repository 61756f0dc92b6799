"""Calls that repeat earlier launches: never with other launches than their own, always with their own tensors, and only so many.

And Triton's hooks, any of which a process may set: kernels launch as without, and each hook sees all that it would of other kernels.
"""

import contextlib
import functools
import gc
import itertools
import json
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.autograd import profiler_legacy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from cache_checks import MODES
from elsewhere import apart
from kvq_core import get_backend, list_backends
from kvq_core.call import direct, ops, replay_cache
from kvq_core.kernels.combine import combine_kernel
from kvq_core.launch import replay
from kvq_core.launch.offline import compiling_for
from kvq_core.plan import invariance
from kvq_core.testing import places, scene
from kvq_core.testing.cases import Case
from kvq_core.testing.compile_matrix import TARGETS
from kvq_core.testing.dry_launch import DryDriver, launching_for

COMMON: dict[str, Any] = {"head_size": 64, "dtype": torch.bfloat16}
EVERY: dict[str, Any] = {"sinks": True, "alibi": True, "mm_prefix": (((3, 20),), ())}
LARGE: dict[str, Any] = {"queries_per_kv": 4, "head_size": 128, "dtype": torch.bfloat16}
OPTIONS = Case(query_lens=(2,) * 2, seq_lens=(300,) * 2, window=100, softcap=30.0, qq_bias=8, **EVERY, **COMMON)
SPLIT, MIXED = Case(query_lens=(1,) * 3, seq_lens=(512,) * 3, **COMMON), Case(query_lens=(1, 300), seq_lens=(900, 400), **COMMON)
OTHERS = (
    MIXED,
    OPTIONS,
    # Launches of one call with parts of its workspace at one address: partial results, then staged tiles.
    Case(query_lens=(1, 1024), seq_lens=(2100, 1030), **LARGE),
    Case(query_lens=(1024,), seq_lens=(1030,), smoothing="rotary", **LARGE),
    Case(query_lens=(1,), seq_lens=(16,), num_kv_heads=1, queries_per_kv=1, **COMMON),
)
ENVIRONMENTS = ("stream", "debug", "batch invariant")
"""What launches depend on besides the arguments."""
OF_LAUNCHES, OF_KERNELS = ("launch_enter_hook", "launch_exit_hook"), ("jit_cache_hook", "jit_post_compile_hook")
OF_A_KERNEL = "combine_kernel"
"""One that its own launches call, and no other's."""
HOOKS = (*(name for name in vars(type(knobs.runtime)) if name.endswith("_hook")), OF_A_KERNEL)
Arguments = dict[str, Any]


@functools.cache
def calls_of(mode: str, case: Case) -> tuple[Arguments, Arguments]:
    """What the doors are given: to write, and to read."""
    made, num_rows = scene.build(case, get_backend(mode), torch.device("cpu")), sum(case.query_lens)
    return made.write_arguments(), made.read_arguments() | {"q": made.q[:num_rows], "out": made.fresh_out(num_rows)["rows"]}


def moved(x: torch.Tensor, by: int = 0, strides: tuple[int, ...] | None = None) -> torch.Tensor:
    """A copy ``by`` elements past an aligned address, with the same or other strides."""
    strides = strides or x.stride()
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True)) if x.numel() else 0
    flat = torch.zeros((span + by) * x.element_size() + 16, dtype=torch.uint8)
    flat = flat[-flat.data_ptr() % 16 :]
    return flat[: (span + by) * x.element_size()].view(x.dtype).as_strided(x.shape, strides, by)


def variations(arguments: Arguments, all_options: Arguments) -> Iterator[tuple[str, Arguments]]:
    """What is different, in words, and the arguments that are."""
    yield "nothing", {}
    for name, x in arguments.items():
        if isinstance(x, torch.Tensor):
            others: Arguments = {"elsewhere": moved(x), "on meta": x.to("meta"), "missing": None}
            others |= {f"moved by {by}": moved(x, by) for by in (1, 2, 16 // x.element_size())}
            others |= {f"as {dtype}": torch.zeros_like(x, dtype=dtype) for dtype in (torch.float16, torch.int64, torch.uint8)}
            for dim, stride in enumerate(x.stride()):
                for other in (2 * stride, stride + 1):
                    others[f"with stride {other} in {dim}"] = moved(x, strides=(*x.stride()[:dim], other, *x.stride()[dim + 1 :]))
                others[f"shorter in {dim}"] = x.narrow(dim, 0, max(x.shape[dim] - 1, 0))
                others[f"longer in {dim}"] = torch.cat([x, x.narrow(dim, 0, 1)], dim) if x.shape[dim] else x
        elif isinstance(x, bool):
            others = {"negated": not x}
        elif isinstance(x, int | float):
            others = {f"= {value}": type(x)(value) for value in (0, 1, 2, 3, 16, 100, -1, -2, x + 1)}
        else:
            others = {"given": all_options[name]} if name in all_options else {}
        yield from ((f"{name} {what}", {name: other}) for what, other in others.items())
    tensors = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    yield "everything elsewhere", {name: moved(x) for name, x in tensors.items()}
    for (a, x), (b, y) in itertools.pairwise(tensors.items()):
        if x.shape == y.shape and x.dtype == y.dtype:
            yield f"{a} is {b}", {a: y}


def outcome(dry: DryDriver, call: Callable[..., object], arguments: Arguments, environment: str = "") -> object:
    """What the call launched, or its error."""
    dry.started, dry.stream = [], 7 if environment == "stream" else 0
    knobs.runtime.debug = environment == "debug"
    try:
        with invariance.batch_invariant(environment == "batch invariant"):
            call(**arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return dry.started


def tried(dry: DryDriver, call: Callable[..., object], base: Arguments, all_options: Arguments) -> Iterator[tuple[str, bool]]:
    """(variation, whether what it launched, twice, between two calls without it, was what a process launches that repeats nothing)."""
    every = [(label, base | change, "") for label, change in variations(base, all_options)]
    for label, given, where in (*every, *((where, base, where) for where in ENVIRONMENTS)):
        ops.forget_repeats()
        right = outcome(dry, call, given, where)
        ops.forget_repeats()
        first, *seen, last = (outcome(dry, call, *one) for one in ((base, ""), (given, where), (given, where), (base, "")))
        yield label, first == last and seen == [right, right]


def doors() -> Iterator[tuple[Callable[..., object], Arguments, Arguments]]:
    """A door, its arguments, and those of a call with all options."""
    # Modes differ in their scales only.
    for mode, cases in (("int4_per_token_head", (SPLIT, *OTHERS)), ("fp8_per_tensor", (SPLIT,))):
        backend, options = get_backend(mode), calls_of(mode, OPTIONS)[1]
        yield from ((backend.unified_attention, calls_of(mode, case)[1], options) for case in cases)
        writing, reading = calls_of(mode, SPLIT)
        yield backend.reshape_and_cache, writing, options
        yield backend.unified_attention, reading | scene.build(SPLIT, backend, torch.device("cpu")).scratch(4), options


@apart
def test_replays_launch_what_the_whole_way_would() -> None:
    """Whatever differs from an earlier call: address, alignment, shape, strides, dtype, device, options, the environment.

    Launches are the same if the kernel is, what Triton specialized it on, the grid, the stream, and every value.
    """
    repeats, again, every = [], replay.Replay.__call__, list(doors())

    def noted(self: replay.Replay, addresses: list[int]) -> bool:
        repeats.append(again(self, addresses))
        return repeats[-1]

    replay.Replay.__call__ = noted  # type: ignore[method-assign]
    with launching_for("sm_90") as dry:
        found = [variation for door in every for variation in tried(dry, *door)]
        assert not [label for label, fits in found if not fits]
        known = replay.triton_is_known()
        assert sum(repeats) > len(found) > 1000 if known else not any(repeats), "nothing was tested"
        replay_cache.ALIGNMENT = 1
        assert known != all(fits for _, fits in tried(dry, *every[0])), "blind to a fact, they would not"


class Dispatched(TorchDispatchMode):
    """Notes the ops that torch's dispatcher is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **kwargs or {})


class Called(TorchFunctionMode):
    """Notes the ops that Python calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **kwargs or {})


class Subclass(torch.Tensor):
    """Whose memory need not hold what it says."""


@apart
@pytest.mark.skipif(not replay.triton_is_known(), reason="no launch is repeated with this Triton")
def test_repeated_calls_pass_by_the_dispatcher_unless_somebody_watches() -> None:
    """Modes and profilers see every call; without them no op is called, and launches are the same. Tensors that are not what they look
    like, and reads that are put off, are the op's."""
    backend, (writing, reading) = get_backend("int4"), calls_of("int4", SPLIT)
    with launching_for("sm_90") as dry:

        def launches(**q: torch.Tensor) -> list[object]:
            return [outcome(dry, backend.reshape_and_cache, writing), outcome(dry, backend.unified_attention, reading | q)]

        ops.forget_repeats()
        whole = launches()
        refused = mock.patch.object(ops._OPS, "op", side_effect=AssertionError("an op was called"))
        with refused:
            assert launches() == whole
            for q in (reading["q"].as_subclass(Subclass), torch._neg_view(reading["q"]), torch._efficientzerotensor(reading["q"].shape)):
                assert launches(q=q)[1] == "AssertionError: an op was called"
        for mode in (Dispatched(), Called()):
            with mode:
                assert launches() == whole
            assert [sum(f"int4_per_token_head_{verb}" in name for name in mode.names) for verb in ("write", "read")] == [1, 1]
        for profile in (torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]), profiler_legacy.profile()):
            with profile, refused:
                assert launches() == ["AssertionError: an op was called"] * 2
        ops._JOINING.reads = []
        try:
            assert outcome(dry, backend.unified_attention, reading) == [] and len(ops._JOINING.reads) == 1
        finally:
            ops._JOINING.reads = None


def test_who_watches() -> None:
    seen: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(direct.is_watched())
        return x + 1

    torch.func.vmap(look)(torch.zeros(2, 3))
    torch.jit.trace(look, torch.zeros(2), check_trace=False)
    assert seen == [True, True] and not direct.is_watched()


@apart
@pytest.mark.skipif(not replay.triton_is_known(), reason="no launch is repeated with this Triton")
def test_a_known_launch_holds_its_kernel() -> None:
    """From Triton 3.8 on a kernel that is collected is unloaded."""
    backend = get_backend("int4")
    with launching_for("sm_90"):
        for writing, reading in (calls_of("int4", case) for case in (SPLIT, MIXED)):
            backend.reshape_and_cache(**writing)
            backend.unified_attention(**reading)
        kernels = [weakref.ref(one) for one in gc.get_objects() if isinstance(one, CompiledKernel)]
        for function in [one for one in gc.get_objects() if isinstance(one, JITFunction)]:
            function.device_caches.clear()
        gc.collect()
        assert len(kernels) >= 4 and all(kernel() is not None for kernel in kernels)
        ops.forget_repeats()
        gc.collect()
        assert not any(kernel() for kernel in kernels)


@contextlib.contextmanager
def hooked(names: tuple[str, ...]) -> Iterator[tuple[Counter[str], list[Any]]]:
    """Within the block, these hooks are set. Yields how often each was called, and the specialization data that they were given."""
    calls, told = Counter(dict.fromkeys(names, 0)), []

    def hook(name: str, *positional: Any, **by_name: Any) -> object:
        calls[name] += 1
        if "compile" in by_name:
            told.append(json.loads(by_name["compile"]["specialization_data"]))
        return ("key", "hash") if name == "add_stages_inspection_hook" and not positional else None

    with contextlib.ExitStack() as stack:
        for name in names:
            before, one = getattr(knobs.runtime, name, None), functools.partial(hook, name)
            if name == OF_A_KERNEL:
                combine_kernel.add_pre_run_hook(one)
                stack.callback(combine_kernel.pre_run_hooks.clear)
            elif before is None:
                setattr(knobs.runtime, name, one)
                stack.callback(setattr, knobs.runtime, name, None)
            else:
                before.add(one)
                stack.callback(before.remove, one)
        yield calls, told


def with_hooks(mode: str, names: tuple[str, ...]) -> tuple[list[tuple[str, object]], Counter[str], list[Any]]:
    """Kernels and grids that writes and reads launch, each twice, with these hooks set; and what :func:`hooked` yields."""
    backend = get_backend(mode)
    with launching_for("sm_90") as dry, hooked(names) as (calls, told):
        dry.started = []
        for writing, reading in (calls_of(mode, case) for case in (SPLIT, MIXED)):
            for _ in range(2):
                backend.reshape_and_cache(**writing)
                backend.unified_attention(**reading)
    ops.forget_repeats()
    return [(one.kernel, one.grid) for one in dry.started], calls, told


@apart
def test_hooks_change_no_launch_and_see_all_of_them() -> None:
    """All of them in every mode, and each alone in one. Constants come to them as JSON, by name."""
    assert {*OF_LAUNCHES, *OF_KERNELS} < {*HOOKS}
    plain = {entry.mode: with_hooks(entry.mode, ())[0] for entry in list_backends()}
    for mode, names in (*(("int4_per_token_head", (name,)) for name in HOOKS), *((mode, HOOKS) for mode in plain)):
        started, calls, told = with_hooks(mode, names)
        combines = sum(kernel == OF_A_KERNEL for kernel, _ in started)
        assert started == plain[mode], (mode, names)
        assert all(calls[name] == len(started) for name in OF_LAUNCHES if name in names), calls
        assert calls.get(OF_A_KERNEL, combines) == combines > 0, calls
        # A kernel's constants are told once, and its format's among them.
        assert sum(calls[name] for name in OF_KERNELS) == sum(json.dumps(d["constant_vals"]).count("head_size_v") == 1 for d in told)
        assert all(calls[name] > 0 for name in OF_KERNELS if name in names), calls
    # Before and after the compiler: a mode's write, its attention and the combine kernel.
    mode, (writing, reading) = "int2_per_token_head", calls_of("int2_per_token_head", SPLIT)
    with hooked(HOOKS) as (_, told), compiling_for(TARGETS["sm_90"].device("sm_90")):
        get_backend(mode).reshape_and_cache(**writing)
        get_backend(mode).unified_attention(**reading)
    constants = [data["constant_vals"][-1] for data in told]
    assert [kind for constant in constants for kind in constant] == ["WriteConfig"] * 2 + ["ReadConfig"] * 4
    assert all(constant["ReadConfig"]["format"]["Format"]["key"]["PlaneFormat"]["ways"] == 8 for constant in constants[2:])


@pytest.mark.quick
def test_the_oldest_call_is_forgotten() -> None:
    repeats = replay_cache.ReplayCache(most=3)
    for n in (1, 2, 3, 1, 4, 4):
        repeats.keep((n,), lambda addresses: True)
    assert [repeats.get((n,)) is not None for n in (1, 2, 3, 4)] == [True, False, True, True]


@pytest.mark.quick
def test_the_newest_repeat_of_a_call_is_taken() -> None:
    """Whichever call was found before it."""
    repeats, kept = replay_cache.ReplayCache(), dict[int, replay_cache.Repeat]()
    order = random.Random(0)
    for _ in range(200):
        n = order.randrange(4)
        if order.random() < 0.5:
            kept[n] = lambda addresses: True
            repeats.keep((n,), kept[n])
        assert repeats.get((n,)) is kept.get(n)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["plain", "stream", "graph"])
def test_replays_use_the_new_tensors(monkeypatch: pytest.MonkeyPatch, mode: str, way: str) -> None:
    """Bytes and results of a repeated call are those of the whole way, eagerly, on another stream, and captured."""
    device, backend = places.enter("gpu", monkeypatch).device, get_backend(mode)

    def call(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = scene.build(Case(query_lens=(1, 1, 3), seq_lens=(2100, 700, 40), sinks=True), backend, device, seed=seed)
        made.write()
        arguments, out = made.read_arguments(), made.fresh_out()["rows"]
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream) if way == "graph" else torch.cuda.stream(stream if way == "stream" else None):
            backend.unified_attention(out=out, **arguments)
        if way == "graph":
            graph.replay()
        torch.cuda.synchronize()
        return made.pages.raw.clone(), out[:5].clone()

    ops.forget_repeats()
    right = call(1)
    ops.forget_repeats()
    call(2)
    repeated = call(1)
    known = ops._OPS._bound[mode].repeats
    assert all(len(known[door]._known) == replay.triton_is_known() for door in ("read", "write")), "nothing was repeated"
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(right, repeated, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_calls_go_to_the_device_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever device is current."""
    places.enter("gpu", monkeypatch)
    results = []
    for index in (0, 1, 1):
        made = scene.build(Case(query_lens=(1, 3), seq_lens=(900, 20)), get_backend("int4"), torch.device("cuda", index))
        made.write()
        results.append(made.read().cpu())
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
