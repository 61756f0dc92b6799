"""Which modes are installed, and the one instance of each that is in use.

A distribution offers a mode by an entry point in the group ``kvq.backends``: its name is the mode, its value the class. Listing reads
that metadata and imports nothing; a mode's package is imported when :func:`get_backend` is first asked for it.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.metadata import EntryPoint, distributions, entry_points
from threading import RLock
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeVar

from kvq_core import variables
from kvq_core.contract import blamed, checked
from kvq_core.errors import ArgumentError, BrokenBackendError, DuplicateModeError, KVQError, UnknownModeError, described, told

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend

    B = TypeVar("B", bound=QuantKVBackend | type[QuantKVBackend])

GROUP: Final = "kvq.backends"
OVERRIDE: Final = "KVQ_BACKENDS"
IN_PROCESS: Final = "in-process"
FIRST_PARTY: Final = MappingProxyType(
    {
        "none": "kvq-core",
        "int8_per_token_head": "kvq-int8fp8",
        "fp8_per_token_head": "kvq-int8fp8",
        "fp8_per_tensor": "kvq-int8fp8",
        "int4_per_token_head": "kvq-int4",
        "int3_per_token_head": "kvq-int3",
        "int2_per_token_head": "kvq-int2",
    }
)
ALIASES: Final = MappingProxyType({short: f"{short}_per_token_head" for short in ("int8", "fp8", "int4", "int3", "int2")})
SEPARATOR: Final = "/"
"""Between the mode of K and that of V, where the two differ: ``int8/int4``."""
_SHORT_PAIR: Final = re.compile(r"k(\d)v(\d)")
"""``k8v4``: so many bits for K, so many for V."""


_NEEDED_NAME: Final = f"letters, digits and underscores, and none of {', '.join(ALIASES)}, k8v4 and the like, which mean other modes"


@dataclass(frozen=True, slots=True, order=True)
class InstalledMode:
    """One offer of a mode: by which distribution (``in-process``: :func:`register_backend`), and the ``module:Class`` behind it."""

    mode: str
    distribution: str
    version: str
    value: str


@dataclass
class _Registry:
    """What is loaded or registered (``backends``), and which of it answered which question (``answers``)."""

    lock: RLock = field(default_factory=RLock)
    backends: dict[InstalledMode, QuantKVBackend] = field(default_factory=dict)
    answers: dict[tuple[str, str], QuantKVBackend] = field(default_factory=dict)
    pairs: dict[tuple[QuantKVBackend, QuantKVBackend], QuantKVBackend] = field(default_factory=dict)

    def offers(self) -> list[InstalledMode]:
        """Registered modes, then installed ones."""
        with self.lock:
            return [entry for entry in self.backends if entry.distribution == IN_PROCESS] + _installed()


_REGISTRY = _Registry()


def list_backends() -> tuple[InstalledMode, ...]:
    """Every mode on offer, sorted, from metadata alone: nothing is imported, so a broken plug-in is listed like any other.

    A mode that two distributions claim appears twice; one registered in this process hides what it replaces.
    """
    offers = _REGISTRY.offers()
    here = {entry.mode for entry in offers if entry.distribution == IN_PROCESS}
    return tuple(sorted(entry for entry in offers if entry.mode not in here or entry.distribution == IN_PROCESS))


def has_backend(mode: str) -> bool:
    """Whether anyone offers ``mode`` (a full name, an alias, or ``distribution:mode``). Imports nothing.

    Of a composed mode: whether :func:`get_backend` gives it. Imports both halves, which alone know whether they compose.
    """
    pair = halves_of(mode)
    if pair is not None:
        try:
            get_backend(mode)
        except KVQError:
            return False
        return True
    distribution, mode = _parse(mode)
    return any(entry.mode == mode and distribution in ("", _canonical(entry.distribution)) for entry in _REGISTRY.offers())


def find_backend(mode: str) -> InstalledMode:
    """The offer that :func:`get_backend` would take ``mode`` from, which is not composed of two. Imports nothing.

    Raises:
        UnknownModeError, DuplicateModeError: as :func:`get_backend`.
    """
    distribution, full = _parse(mode)
    with _REGISTRY.lock:
        return _choose(full, distribution, os.environ.get(OVERRIDE, ""))


def get_backend(mode: str) -> QuantKVBackend:
    """The one instance of ``mode``: a full name, an alias (``int4``), or ``distribution:mode`` to pick among distributions.

    ``int8/int4`` is K in one mode and V in another, each named as above; ``k8v4`` is short for it (:mod:`kvq_core.composed`).

    The mode's package is imported at the first call. A backend registered in this process goes first; otherwise
    ``KVQ_BACKENDS="mode=distribution,..."``, read at each call, settles which distribution provides a mode.

    Raises:
        UnknownModeError: nobody provides the mode, or the distribution chosen for it does not.
        DuplicateModeError: several distributions provide it, and nothing chooses between them.
        BrokenBackendError: its package fails to import, or what it offers is no backend of that mode.
        ArgumentError: an environment variable of kvq's is misspelled, or has a value that it does not take; or two modes do not compose.
    """
    pair = checked_halves(mode)
    if pair is not None:
        return _with_ops(compose(*map(get_backend, pair)))
    distribution, full = _parse(mode)
    variables.check()
    question = (mode, os.environ.get(OVERRIDE, ""))
    answers = _REGISTRY.answers
    answer = answers.get(question)
    if answer is not None:
        return answer
    with _REGISTRY.lock:
        answers = _REGISTRY.answers
        entry = _choose(full, distribution, question[1])
        backend = _REGISTRY.backends.get(entry)
    if backend is None:
        # Not under the lock, which would deadlock against Python's own import locks. The first of two racing threads provides the instance.
        loaded = _load(entry)
        with _REGISTRY.lock:
            backend = _REGISTRY.backends.setdefault(entry, loaded)
    return answers.setdefault(question, _with_ops(backend))


def _with_ops(backend: QuantKVBackend) -> QuantKVBackend:
    """``backend``, with its ops defined: a traced call cannot define them, and a door's first call may be within ``torch.compile``."""
    from kvq_core.call.ops import define

    with blamed(backend.mode):
        define(backend)
    return backend


