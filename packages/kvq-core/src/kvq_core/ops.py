"""torch custom ops: each mode's write and read as one opaque node that ``torch.compile`` and CUDA graphs can hold.

Ops are defined per mode, on first use, as ``kvq::<mode>_write`` and ``kvq::<mode>_read``. ``Library.define`` costs about a fifth of
``torch.library.custom_op`` per call, which is why it is used here. The op bodies bundle, validate and dispatch, in no-grad
mode since a mode's own parameters may require grad; a call whose arguments have the facts of an earlier one repeats that one's launches
instead (:mod:`kvq_core.repeat`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from kvq_core import checks, debug, eager, schedule, target, variables
from kvq_core.errors import ArgumentError
from kvq_core.memory import Apart, check_apart
from kvq_core.plans.lookup import asking_first
from kvq_core.repeat import Facts, Repeats, facts_of
from kvq_core.spec import Attention, Batch, NewRows, Plane, Scoring, Scratch, Smoothing

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend
    from kvq_core.launched import Launched
    from kvq_core.plans import Table


_WRITE_SCHEMA = (
    "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, "
    "Tensor(c!)? k_scale_cache, Tensor(d!)? v_scale_cache, Tensor? k_mean=None, Tensor? k_factor=None) -> ()"
)
# fp8_per_tensor's scales are inputs, so that its op must not claim to change them.
_WRITE_SCHEMA_GIVEN_SCALES = _WRITE_SCHEMA.replace("Tensor(c!)?", "Tensor?").replace("Tensor(d!)?", "Tensor?")
_READ_SCHEMA = (
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor(a!) out, Tensor cu_seqlens_q, SymInt max_seqlen_q, Tensor seqused_k, "
    "SymInt max_seqlen_k, float softmax_scale, SymInt window_left, Tensor block_table, float softcap, Tensor? sinks, "
    "Tensor? alibi_slopes, bool use_alibi_sqrt, Tensor? qq_bias, Tensor? output_scale, Tensor? mm_prefix_range, "
    "Tensor? k_scale_cache, Tensor? v_scale_cache, SymInt? seq_threshold_3D, SymInt? num_par_softmax_segments, "
    "Tensor(b!)? softmax_segm_output, Tensor(c!)? softmax_segm_max, Tensor(d!)? softmax_segm_expsum, "
    "Tensor? k_mean=None, Tensor? k_factor=None, Tensor(e!)? lse=None) -> ()"
)
NOT_TAKEN = (RuntimeError, TypeError, ValueError, OverflowError, AttributeError)
"""What torch's dispatcher, or the op's own dispatch, raises for arguments that are of no type the op takes."""


@functools.cache
def _arguments(schema: str) -> tuple[tuple[str, ...], frozenset[str]]:
    """The names of an op's arguments, and of those that it writes (``!``)."""
    parts = [(part.split()[-1].partition("=")[0], "!" in part) for part in schema[1 : schema.index(") ->")].split(", ")]
    return tuple(name for name, _ in parts), frozenset(name for name, written in parts if written)


_MAX_SEQLEN_K = 7
"""Its place among the read op's arguments."""


def kernels_run_on(device: torch.device) -> bool:
    """Whether Triton kernels run on ``device``: any GPU, or the CPU when Triton's interpreter was asked for."""
    return device.type == "cuda" or target.current() is not None or variables.interpreting()


def launches_repeat_on(device: torch.device) -> bool:
    """Whether calls on ``device`` may repeat launches: on NVIDIA GPUs, and not under ``KVQ_DEBUG=1``, which looks at values."""
    return device.type == "cuda" and torch.version.hip is None and not debug.enabled()


def check_write(
    backend: QuantKVBackend,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale_cache: torch.Tensor | None,
    v_scale_cache: torch.Tensor | None,
    k_mean: torch.Tensor | None = None,
    k_factor: torch.Tensor | None = None,
    *,
    batch_invariant: bool = False,
) -> NewRows:
    """The write op's arguments, bundled; :class:`ArgumentError` names the first one that does not fit."""
    return NewRows.checked(
        backend,
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        k_scale_cache,
        v_scale_cache,
        batch_invariant=batch_invariant,
        smoothing=Smoothing.given(k_mean, k_factor),
    )


@torch.no_grad()
def _write(backend: QuantKVBackend, batch_invariant: bool, *arguments: Any) -> Launched | None:
    rows = check_write(backend, *arguments, batch_invariant=batch_invariant)
    if debug.enabled():
        debug.check_slots(rows)
    if rows.key.shape[0] == 0 or rows.key.shape[1] == 0 or rows.keys.num_blocks == 0:
        return None
    if kernels_run_on(rows.key.device):
        return backend.write(rows)
    eager.write(backend, rows)
    return None


