"""torch custom ops: each mode's write and read as one opaque node that ``torch.compile`` and CUDA graphs can hold.

Ops are defined per mode, on first use, as ``kvq::<mode>_write`` and ``kvq::<mode>_read``. ``Library.define`` costs about a fifth of
``torch.library.custom_op`` per call, which is why it is used here. The op bodies bundle, validate and dispatch, in no-grad
mode since a mode's own parameters may require grad; a call whose arguments have the facts of an earlier one repeats that one's launches
instead (:mod:`kvq_core.call.replay_cache`).
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

from kvq_core import variables
from kvq_core.call import debug, torch_path
from kvq_core.call.args import OpArgs, ReadArgs, WriteArgs, schema, written
from kvq_core.call.memory import Apart, check_apart
from kvq_core.call.replay_cache import Facts, ReplayCache, facts_of
from kvq_core.call.spec import Attention, NewRows
from kvq_core.errors import ArgumentError
from kvq_core.launch import target
from kvq_core.plan import invariance, planner
from kvq_core.plan.lookup import asking_first

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend
    from kvq_core.launch.replay import LaunchRecord
    from kvq_core.plan import Table

NOT_TAKEN = (RuntimeError, TypeError, ValueError, OverflowError, AttributeError)
"""What torch's dispatcher, or the op's own dispatch, raises for arguments that are of no type the op takes."""
_MAX_SEQLEN_K = ReadArgs._fields.index("max_seqlen_k")


def kernels_run_on(device: torch.device) -> bool:
    """Whether Triton kernels run on ``device``: any GPU, or the CPU when Triton's interpreter was asked for."""
    return device.type == "cuda" or target.current() is not None or variables.interpreting()


def replays_on(device: torch.device) -> bool:
    """Whether calls on ``device`` may repeat launches: on NVIDIA GPUs, and not under ``KVQ_DEBUG=1``, which looks at values."""
    return device.type == "cuda" and torch.version.hip is None and not debug.enabled()


@torch.no_grad()
def _write(backend: QuantKVBackend, batch_invariant: bool, *arguments: Any) -> LaunchRecord | None:
    rows = NewRows.checked(backend, WriteArgs(*arguments), batch_invariant=batch_invariant)
    if debug.enabled():
        debug.check_given(backend, rows)
        debug.check_slots(rows)
    if rows.key.shape[0] == 0 or rows.key.shape[1] == 0 or rows.keys.num_blocks == 0:
        return None
    if kernels_run_on(rows.key.device):
        return backend.write(rows)
    torch_path.write(backend, rows)
    return None


@torch.no_grad()
def _read(backend: QuantKVBackend, batch_invariant: bool, *arguments: Any) -> LaunchRecord | None:
    attention = Attention.checked(backend, ReadArgs(*arguments), batch_invariant=batch_invariant)
    if debug.enabled():
        debug.check_given(backend, attention)
        debug.check_batch(attention)
    if _is_empty(attention):
        return None
    return _launched(backend, attention)


def _is_empty(attention: Attention) -> bool:
    """Whether no row belongs to a sequence."""
    batch = attention.batch
    return 0 in (*attention.q.shape[:2], batch.num_seqs, batch.max_seqlen_q)


def _launched(backend: QuantKVBackend, attention: Attention) -> LaunchRecord | None:
    # Kernels read block 0 in place of those that are missing: there has to be one.
    if kernels_run_on(attention.q.device) and attention.keys.num_blocks > 0:
        return backend.read(attention)
    torch_path.read(backend, attention)
    return None


@torch.no_grad()
def _read_joined(
    backend: QuantKVBackend, arguments: tuple[Any, ...], first: QuantKVBackend, of_first: tuple[Any, ...], batch_invariant: bool
) -> LaunchRecord | None:
    before, attention = (
        Attention.checked(mode, ReadArgs(*given), batch_invariant=batch_invariant)
        for mode, given in ((first, of_first), (backend, arguments))
    )
    if _is_empty(attention):
        return None
    if 0 in (attention.keys.num_blocks, before.keys.num_blocks):
        _launched(first, before)
        _launched(backend, attention)
        return None
    return backend.read_joined(attention, first, before)


def _read_facts(arguments: tuple[Any, ...]) -> tuple[Facts, list[int]]:
    """The facts of a read, with ``max_seqlen_k`` as the plan sees it: the calls of one step have those of the last, mostly."""
    longest = arguments[_MAX_SEQLEN_K]
    if longest > 0:
        arguments = (*arguments[:_MAX_SEQLEN_K], planner.power_of_two(longest), *arguments[_MAX_SEQLEN_K + 1 :])
    return facts_of(arguments)


