"""The modes that a command is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kvq_core import variables
from kvq_core.errors import ArgumentError, KVQError
from kvq_core.registry import get_backend, list_backends, misnamed

if TYPE_CHECKING:
    from kvq_core.backend import QuantKVBackend

F = TypeVar("F", bound=Callable[..., Any])


def mode_option(command: F) -> F:
    """``--mode``, given several times or with commas; the command gets the tuple ``modes``."""
    option = click.option("--mode", "--modes", "modes", multiple=True, metavar="MODE[,MODE...]", callback=_split, help="Only these modes.")
    return option(command)


def _split(ctx: click.Context, parameter: click.Parameter, given: Sequence[str]) -> tuple[str, ...]:
    names = tuple(name.strip() for part in given for name in part.split(","))
    if "" in names:
        raise ArgumentError("--mode", repr(",".join(given)), "names of modes, with commas between them")
    return names


def backends_of(names: Sequence[str]) -> tuple[list[QuantKVBackend], list[str]]:
    """The backends asked for, or of every installed mode, each once; and what is wrong with those of the latter that do not load.

    Raises:
        KVQError: a mode asked for is not installed, or cannot be used; a variable of the environment is wrong.
    """
    variables.check()
    if names:
        return list({id(backend): backend for backend in map(get_backend, names)}.values()), []
    found: dict[int, QuantKVBackend] = {}
    broken = []
    for mode in dict.fromkeys(entry.mode for entry in list_backends()):
        if fault := misnamed(mode):
            broken.append(f"mode {mode!r} cannot be used: {fault}")
            continue
        try:
            backend = get_backend(mode)
            found[id(backend)] = backend
        except KVQError as problem:
            broken.append(str(problem))
    return sorted(found.values(), key=lambda backend: backend.mode != "none"), broken
