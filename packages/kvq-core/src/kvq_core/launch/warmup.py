"""Every kernel that a serving configuration can need, compiled before the first request, in parallel; and the workspace it can need.

::

    demand = Demand("int4", 32, 128, 128, torch.bfloat16, places_of(caches), max_num_seqs=256, max_num_tokens=8192, max_seqlen_k=131072)
    reserve_workspace([demand], device)  # before an engine measures the memory that is left
    warm_up([demand], device)            # once it knows how many blocks there are

Launch plans depend on bounds (sequences, query rows, lengths), rounded to powers of two, and compiled kernels on the plan, the strides and
what Triton specializes integers for. So the doors are asked, with tensors of the meta device, what they would launch for each
combination of bounds; what differs is compiled by processes that use no GPU, and then loaded by this one. On a CPU device there are no
kernels, and both calls do nothing.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch

from kvq_core.cache.layout import LayerCaches
from kvq_core.errors import ArgumentError
from kvq_core.launch.offline import Device, compiling_for, loading_for, planning_for, replaced
from kvq_core.launch.target import beside_another
from kvq_core.launch.workspace import reserve
from kvq_core.plan.planner import DECODE_QUERY_LEN, power_of_two
from kvq_core.registry import get_backend
from kvq_core.smoothing.calibration import KeySmoothing
from kvq_core.smoothing.rotary import RotaryMean

MOST_PROCESSES = 16
_META = torch.device("meta")


def rounded_query_len(longest: int, num_tokens: int, num_seqs: int, query_rows: Sequence[int] = (1,)) -> int:
    """The bound of query lengths to give the read door: there are few of them, since each up to
    :data:`~kvq_core.plan.planner.DECODE_QUERY_LEN` has kernels of its own. ``query_rows``: as in :class:`Demand`."""
    exact = longest in query_rows and longest * num_seqs == num_tokens
    return longest if exact or longest > DECODE_QUERY_LEN else next(bound for bound in _few_rows(query_rows) if bound >= longest)


def _few_rows(query_rows: Sequence[int]) -> list[int]:
    """Bounds for batches whose sequences do not all have as many rows, up to ``DECODE_QUERY_LEN`` each."""
    return sorted({*(power_of_two(rows) for rows in query_rows if rows <= DECODE_QUERY_LEN), DECODE_QUERY_LEN})


@dataclass(frozen=True)
class Place:
    """How a tensor lies in memory that starts on an aligned address."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.dtype)

    def tensor(self) -> torch.Tensor:
        """One that lies so, without memory."""
        size = self.offset + 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return torch.empty(size, dtype=self.dtype, device=_META).as_strided(self.shape, self.strides, self.offset)


def places_of(caches: LayerCaches) -> tuple[Place | None, ...]:
    """Of a layer's caches, on whatever device, in their order."""
    tensors = (getattr(caches, field.name) for field in fields(caches))
    return tuple(None if tensor is None else Place.of(tensor) for tensor in tensors)


@dataclass(frozen=True)
class Demand:
    """Layers that are alike, and the largest batches they are to serve.

    ``places``: of a layer's caches (:func:`places_of`). ``query_rows``: rows that all sequences have in steps that only decode (1, and 1 +
    the number of drafts). Every batch comes with this ``max_seqlen_k``, as in a captured graph, and the ``max_seqlen_q`` of
    :func:`rounded_query_len`. ``sinks``: their dtype. ``slopes``: whether there are ALiBi slopes; ``sqrt``: the square root's.
    ``partial``: whether reads are of a part of the keys, with float32 results and log-sum-exps, for another to join; ``joins``: whether
    they join such a result; ``key_stops``: whether these bound them; ``first_block``: the column of the block table that they begin with,
    behind exact rows of a sequence's first tokens. ``decodes``, of exact rows beside packed ones: the most query rows of a sequence in
    batches with a ``max_seqlen_k`` of their own, and that one.
    ``smoothed``: whether the doors are given a smoothing; ``balanced``: one with factors; ``ordered``: and with an order of channels;
    ``rotary_pairs``: of its rotary mean, 0: none.
    """

    mode: str
    num_query_heads: int
    head_size: int
    head_size_v: int
    dtype: torch.dtype
    places: tuple[Place | None, ...]
    max_num_seqs: int
    max_num_tokens: int
    max_seqlen_k: int
    query_rows: tuple[int, ...] = (1,)
    window: int = -1
    softcap: float = 0.0
    sinks: torch.dtype | None = None
    slopes: bool = False
    sqrt: bool = False
    smoothed: bool = False
    balanced: bool = False
    ordered: bool = False
    rotary_pairs: int = 0
    partial: bool = False
    joins: bool = False
    key_stops: bool = False
    first_block: int = 0
    decodes: tuple[int, int] | None = None

    def longest_keys(self, rows: int) -> int:
        """``max_seqlen_k`` of batches of up to ``rows`` query rows a sequence."""
        return self.max_seqlen_k if self.decodes is None or rows > self.decodes[0] else self.decodes[1]


