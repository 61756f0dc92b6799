"""``kvq list``: the installed modes, from metadata alone; with ``--check``, whether each works."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass
from typing import Final

import click

from kvq_core import variables
from kvq_core.cli import output
from kvq_core.cli.modes import mode_option
from kvq_core.errors import DuplicateModeError, KVQError, told
from kvq_core.registry import (
    IN_PROCESS,
    OVERRIDE,
    InstalledMode,
    alias_of,
    checked_halves,
    find_backend,
    get_backend,
    halves_of,
    list_backends,
    misnamed,
)

FIRST_PARTY_BITS: Final = {
    "none": 16.0,
    "int8_per_token_head": 8.25,
    "fp8_per_token_head": 8.25,
    "fp8_per_tensor": 8.0,
    "int4_per_token_head": 4.25,
    "int3_per_token_head": 3.25,
    "int2_per_token_head": 2.25,
}
"""Bits a stored value with heads of 128 and a bf16 model, scales included: facts of the formats, here so that listing imports nothing."""


FAILED: Final = ("broken", "unavailable")
"""What a mode's ``status`` is if it cannot be used; the exit status of commands is then 1."""


@dataclass(frozen=True)
class Listed:
    """One offer of a mode. ``bits_per_element`` and ``relative_mse`` are ``None`` where only ``--check`` could tell."""

    mode: str
    alias: str
    bits_per_element: float | None
    package: str
    version: str
    value: str
    status: str
    error: str = ""
    relative_mse: float | None = None


def listed(entry: InstalledMode, *, by_name: bool = True) -> Listed:
    """What metadata says of ``entry``; ``by_name``: and whether it is what its mode's name alone gives."""
    status, error = _choice(entry) if by_name else ("installed", "")
    each = [FIRST_PARTY_BITS.get(half) for half in halves_of(entry.mode) or (entry.mode,)]
    known = [bits for bits in each if bits is not None]
    bits = sum(known) / len(each) if len(known) == len(each) else None
    return Listed(entry.mode, alias_of(entry.mode), bits, entry.distribution, entry.version, entry.value, status, error)


def named(name: str) -> InstalledMode:
    """The offer of a mode that was asked for by name; of a mode composed of two, both offers in one."""
    pair = checked_halves(name)
    if pair is None:
        return find_backend(name)
    offers = [find_backend(half) for half in pair]
    joined = ("/".join(dict.fromkeys(parts)) for parts in zip(*map(astuple, offers), strict=True))
    return InstalledMode(*joined)


def checked(entry: InstalledMode, *, by_name: bool = True) -> Listed:
    """``entry``, as :func:`listed` takes it, after a small write and read on this machine's best device."""
    from dataclasses import replace

    from kvq_core import selfcheck
    from kvq_core.environment import default_device

    line = listed(entry, by_name=by_name)
    if line.status == "broken":
        return line
    try:
        plain = entry.distribution == IN_PROCESS or halves_of(entry.mode) is not None
        name = entry.mode if plain else f"{entry.distribution}:{entry.mode}"
        found = selfcheck.check(get_backend(name), default_device())
    except KeyboardInterrupt:
        raise
    except BaseException as problem:  # whatever a plug-in does, the others are still listed
        error = str(problem) if isinstance(problem, KVQError) else told(problem)
        return replace(line, status="broken", error=error, bits_per_element=None)
    return replace(
        line, status=line.status if line.error else "ok", bits_per_element=found.bits_per_element, relative_mse=found.relative_mse
    )


def _choice(entry: InstalledMode) -> tuple[str, str]:
    """The status of ``entry`` by its mode's name alone, and why :func:`get_backend` does not give it: several distributions claim the mode,
    ``KVQ_BACKENDS`` takes it from another or from one that lacks it, or nothing can ask for it."""
    if fault := misnamed(entry.mode):
        return "broken", fault
    try:
        chosen = find_backend(entry.mode)
    except DuplicateModeError as problem:
        return "duplicate", str(problem)
    except KVQError as problem:
        return "unavailable", str(problem)
    return ("installed", "") if chosen == entry else ("not chosen", f"{OVERRIDE} takes the mode from {chosen.distribution}")


@click.command(
    "list", epilog="Examples:\n\n\b\nkvq list\nkvq list --check\nkvq list --mode k8v4 --check\nkvq list --json | jq -r '.[].mode'"
)
@click.option("--check", is_flag=True, help="Load each mode, and write and read a few rows with it.")
@mode_option
@output.output_options
def list_modes(check: bool, modes: tuple[str, ...], form: str) -> None:
    """The installed modes: bits a value, package and version.

    Reads metadata only, so that a broken package is listed like any other; --check finds it, and then the exit status is 1. So it is if
    KVQ_BACKENDS takes a mode from a package that does not provide it.
    Bits are those of heads of 128, scales included; for modes of other packages only --check can tell them.
    K and V may have modes of their own: --mode int8/int4, or k8v4.
    """
    variables.check()
    if check and variables.interpreting():
        from kvq_core.environment import check_interpreter

        check_interpreter()
    entries = tuple(map(named, modes)) if modes else list_backends()
    found = [(checked if check else listed)(entry, by_name=not modes) for entry in entries]
    if form == "json":
        output.say(output.as_json([asdict(line) for line in found]))
    elif form == "csv":
        output.say(output.as_csv([asdict(line) for line in found]))
    else:
        output.say(_table(found, check))
        for line in found:
            if line.error:
                output.say(f"\n{line.status}: {line.mode} from {line.package}: {line.error}")
    if any(line.status in FAILED for line in found):
        raise SystemExit(1)


def _table(found: list[Listed], check: bool) -> str:
    header = ["mode", "alias", "bits/element", "package", "version", "status", *(["relative MSE"] if check else [])]
    lines = []
    for line in found:
        bits = "" if line.bits_per_element is None else f"{line.bits_per_element:.2f}"
        lost = "" if line.relative_mse is None else "exact" if line.relative_mse == 0 else f"{line.relative_mse:.2g}"
        lines.append([line.mode, line.alias, bits, line.package, line.version, line.status, *([lost] if check else [])])
    return output.table(header, lines, left=(0, 1, 3, 4, 5))
