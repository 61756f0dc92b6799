"""torch custom ops: each mode's write and read as one opaque node that ``torch.compile`` and CUDA graphs can hold.

Ops are defined per mode, on first use, as ``kvq::<mode>_write`` and ``kvq::<mode>_read``. ``Library.define`` costs about a fifth of
``torch.library.custom_op`` per call, which is why it is used here. The op bodies bundle, validate and dispatch, in no-grad
mode since a mode's own parameters may require grad; a call whose arguments have the facts of an earlier one repeats that one's launches
instead (:mod:`kvq_core.repeat`).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from kvq_core import debug, eager, schedule
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
    "Tensor? k_mean=None, Tensor? k_factor=None) -> ()"
)
_MAX_SEQLEN_K = 7
"""Its place among the read op's arguments."""


def kernels_run_on(device: torch.device) -> bool:
    """Whether Triton kernels run on ``device``: any GPU, or the CPU when Triton's interpreter was asked for."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def launches_repeat_on(device: torch.device) -> bool:
    """Whether calls on ``device`` may repeat launches: on NVIDIA GPUs, and not under ``KVQ_DEBUG=1``, which looks at values."""
    return device.type == "cuda" and torch.version.hip is None and not debug.enabled()


@torch.no_grad()
def _write(
    backend: QuantKVBackend,
    batch_invariant: bool,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale_cache: torch.Tensor | None,
    v_scale_cache: torch.Tensor | None,
    k_mean: torch.Tensor | None = None,
    k_factor: torch.Tensor | None = None,
) -> Launched | None:
    rows = NewRows.checked(
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
    if debug.enabled():
        debug.check_slots(rows)
    if key.shape[0] == 0 or key.shape[1] == 0 or key_cache.shape[0] == 0:
        return None
    if kernels_run_on(key.device):
        return backend.write(rows)
    eager.write(backend, rows)
    return None


@torch.no_grad()
def _read(
    backend: QuantKVBackend,
    batch_invariant: bool,
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
) -> Launched | None:
    attention = Attention(
        q=q,
        out=out,
        keys=Plane(k_cache, k_scale_cache, q.shape[-1]),
        values=Plane(v_cache, v_scale_cache, out.shape[-1]),
        batch=Batch(cu_seqlens_q, seqused_k, block_table, max_seqlen_q, max_seqlen_k),
        scoring=Scoring(softmax_scale, window_left, softcap, sinks, alibi_slopes, use_alibi_sqrt, qq_bias, mm_prefix_range),
        output_scale=output_scale,
        scratch=Scratch.given(num_segments, segm_output, segm_max, segm_expsum),
        seq_threshold_3d=seq_threshold_3d,
        batch_invariant=batch_invariant,
        smoothing=Smoothing.given(k_mean, k_factor),
    )
    attention.validate(backend)
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


_VERBS = (_Verb("write", _write, facts_of), _Verb("read", _read, _read_facts))


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
            verb.body(self.backend, batch_invariant, *arguments)
            return
        facts, addresses = verb.facts(arguments)
        facts = (batch_invariant, *facts)
        repeats = self.repeats[verb.name]
        repeat = repeats.get(facts)
        if repeat is not None and repeat(addresses):
            return
        launched = verb.body(self.backend, batch_invariant, *arguments)
        repeat = launched.repeat(addresses) if launched is not None else None
        if repeat is not None:
            repeats.keep(facts, repeat)


class _Ops:
    """The ops defined so far. A mode registered anew (a test's, say) takes over its name's ops."""

    def __init__(self) -> None:
        self._libraries: list[torch.library.Library] = []
        # Reentrant: a Ctrl-C at the end of a with statement leaves the lock with its thread.
        self._lock = threading.RLock()
        self._bound: dict[str, _Bound] = {}

    def bind(self, backend: QuantKVBackend) -> None:
        """Make ``kvq::<mode>_*`` call ``backend``; define them if this is the first of its mode."""
        with self._lock:
            if backend.mode in self._bound:
                self._bound[backend.mode] = _Bound(backend)
                return
            given = backend.takes_scales
            schemas = {"write": _WRITE_SCHEMA_GIVEN_SCALES if given else _WRITE_SCHEMA, "read": _READ_SCHEMA}
            library = torch.library.Library("kvq", "FRAGMENT")
            try:
                for verb in _VERBS:
                    self._define(library, backend.mode, verb, schemas[verb.name])
                self._libraries.append(library)
                # Last: another thread that finds the mode bound takes its ops without asking for the lock.
                self._bound[backend.mode] = _Bound(backend)
            except BaseException:
                # Ctrl-C, say. An op that is there in part could not be defined again.
                self._bound.pop(backend.mode, None)
                library._destroy()
                raise

    def _define(self, library: torch.library.Library, mode: str, verb: _Verb, schema: str) -> None:
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
        torch.library.register_fake(f"kvq::{name}", _no_result, lib=library)

    def forget(self) -> None:
        with self._lock:
            self._bound = {mode: _Bound(bound.backend) for mode, bound in self._bound.items()}

    def current(self, mode: str) -> QuantKVBackend | None:
        bound = self._bound.get(mode)
        return bound.backend if bound else None


def _no_result(*args: object, **kwargs: object) -> None:
    """Both ops only change their arguments, so that there is no result to describe."""


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


def _op(backend: QuantKVBackend, verb: str) -> Callable[..., None]:
    if _OPS.current(backend.mode) is not backend:
        _OPS.bind(backend)
    op: Callable[..., None] = getattr(torch.ops.kvq, f"{backend.mode}_{verb}").default
    return op


def write_op(backend: QuantKVBackend) -> Callable[..., None]:
    """The op ``kvq::<mode>_write``, bound to ``backend``."""
    return _op(backend, "write")


def read_op(backend: QuantKVBackend) -> Callable[..., None]:
    """The op ``kvq::<mode>_read``, bound to ``backend``."""
    return _op(backend, "read")