@dataclass(frozen=True)
class Call:
    """One call of a door: ``num_tokens`` rows of ``num_seqs`` sequences (0: a write). ``beside``: a read as
    it is launched beside another."""

    demand: Demand
    num_tokens: int
    num_seqs: int = 0
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    beside: bool = False

    def __call__(self) -> None:
        wanted, backend = self.demand, get_backend(self.demand.mode)
        key_cache, value_cache, k_scale, v_scale = (None if place is None else place.tensor() for place in wanted.places)
        if key_cache is None or value_cache is None:
            raise ArgumentError("places", "None", "those of key_cache and value_cache")

        def rows(count: int, size: int) -> torch.Tensor:
            return torch.empty(self.num_tokens, count, size, dtype=wanted.dtype, device=_META)

        def floats(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=_META)

        def indices(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=_META)

        scales: dict[str, Any] = {"k_scale_cache": k_scale, "v_scale_cache": v_scale}
        if wanted.smoothed:
            mean = floats(key_cache.shape[2], wanted.head_size)
            balance = torch.empty_like(mean) if wanted.balanced else None
            order = torch.empty_like(mean, dtype=torch.int32) if wanted.ordered else None
            scales["smoothing"] = KeySmoothing(mean, balance, self._rotary(len(mean)), order)
        if not self.num_seqs:
            slots = torch.empty(self.num_tokens, dtype=torch.int64, device=_META)
            if wanted.rotary_pairs:
                scales["positions"] = indices(self.num_tokens)
            key, value = rows(key_cache.shape[2], wanted.head_size), rows(key_cache.shape[2], wanted.head_size_v)
            backend.reshape_and_cache(key, value, key_cache, value_cache, slots, **scales)
            return
        block_size, query_heads = key_cache.shape[1], wanted.num_query_heads
        out = rows(query_heads, wanted.head_size_v)
        result = out.float() if wanted.partial else out
        lse, other_lse = (floats(*result.shape[:2]) if wants else None for wants in (wanted.partial, wanted.joins))
        with beside_another() if self.beside else contextlib.nullcontext():
            backend.unified_attention(
                rows(query_heads, wanted.head_size),
                key_cache,
                value_cache,
                result,
                cu_seqlens_q=indices(self.num_seqs + 1),
                max_seqlen_q=self.max_seqlen_q,
                seqused_k=indices(self.num_seqs),
                max_seqlen_k=self.max_seqlen_k,
                softmax_scale=wanted.head_size**-0.5,
                window_size=(wanted.window, -1 if wanted.window < 0 else 0),
                block_table=indices(self.num_seqs, -(-self.max_seqlen_k // block_size))[:, wanted.first_block :],
                key_stops=indices(self.num_seqs) if wanted.key_stops else None,
                first_positions=indices(self.num_seqs) if wanted.first_block else None,
                lse=lse,
                other=floats(*result.shape) if wanted.joins else None,
                other_lse=other_lse,
                softcap=wanted.softcap,
                sinks=None if wanted.sinks is None else torch.empty(query_heads, dtype=wanted.sinks, device=_META),
                alibi_slopes=floats(query_heads) if wanted.slopes else None,
                use_alibi_sqrt=wanted.sqrt,
                **scales,
            )

    def _rotary(self, heads: int) -> RotaryMean | None:
        pairs = self.demand.rotary_pairs
        if not pairs:
            return None
        channels, steps = (torch.empty(heads, pairs, *more, dtype=torch.int32, device=_META) for more in ((2,), ()))
        return RotaryMean(channels, steps, torch.empty(heads, pairs, 2, dtype=torch.float32, device=_META), self.demand.head_size)


def warm_up(demands: Sequence[Demand], device: torch.device, processes: int | None = None) -> int:
    """Compile what ``demands`` can need on ``device``, a GPU, and load it; returns the number of kernels.

    Kernels that Triton's cache on disk has already are only loaded. Modes registered in this process alone are compiled by it.
    """
    if device.type != "cuda":
        return 0
    with torch.cuda.device(device):
        here = Device.current()
        launches = distinct_launches(demands, here)
        left = _load(list(dict.fromkeys(call for call, _ in launches)), here)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        wanted = [launch for launch in launches if launch[0] in left]
        if len(wanted) > 1:
            _compile_in_processes(here, wanted, min(processes or min(cores, MOST_PROCESSES), len(wanted)))
        while left:
            left = _load(left, here)
    return len(launches)


def _load(calls: list[Call], device: Device) -> list[Call]:
    """Load the kernels of ``calls`` until one had to be compiled; the calls after it."""
    from triton import knobs

    before, compiled = knobs.compilation.listener, []

    def listen(**facts: Any) -> None:
        if not facts["cache_hit"]:
            compiled.append(facts["src"])
        if before is not None:
            before(**facts)

    with loading_for(device), replaced(knobs.compilation, "listener", listen):
        for number, call in enumerate(calls, start=1):
            call()
            if compiled:
                return calls[number:]
    return []


def reserve_workspace(demands: Sequence[Demand], device: torch.device) -> int:
    """Allocate the largest workspace that ``demands`` can need on ``device``, for all its streams; returns its bytes.

    For engines that attend on one stream at a time, whichever it is: graphs captured on another stream then share the buffer.
    """
    if device.type != "cuda":
        return 0
    with torch.cuda.device(device):
        return reserve(device, workspace_elements(demands, Device.current()))


def workspace_elements(demands: Sequence[Demand], device: Device) -> int:
    """float32 elements of the largest workspace that ``demands`` can need on ``device``."""
    with planning_for(device) as planned:
        for call in _calls(demands):
            if call.num_seqs:
                call()
        return max(planned.spaces, default=0)


def distinct_launches(demands: Sequence[Demand], device: Device) -> list[tuple[Call, int]]:
    """Calls, with the number of one of their launches, that between them launch every kernel that ``demands`` can need on ``device``: the
    combine kernels, which compile fastest, after all others."""
    from kvq_core.kernels.combine import combine_kernel

    seen: set[object] = set()
    kept: list[tuple[Call, int]] = []
    combining: list[tuple[Call, int]] = []
    with planning_for(device) as planned:
        for call in _calls(demands):
            planned.launches.clear()
            call()
            for number, launch in enumerate(planned.launches):
                identity = _identity(launch)
                if identity not in seen:
                    seen.add(identity)
                    (combining if launch[0] is combine_kernel else kept).append((call, number))
    return kept + combining


def _calls(demands: Sequence[Demand]) -> Iterator[Call]:
    for demand in demands:
        for num_tokens in _densely(demand.max_num_tokens):
            yield Call(demand, num_tokens)
        few = _few_rows(demand.query_rows)
        many = [rows for rows in _powers(demand.max_num_tokens) if rows > DECODE_QUERY_LEN]
        for num_seqs in _densely(demand.max_num_seqs):
            alike = [(rows, num_seqs * rows) for rows in sorted({*demand.query_rows, *few, *many})]
            # Not all have as many rows, or one has fewer than the bound says.
            unlike = [(rows, max(num_seqs, num_seqs * rows - 1)) for rows in few] + [(rows, rows + num_seqs - 1) for rows in many]
            # No sequence has more rows than there are tokens.
            unlike += [(rows, num_tokens) for rows in few for num_tokens in _powers(rows) if num_tokens >= num_seqs]
            for rows, num_tokens in (*alike, *unlike):
                call = Call(demand, num_tokens, num_seqs, rows, demand.longest_keys(rows))
                yield call
                if demand.partial or demand.joins:
                    yield replace(call, beside=True)


def _powers(most: int) -> list[int]:
    """1, 2, 4, ... and ``most``."""
    return sorted({*(1 << power for power in range(most.bit_length())), most})


def _densely(most: int) -> list[int]:
    """Every number up to 32, then steps of a sixteenth: plans change at numbers of sequences that only their tables know."""
    numbers = list(range(1, min(most, 32) + 1))
    while numbers[-1] < most:
        numbers.append(min(most, numbers[-1] * 17 // 16))
    return numbers


def _identity(launch: tuple[Any, tuple[Any, ...], dict[str, Any]]) -> object:
    """What Triton tells kernels apart by: constants and options, types, and of integers whether they are 1 or multiples of 16, unless the
    kernel asks not to be specialized for them."""
    kernel, arguments, options = launch
    facts = [_specialized(value, not param.do_not_specialize) for param, value in zip(kernel.params, arguments, strict=False)]
    return kernel, tuple(facts), tuple(sorted(options.items(), key=lambda item: item[0]))


def _specialized(argument: Any, values: bool) -> object:
    if isinstance(argument, tuple):
        return tuple(_specialized(part, values) for part in argument)
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int) and not isinstance(argument, bool):
        return argument >= 2**31, values and argument == 1, values and argument % 16 == 0
    return type(argument)


def _compile_in_processes(device: Device, launches: list[tuple[Call, int]], count: int) -> None:
    """Leave kernels in Triton's cache on disk. Plain processes: an engine's own may not have children of other kinds.

    What cannot be compiled there is met, and told, when this process loads it.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", "from kvq_core.launch.warmup import compile_from_stdin; compile_from_stdin()"]
    running = []
    for index in range(count):
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
        running.append((process, pickle.dumps((device, launches[index::count]))))
    for process, work in running:
        # One that has ended already takes nothing.
        with contextlib.suppress(BrokenPipeError):
            if process.stdin is not None:
                process.stdin.write(work)
                process.stdin.close()
    for process, _ in running:
        process.wait()


def compile_from_stdin() -> None:
    """The other end of :func:`warm_up`: a pickled device and launches."""
    device, launches = pickle.load(sys.stdin.buffer)
    torch.set_num_threads(1)
    for call, number in launches:
        with contextlib.suppress(Exception), compiling_for(device, alone=number):
            call()