def check_read(
    backend: QuantKVBackend,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    seqused_k: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    window_left: int,
    block_table: torch.Tensor,
    softcap: float,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    use_alibi_sqrt: bool,
    qq_bias: torch.Tensor | None,
    output_scale: torch.Tensor | None,
    mm_prefix_range: torch.Tensor | None,
    k_scale_cache: torch.Tensor | None,
    v_scale_cache: torch.Tensor | None,
    seq_threshold_3d: int | None,
    num_segments: int | None,
    segm_output: torch.Tensor | None,
    segm_max: torch.Tensor | None,
    segm_expsum: torch.Tensor | None,
    k_mean: torch.Tensor | None = None,
    k_factor: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    *,
    batch_invariant: bool = False,
) -> Attention:
    """The read op's arguments, bundled; :class:`ArgumentError` names the first one that does not fit."""
    sizes = [x.shape[-1] if checks.tensor(name, x).dim() else 0 for name, x in (("q", q), ("out", out))]
    attention = Attention(
        q=q,
        out=out,
        keys=Plane(k_cache, k_scale_cache, sizes[0]),
        values=Plane(v_cache, v_scale_cache, sizes[1]),
        batch=Batch(cu_seqlens_q, seqused_k, block_table, max_seqlen_q, max_seqlen_k),
        scoring=Scoring(softmax_scale, window_left, softcap, sinks, alibi_slopes, use_alibi_sqrt, qq_bias, mm_prefix_range),
        output_scale=output_scale,
        scratch=Scratch.given(num_segments, segm_output, segm_max, segm_expsum),
        seq_threshold_3d=seq_threshold_3d,
        batch_invariant=batch_invariant,
        smoothing=Smoothing.given(k_mean, k_factor),
        lse=lse,
    )
    attention.validate(backend)
    return attention


@torch.no_grad()
def _read(backend: QuantKVBackend, batch_invariant: bool, *arguments: Any) -> Launched | None:
    attention = check_read(backend, *arguments, batch_invariant=batch_invariant)
    q = attention.q
    if debug.enabled():
        debug.check_batch(attention)
    if q.shape[0] == 0 or q.shape[1] == 0 or attention.batch.num_seqs == 0:
        return None
    if kernels_run_on(q.device):
        return backend.read(attention)
    eager.read(backend, attention)
    return None


def _read_facts(arguments: tuple[Any, ...]) -> tuple[Facts, list[int]]:
    """The facts of a read, with ``max_seqlen_k`` as the plan sees it: the calls of one step have those of the last, mostly."""
    longest = arguments[_MAX_SEQLEN_K]
    if longest > 0:
        arguments = (*arguments[:_MAX_SEQLEN_K], schedule.power_of_two(longest), *arguments[_MAX_SEQLEN_K + 1 :])
    return facts_of(arguments)


@dataclass(frozen=True)
class _Verb:
    """One of the two ops: its body, and what of its arguments a call depends on."""

    name: str
    body: Callable[..., Launched | None]
    facts: Callable[[tuple[Any, ...]], tuple[Facts, list[int]]]
    schema: Callable[[QuantKVBackend], str]

    def check_memory(self, backend: QuantKVBackend, arguments: tuple[Any, ...]) -> Apart:
        names, written = _arguments(self.schema(backend))
        return check_apart(names, arguments, written)


def _write_schema(backend: QuantKVBackend) -> str:
    return _WRITE_SCHEMA_GIVEN_SCALES if backend.takes_scales else _WRITE_SCHEMA


_VERBS = (_Verb("write", _write, facts_of, _write_schema), _Verb("read", _read, _read_facts, lambda backend: _READ_SCHEMA))


@dataclass(frozen=True)
class _Bound:
    """The backend that a mode's ops call, and the calls of each op that can be repeated."""

    backend: QuantKVBackend
    repeats: dict[str, Repeats] = field(default_factory=lambda: {verb.name: Repeats() for verb in _VERBS})

    def call(self, verb: _Verb, arguments: tuple[Any, ...]) -> None:
        device = arguments[0].device
        # Read once for each call: another thread may turn the switch before the call is over.
        batch_invariant = schedule.is_batch_invariant()
        if not launches_repeat_on(device):
            verb.check_memory(self.backend, arguments)
            verb.body(self.backend, batch_invariant, *arguments)
            return
        facts, addresses = verb.facts(arguments)
        facts = (batch_invariant, *facts)
        repeats = self.repeats[verb.name]
        repeat = repeats.get(facts)
        if repeat is not None and repeat(addresses):
            return
        apart = verb.check_memory(self.backend, arguments)
        launched = verb.body(self.backend, batch_invariant, *arguments)
        repeat = launched.repeat(addresses, apart) if launched is not None else None
        if repeat is not None:
            repeats.keep(facts, repeat)