def register_backend(backend: B, *, replace: bool = False) -> B:
    """Offer a :class:`QuantKVBackend` class or instance under its ``mode`` in this process; usable as a class decorator.

    Raises:
        ArgumentError: it is no backend, or its ``mode`` is not a usable name.
        DuplicateModeError: the mode is installed or registered already, and ``replace`` is false.
    """
    if not isinstance(replace, bool):
        raise ArgumentError("replace", described(replace), "True or False")
    try:
        instance = checked(backend)
    except Exception as cause:
        raise ArgumentError("backend", told(cause), "a concrete subclass of QuantKVBackend with a mode, or an instance") from cause
    mode = instance.mode
    if misnamed(mode):
        raise ArgumentError("backend", f"mode {mode!r}", _NEEDED_NAME)
    with _REGISTRY.lock:
        rivals = [entry for entry in _REGISTRY.offers() if entry.mode == mode]
        if rivals and not replace:
            raise DuplicateModeError(f"mode {mode!r} is already provided by {_names(rivals)}; pass replace=True to take its place")
        _withdraw(mode)
        entry = InstalledMode(mode, IN_PROCESS, "", f"{type(instance).__module__}:{type(instance).__qualname__}")
        _REGISTRY.backends[entry] = instance
    return backend


def unregister_backend(mode: str) -> None:
    """Withdraw what :func:`register_backend` offered; an installed backend of that mode shows again."""
    if not _withdraw(_parse(mode)[1]):
        raise UnknownModeError(f"mode {mode!r} was not registered in this process")


