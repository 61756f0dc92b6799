"""The modes that a command is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvq_core.errors import KVQError, UnknownModeError
from kvq_core.registry import ALIASES, FIRST_PARTY, get_backend, list_backends

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend

F = TypeVar("F", bound=Callable[..., Any])


def mode_option(command: F) -> F:
    """``--mode``, given several times or with commas; the command gets the tuple ``modes``."""
    option = click.option("--mode", "--modes", "modes", multiple=True, metavar="MODE[,MODE...]", callback=_split, help="Only these modes.")
    return option(command)


def _split(ctx: click.Context, parameter: click.Parameter, given: Sequence[str]) -> tuple[str, ...]:
    return tuple(name.strip() for part in given for name in part.split(",") if name.strip())


def backends_of(names: Sequence[str]) -> tuple[list[QuantKVBackend], list[str]]:
    """The backends asked for, or of every installed mode, each once; and what is wrong with those of the latter that do not load.

    Raises:
        KVQError: a mode asked for is not installed, or cannot be used.
    """
    if names:
        return list(dict.fromkeys(map(_asked_for, names))), []
    found: dict[QuantKVBackend, None] = {}
    broken = []
    for mode in dict.fromkeys(entry.mode for entry in list_backends()):
        try:
            found[get_backend(mode)] = None
        except KVQError as problem:
            broken.append(str(problem))
    return sorted(found, key=lambda backend: backend.mode != "none"), broken


def _asked_for(name: str) -> QuantKVBackend:
    try:
        return get_backend(name)
    except UnknownModeError as problem:
        raise UnknownModeError(f"{problem}{_hint(name)}") from None


def _hint(name: str) -> str:
    """How to get the modes that are not here; nothing where the error itself says so."""
    if ALIASES.get(name, name) in FIRST_PARTY:
        return ""
    here = {entry.mode for entry in list_backends()}
    missing = sorted({package for first_party, package in FIRST_PARTY.items() if first_party not in here})
    return f"; more modes: pip install {' '.join(missing)}" if missing else ""
