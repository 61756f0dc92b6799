"""How commands print: aligned tables for people; JSON and CSV, with full figures, for programs."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click
from tabulate import tabulate

Record = Mapping[str, Any]
F = TypeVar("F", bound=Callable[..., Any])


def output_options(command: F) -> F:
    """``--json`` and ``--csv`` for a command that takes ``form``: ``"json"``, ``"csv"`` or ``"table"``."""
    for name in ("csv", "json"):
        command = click.option(f"--{name}", "form", flag_value=name, help=f"Print {name.upper()} instead of a table.")(command)
    return click.option("--table", "form", flag_value="table", default="table", hidden=True)(command)


def table(header: Sequence[str], lines: Sequence[Sequence[str]], *, left: Sequence[int] = (0,)) -> str:
    """``lines`` under ``header``, columns aligned to the right but for those in ``left``."""
    align = tuple("left" if i in left else "right" for i in range(len(header)))
    if not lines:
        return "  ".join(header)
    text = tabulate(lines, header, tablefmt="simple", disable_numparse=True, colalign=align)
    return "\n".join(line.rstrip() for line in text.splitlines())


def as_json(content: object) -> str:
    """``content`` as JSON that every reader takes: numbers that are none become null."""
    return json.dumps(_plain(content), indent=1)


def as_csv(records: Sequence[Record]) -> str:
    """One line a record, under the names of the first one's fields."""
    text = io.StringIO()
    if records:
        writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
    return text.getvalue().rstrip("\n")


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