def misnamed(mode: str) -> str:
    """What is wrong with the name of an entry point if no mode can be asked for by it; "" if nothing is."""
    if re.fullmatch(r"\w+", mode) and mode not in ALIASES and not _SHORT_PAIR.fullmatch(mode):
        return ""
    return f"its entry point is named {mode!r}, need {_NEEDED_NAME}"


def alias_of(mode: str) -> str:
    """The short name of a mode: ``int4``, ``k8v4``; "" if it has none. Imports nothing."""
    pair = halves_of(mode)
    if pair is None:
        return next((short for short, full in ALIASES.items() if full == mode), "")
    bits = [found[1] for half in pair if (found := re.fullmatch(r"int(\d)_per_token_head", half))]
    return f"k{bits[0]}v{bits[1]}" if len(bits) == 2 else ""


def compose(key_half: QuantKVBackend, value_half: QuantKVBackend) -> QuantKVBackend:
    """The one instance of the mode with K in one mode and V in another; of two that are the same, that mode.

    Raises:
        ArgumentError: a half has no scale for each (token, head), or is composed itself.
    """
    if key_half is value_half:
        return key_half
    from kvq_core.composed import ComposedBackend

    with _REGISTRY.lock:
        found = _REGISTRY.pairs.get((key_half, value_half))
        return found or _REGISTRY.pairs.setdefault((key_half, value_half), ComposedBackend(key_half, value_half))


def short_pairs() -> tuple[str, ...]:
    """``k8v4`` and the like: the short names of pairs of installed modes with so many bits. Imports nothing."""
    bits = sorted({found[1] for entry in _REGISTRY.offers() if (found := re.fullmatch(r"int(\d)_per_token_head", entry.mode))})
    return tuple(f"k{key}v{value}" for key in bits for value in bits if key != value)


def halves_of(name: object) -> tuple[str, str] | None:
    """The modes of K and of V in the name of a composed mode; ``None`` for others."""
    if not isinstance(name, str):
        return None
    short = _SHORT_PAIR.fullmatch(name.strip())
    if short is not None:
        return (f"int{short[1]}_per_token_head", f"int{short[2]}_per_token_head")
    key, separator, value = name.partition(SEPARATOR)
    return (key, value) if separator else None


def checked_halves(name: str) -> tuple[str, str] | None:
    """:func:`halves_of` a name that was asked for.

    Raises:
        ArgumentError: a half is missing, or there are more than two.
    """
    pair = halves_of(name)
    if pair is not None and not all(half.strip() and SEPARATOR not in half for half in pair):
        raise ArgumentError("mode", repr(name), "one mode, or that of K and that of V as in 'int8/int4'")
    return pair


def _withdraw(mode: str) -> bool:
    with _REGISTRY.lock:
        gone = [entry for entry in _REGISTRY.backends if entry.mode == mode and entry.distribution == IN_PROCESS]
        for entry in gone:
            del _REGISTRY.backends[entry]
        _REGISTRY.answers = {}  # a new one, so that a get_backend still at work fills the old one
    return bool(gone)