@dataclass(frozen=True)
class _Verb:
    """One of the two ops: its arguments, its body, and what of its arguments a call depends on."""

    name: str
    args: OpArgs
    body: Callable[..., LaunchRecord | None]
    facts: Callable[[tuple[Any, ...]], tuple[Facts, list[int]]]

    @functools.cached_property
    def _written(self) -> frozenset[str]:
        return written(self.args)

    def written(self, backend: QuantKVBackend) -> frozenset[str]:
        """The names of the arguments that the op writes. Scales that the caller gives are inputs."""
        return self._written - {"k_scale_cache", "v_scale_cache"} if backend.takes_scales else self._written

    def check_memory(self, backend: QuantKVBackend, arguments: tuple[Any, ...]) -> Apart:
        return check_apart(self.args._fields, arguments, self.written(backend))


_READ = _Verb("read", ReadArgs, _read, _read_facts)
_WRITE = _Verb("write", WriteArgs, _write, facts_of)
_VERBS = (_WRITE, _READ)
_BY_NAME = {verb.name: verb for verb in _VERBS}
_JOINED = "joined reads"


@dataclass(frozen=True)
class _Bound:
    """The backend that a mode's ops call, and the calls of each op that can be repeated."""

    backend: QuantKVBackend
    repeats: dict[str, ReplayCache] = field(default_factory=lambda: {name: ReplayCache() for name in (*_BY_NAME, _JOINED)})

    def try_repeat(self, verb: _Verb, arguments: tuple[Any, ...]) -> bool:
        """Repeat the launches of an earlier call like this one; False if there was none, or where only the op may be called."""
        device = arguments[0].device
        if (
            not replays_on(device)
            or (device.type == "cuda" and device.index != torch.cuda.current_device())
            or (verb is _READ and _JOINING.reads is not None)
        ):
            return False
        facts, addresses = verb.facts(arguments)
        # Of tensors without memory, all zeros, only the dispatcher knows.
        if not all(addresses):
            return False
        repeat = self.repeats[verb.name].get((invariance.is_batch_invariant(), *facts))
        return repeat is not None and repeat(addresses)

    def call(self, verb: _Verb, arguments: tuple[Any, ...]) -> None:
        if verb is _READ and _JOINING.reads is not None:
            _JOINING.reads.append((self, arguments))
            return
        device = arguments[0].device
        # Read once for each call: another thread may turn the switch before the call is over.
        batch_invariant = invariance.is_batch_invariant()
        if not replays_on(device):
            verb.check_memory(self.backend, arguments)
            verb.body(self.backend, batch_invariant, *arguments)
            return
        facts, addresses = verb.facts(arguments)
        self._repeat(
            verb.name,
            (batch_invariant, *facts),
            addresses,
            lambda: verb.check_memory(self.backend, arguments),
            lambda: verb.body(self.backend, batch_invariant, *arguments),
        )

    def _repeat(
        self, kind: str, facts: Facts, addresses: list[int], check: Callable[[], Apart], body: Callable[[], LaunchRecord | None]
    ) -> None:
        """Repeat the launches of the earlier call with these facts, or go the whole way and keep what was launched."""
        repeats = self.repeats[kind]
        repeat = repeats.get(facts)
        if repeat is not None and repeat(addresses):
            return
        apart, record = check(), body()
        repeat = record.repeat(addresses, apart) if record is not None else None
        if repeat is not None:
            repeats.keep(facts, repeat)

    def call_joined(self, arguments: tuple[Any, ...], first: _Bound, of_first: tuple[Any, ...]) -> None:
        """The read ``first`` with arguments ``of_first``, and one with ``arguments`` that joins its result, as one call."""
        batch_invariant = invariance.is_batch_invariant()
        written = _READ.written(self.backend) | _READ.written(first.backend)
        tensors = {id(x): index for index, x in enumerate(of_first) if isinstance(x, torch.Tensor)}
        # A tensor that both read is one of the call's.
        named = zip(ReadArgs._fields, arguments, strict=False)
        rest = tuple(("as", tensors[id(x)]) if id(x) in tensors and name not in written else x for name, x in named)
        (facts_of_first, addresses), (facts, more) = _READ.facts(of_first), _READ.facts(rest)
        self._repeat(
            _JOINED,
            (batch_invariant, first.backend, facts_of_first, facts),
            addresses + more,
            lambda: check_apart(ReadArgs._fields[: len(of_first)] + ReadArgs._fields, of_first + rest, written),
            lambda: _read_joined(self.backend, arguments, first.backend, of_first, batch_invariant),
        )


class _Joining(threading.local):
    """The reads that this thread has put off within :func:`joined_reads`."""

    reads: list[tuple[_Bound, tuple[Any, ...]]] | None = None


_JOINING = _Joining()


