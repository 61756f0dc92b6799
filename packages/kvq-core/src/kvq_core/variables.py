"""The environment variables that change what kvq does: the one table of their names, what they take, and what they do.

A variable that cannot be meant (a value that is none of those it takes, a name that begins with ``KVQ_`` and is none of these) is an
:class:`~kvq_core.errors.ArgumentError` that names it: at the call that reads it, and at :func:`~kvq_core.get_backend` and every command
of the command line, which look at all of them. Importing kvq reads none.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from kvq_core.errors import ArgumentError

_PREFIX: Final = "KVQ_"
_FLAGS: Final = MappingProxyType(
    {**dict.fromkeys(("1", "true", "on", "yes"), True), **dict.fromkeys(("", "0", "false", "off", "no"), False)}
)
_INTERPRETED: Final = frozenset({"1", "true", "on", "yes", "y"})
"""What Triton takes for true; everything else is false to it."""


def _is_flag(text: str) -> bool:
    return text.strip().lower() in _FLAGS


def _is_place(text: str) -> bool:
    try:
        return not text or Path(text).exists()
    except OSError:  # a name too long, a folder that may not be read
        return False


def _are_pairs(text: str) -> bool:
    return pairs(text) is not None


@dataclass(frozen=True)
class Variable:
    """``takes``: the values it may have, in words, which ``allows`` tests; ``does``: what it changes."""

    takes: str
    does: str
    allows: Callable[[str], bool]


_FLAG: Final = "1, true, on, yes; or 0, false, off, no"
VARIABLES: Final = MappingProxyType(
    {
        "KVQ_DEBUG": Variable(_FLAG, "slots and block ids are checked at every call, which waits for the device", _is_flag),
        "KVQ_BATCH_INVARIANT": Variable(
            _FLAG, "a sequence's result does not depend on what else is in its batch; a few per cent slower", _is_flag
        ),
        "KVQ_BACKENDS": Variable(
            "comma-separated mode=distribution pairs, one per mode", "who provides a mode that several packages claim", _are_pairs
        ),
        "KVQ_PLANS": Variable(
            "a table of launch plans, a folder of them named ARCH.json, or nothing: none but kvq's",
            "tables of launch plans of one's own",
            _is_place,
        ),
        "KVQ_VLLM_CPU": Variable(_FLAG, "kvq-vllm takes the place of vLLM's own attention on its CPU platform, for tests", _is_flag),
        "TRITON_INTERPRET": Variable(
            "1, true, on, yes", "Triton's interpreter runs the kernels on CPU tensors, some thousand times slower", lambda text: True
        ),
    }
)


def flag(name: str) -> bool:
    """Whether the variable ``name`` is on, read at each call, so that it can be switched in a running program.

    Raises:
        ArgumentError: its value is none of those that it takes.
    """
    # Mostly it is not set. os.environ would raise an error and catch it, which takes 0.7 us; its own dictionary, if Python still has it,
    # tells in 0.1.
    held = getattr(os.environ, "_data", None)
    if held is not None and os.environ.encodekey(name) not in held:
        return False
    text = os.environ.get(name)
    if text is None:
        return False
    on = _FLAGS.get(text.strip().lower())
    if on is None:
        raise _wrong(name, text)
    return on


def interpreting() -> bool:
    """Whether Triton's interpreter was asked for, as Triton reads the variable."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in _INTERPRETED


def place(name: str) -> Path | None:
    """The file or folder that the variable ``name``, which is set, names; ``None`` if it is empty.

    Raises:
        ArgumentError: there is no such thing.
    """
    text = os.environ[name]
    if not _is_place(text):
        raise _wrong(name, text)
    return Path(text) if text else None


def pairs(text: str) -> tuple[tuple[str, str], ...] | None:
    """The ``mode=distribution`` pairs of ``KVQ_BACKENDS``; ``None`` if it holds something else."""
    found = []
    for item in filter(str.strip, text.split(",")):
        mode, equals, distribution = (part.strip() for part in item.partition("="))
        if not (mode and equals and distribution):
            return None
        found.append((mode, distribution))
    return tuple(found)


def faults() -> dict[str, ArgumentError]:
    """What is wrong with the variables that are set, by name."""
    found = {}
    for name in sorted(name for name in os.environ if name.startswith(_PREFIX) or name in VARIABLES):
        text = os.environ[name]
        if name not in VARIABLES:
            found[name] = _unknown(name, text)
        elif not VARIABLES[name].allows(text):
            found[name] = _wrong(name, text)
    return found


def check() -> None:
    """Raise the first of :func:`faults`, if there is one."""
    for fault in faults().values():
        raise fault


@contextmanager
def without_faults() -> Iterator[dict[str, ArgumentError]]:
    """Within the block the variables that are wrong are not set: for a report that goes on, and tells of them."""
    found = faults()
    kept = {name: os.environ.pop(name) for name in found}
    try:
        yield found
    finally:
        os.environ.update(kept)


def _wrong(name: str, text: str) -> ArgumentError:
    return ArgumentError(name, repr(text), VARIABLES[name].takes)


def _unknown(name: str, text: str) -> ArgumentError:
    known = [variable for variable in VARIABLES if variable.startswith(_PREFIX)]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return ArgumentError(name, f"{text!r}, and no variable of this name is known", f"one of {', '.join(known)}{hint}")