class _Ops:
    """The ops defined so far. A mode registered anew (a test's, say) takes over its name's ops."""

    def __init__(self) -> None:
        self._libraries: list[torch.library.Library] = []
        # Reentrant: a thread that was interrupted while it held the lock can take it again.
        self._lock = threading.RLock()
        self._bound: dict[str, _Bound] = {}

    def bind(self, backend: QuantKVBackend) -> None:
        """Make ``kvq::<mode>_*`` call ``backend``; define them if this is the first of its mode."""
        with self._lock:
            self._bind(backend)

    def _bind(self, backend: QuantKVBackend) -> None:
        if backend.mode in self._bound:
            self._bound[backend.mode] = _Bound(backend)
            return
        library = torch.library.Library("kvq", "FRAGMENT")
        try:
            for verb in _VERBS:
                self._define(library, verb, backend)
            self._libraries.append(library)
            # Last: another thread that finds the mode bound takes its ops without asking for the lock.
            self._bound[backend.mode] = _Bound(backend)
        except BaseException:
            # Ctrl-C, say. An op that is there in part could not be defined again.
            self._bound.pop(backend.mode, None)
            library._destroy()
            raise

    def _define(self, library: torch.library.Library, verb: _Verb, backend: QuantKVBackend) -> None:
        mode, schema = backend.mode, verb.schema(backend)
        name = f"{mode}_{verb.name}"
        library.define(name + schema)

        def run(*arguments: Any) -> None:
            device = arguments[0].device
            if device.type == "cuda" and device.index != torch.cuda.current_device():
                # Triton launches on the current device.
                with torch.cuda.device(device):
                    self._bound[mode].call(verb, arguments)
            else:
                self._bound[mode].call(verb, arguments)

        for key in ("CPU", "CUDA"):
            library.impl(name, run, key)

        def no_result(*arguments: object) -> None:
            """Both ops only change their arguments: there is no result to describe. Meta tensors of no tracer come here, too."""
            for argument, x in zip(_arguments(schema)[0], arguments, strict=False):
                if isinstance(x, torch.Tensor) and x.device.type == "meta" and not isinstance(x, FakeTensor):
                    raise ArgumentError(argument, "a tensor on meta", "one on a CPU or CUDA device")

        torch.library.register_fake(f"kvq::{name}", no_result, lib=library)

    def forget(self) -> None:
        with self._lock:
            self._bound = {mode: _Bound(bound.backend) for mode, bound in self._bound.items()}

    def current(self, mode: str) -> QuantKVBackend | None:
        bound = self._bound.get(mode)
        return bound.backend if bound else None


_OPS = _Ops()


def forget_repeats() -> None:
    """Have the next call of every kind go the whole way: for who changes plans or kernels in a running program (tuning, tests)."""
    _OPS.forget()


@contextlib.contextmanager
def planning_with(table: Table) -> Iterator[None]:
    """Within the block, calls are planned by ``table`` where it has an entry: for tuning and tests. Nothing planned before is repeated."""

    def forget() -> None:
        schedule.plan.cache_clear()
        forget_repeats()

    with asking_first(table):
        forget()
        try:
            yield
        finally:
            forget()


def _op(backend: QuantKVBackend, verb: str) -> Callable[..., object]:
    if target.current() is not None:
        # Tensors may lie where ops do not go.
        return functools.partial(next(each.body for each in _VERBS if each.name == verb), backend, schedule.is_batch_invariant())
    if _OPS.current(backend.mode) is not backend:
        variables.check()
        _OPS.bind(backend)
    op: Callable[..., None] = getattr(torch.ops.kvq, f"{backend.mode}_{verb}").default
    return op


def write_op(backend: QuantKVBackend) -> Callable[..., object]:
    """The op ``kvq::<mode>_write``, bound to ``backend``."""
    return _op(backend, "write")


def read_op(backend: QuantKVBackend) -> Callable[..., object]:
    """The op ``kvq::<mode>_read``, bound to ``backend``."""
    return _op(backend, "read")