@contextlib.contextmanager
def joined_reads() -> Iterator[None]:
    """Put off the two reads within the block, of which the second joins the first's result, and launch them as one call at its end.

    What they raise is raised there. Where launches are not repeated the reads are called one after the other.
    """
    before = _JOINING.reads
    reads: list[tuple[_Bound, tuple[Any, ...]]] = []
    _JOINING.reads = reads
    try:
        yield
    finally:
        _JOINING.reads = before
    if not reads:  # tensors of a tracer
        return
    (first, of_first), (second, arguments) = reads
    device = arguments[0].device
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    with torch.cuda.device(device) if elsewhere else contextlib.nullcontext():
        if replays_on(device):
            second.call_joined(arguments, first, of_first)
        else:
            first.call(_READ, of_first)
            second.call(_READ, arguments)


class _Ops:
    """The ops defined so far. A mode that is registered again (a test's, say) takes over its name's ops."""

    def __init__(self) -> None:
        self._libraries: list[torch.library.Library] = []
        # Reentrant: a thread that was interrupted while it held the lock can take it again.
        self._lock = threading.RLock()
        self._bound: dict[str, _Bound] = {}
        self._defined: dict[tuple[str, str], Callable[..., None]] = {}

    def bind(self, backend: QuantKVBackend) -> None:
        """Make ``kvq::<mode>_*`` call ``backend``; define them if this is the first of its mode."""
        with self._lock:
            self._bind(backend)

    def _bind(self, backend: QuantKVBackend) -> None:
        before = self._bound.get(backend.mode)
        if before is not None:
            if any(verb.written(before.backend) != verb.written(backend) for verb in _VERBS):
                what = f"mode {backend.mode} with needs_scale_caches {backend.needs_scale_caches}, reads_scales {backend.reads_scales}"
                raise ArgumentError("backend", what, "what that mode had before in this process: its ops say which arguments they change")
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
        mode = backend.mode
        name = _op_name(mode, verb.name)
        library.define(name + schema(verb.args, verb.written(backend)))

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
            for argument, x in zip(verb.args._fields, arguments, strict=False):
                if isinstance(x, torch.Tensor) and x.device.type == "meta" and not isinstance(x, FakeTensor):
                    raise ArgumentError(argument, "a tensor on meta", "one on a CPU or CUDA device")

        torch.library.register_fake(f"kvq::{name}", no_result, lib=library)
        self._defined[mode, verb.name] = getattr(torch.ops.kvq, name).default

    def forget(self) -> None:
        with self._lock:
            self._bound = {mode: _Bound(bound.backend) for mode, bound in self._bound.items()}

    def bound(self, backend: QuantKVBackend) -> _Bound | None:
        """What the ops of its mode are bound to, if that is ``backend``."""
        bound = self._bound.get(backend.mode)
        return bound if bound is not None and bound.backend is backend else None

    def op(self, mode: str, verb: str) -> Callable[..., None]:
        return self._defined[mode, verb]


_OPS = _Ops()


def forget_repeats() -> None:
    """Have the next call of every kind go the whole way: for who changes plans or kernels in a running program (tuning, tests)."""
    _OPS.forget()


@contextlib.contextmanager
def planning_with(table: Table) -> Iterator[None]:
    """Within the block, calls are planned by ``table`` where it has an entry: for tuning and tests. Nothing planned before is repeated."""

    def forget() -> None:
        planner.plan.cache_clear()
        forget_repeats()

    try:
        with asking_first(table):
            forget()
            yield
    finally:
        # Once the table is withdrawn, so that no other thread plans by it again.
        forget()


def _op_name(mode: str, verb: str) -> str:
    """``<mode>_<verb>``; of a composed mode, whose name has a slash in it, ``<mode of K>_with_<mode of V>_<verb>``."""
    return f"{mode.replace('/', '_with_')}_{verb}"


def define(backend: QuantKVBackend) -> None:
    """Have the ops of its mode call ``backend``."""
    if _OPS.bound(backend) is None:
        variables.check()
        _OPS.bind(backend)


def op(backend: QuantKVBackend, verb: str) -> Callable[..., object]:
    """The op ``kvq::<mode>_<verb>``, bound to ``backend``."""
    if target.current() is not None:
        # Tensors may lie where ops do not go.
        return functools.partial(_BY_NAME[verb].body, backend, invariance.is_batch_invariant())
    define(backend)
    return _OPS.op(backend.mode, verb)


def try_repeat(backend: QuantKVBackend, verb: str, arguments: tuple[Any, ...]) -> bool:
    """Repeat what the op ``verb`` launched for an earlier call with such arguments, plain tensors and numbers; False if only the op can."""
    bound = _OPS.bound(backend)
    return bound is not None and target.current() is None and bound.try_repeat(_BY_NAME[verb], arguments)