def _canonical(distribution: str) -> str:
    """A distribution's name as packaging compares it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution.strip()).lower()


def _parse(name: object) -> tuple[str, str]:
    """``(distribution or "", full mode name)`` of what a caller asked for."""
    if not isinstance(name, str):
        raise ArgumentError("mode", described(name), "the name of a mode, such as 'int4_per_token_head'")
    distribution, _, mode = name.rpartition(":")
    return _canonical(distribution), ALIASES.get(mode.strip(), mode.strip())


def _installed() -> list[InstalledMode]:
    """The entry points. One distribution found twice on ``sys.path`` (editable, and a wheel) counts once: the first one imports."""
    found: dict[tuple[str, str], InstalledMode] = {}
    for point in _points():
        name, version = _named(point)
        found.setdefault((point.name, _canonical(name)), InstalledMode(point.name, name, version, point.value))
    return list(found.values())


def _points() -> list[EntryPoint]:
    """The entry points of the group; of a distribution whose metadata cannot be read, none."""
    try:
        return list(entry_points(group=GROUP))
    except Exception:  # of one distribution, which must not take the others along
        found: list[EntryPoint] = []
        for distribution in distributions():
            with suppress(Exception):
                found += distribution.entry_points.select(group=GROUP)
        return found


def _named(point: EntryPoint) -> tuple[str, str]:
    """Name and version of the distribution behind an entry point, as far as its metadata tell."""
    try:
        return (point.dist.name or "unnamed", point.dist.version or "") if point.dist else ("unnamed", "")
    except Exception:
        return "unnamed", ""


def _overrides(text: str) -> dict[str, str]:
    chosen: dict[str, str] = {}
    for name, distribution in variables.pairs(text) or ():
        if chosen.setdefault(_parse(name)[1], _canonical(distribution)) != _canonical(distribution):
            raise ArgumentError(OVERRIDE, repr(text), variables.VARIABLES[OVERRIDE].takes)
    return chosen


def _choose(mode: str, distribution: str, override: str) -> InstalledMode:
    """The one offer that answers for ``mode``, or an error that says how to choose."""
    everything = _REGISTRY.offers()
    offers = [entry for entry in everything if entry.mode == mode]
    if not offers:
        here = sorted({entry.mode for entry in everything})
        installed = ", ".join(here) or "nothing"
        raise UnknownModeError(f"no installed package provides mode {mode!r}; installed: {installed}{_hint(mode, here)}")
    if not distribution and offers[0].distribution == IN_PROCESS:
        return offers[0]
    wanted = distribution or _overrides(override).get(mode)
    fitting = [entry for entry in offers if wanted in (None, _canonical(entry.distribution))]
    if not fitting:
        source = "the name asked for" if distribution else f"{OVERRIDE}={override!r}"
        raise UnknownModeError(f"{source} takes mode {mode!r} from {wanted}, which does not provide it; {_names(offers)} does")
    if len(fitting) > 1:
        first = fitting[0].distribution
        ways = f'{OVERRIDE}="{mode}={first}" or get_backend("{first}:{mode}")'
        raise DuplicateModeError(f"mode {mode!r} is provided by {_names(fitting)}; uninstall one, or choose with {ways}")
    return fitting[0]


def _hint(mode: str, here: list[str]) -> str:
    """What else ``mode`` could have meant, and how to get it, or the modes that are not among those ``here``."""
    if mode in FIRST_PARTY:
        return f"; to get it: {_command([FIRST_PARTY[mode]])}"
    near = get_close_matches(mode.lower(), [*ALIASES, *FIRST_PARTY, *here], n=1)
    missing = sorted({package for first_party, package in FIRST_PARTY.items() if first_party not in here})
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return hint + (f"; more modes: {_command(missing)}" if missing else "")


def _command(packages: list[str]) -> str:
    return f"pip install {' '.join(packages)}, or, from a checkout, {' '.join(f'./packages/{package}' for package in packages)}"


def _names(entries: list[InstalledMode]) -> str:
    return " and ".join(sorted(f"{entry.distribution} {entry.version}".rstrip() for entry in entries))


def _load(entry: InstalledMode) -> QuantKVBackend:
    """Import what an entry point names. Whatever goes wrong is that distribution's fault, and is told as such."""
    try:
        if fault := misnamed(entry.mode):
            raise TypeError(fault)
        backend = checked(EntryPoint(entry.mode, entry.value, GROUP).load())
        if backend.mode != entry.mode:
            raise TypeError(f"its mode attribute is {backend.mode!r}, need {entry.mode!r}, the entry point's name")
    except KeyboardInterrupt:
        raise
    except BaseException as cause:  # SystemExit, too, and what test libraries raise
        raise BrokenBackendError(f"mode {entry.mode!r} from {_names([entry])} ({entry.value}) cannot be used: {told(cause)}") from cause
    return backend
