"""How commands print: aligned tables for people; JSON and CSV, with full figures, for programs."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from functools import wraps
from pathlib import Path
from typing import Any, Final, TextIO, TypeVar, cast

import click
from tabulate import tabulate

Record = Mapping[str, Any]
F = TypeVar("F", bound=Callable[..., Any])


_STREAM: Final = "kvq.stdout"


def output_options(command: F) -> F:
    """``--json`` and ``--csv`` for a command that takes ``form``: ``"json"``, ``"csv"`` or ``"table"``. It prints with :func:`say`."""

    @wraps(command)
    def of_one_form(*arguments: Any, as_json: bool, as_csv: bool, **options: Any) -> Any:
        if as_json and as_csv:
            raise click.UsageError("--json and --csv exclude each other.")
        with _kept_stdout():
            return command(*arguments, form="json" if as_json else "csv" if as_csv else "table", **options)

    for name in ("csv", "json"):
        of_one_form = click.option(f"--{name}", f"as_{name}", is_flag=True, help=f"Print {name.upper()} instead of a table.")(of_one_form)
    return cast(F, of_one_form)


class NewFile(click.Path):
    """The type of an option that names a file to be written: its folder exists."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = cast(Path, super().convert(value, param, ctx))
        if not path.absolute().parent.is_dir():
            self.fail(f"got {str(path)!r}, need a file in a folder that exists", param, ctx)
        return path


def say(text: str = "") -> None:
    """Print a line of the command's own. Letters that the stream cannot write are escaped."""
    stream: TextIO | None = click.get_current_context().meta[_STREAM]
    encoding = getattr(stream, "encoding", None) or "utf-8"
    if stream is not None:
        click.echo(text.encode(encoding, "backslashreplace").decode(encoding), file=stream)


def say_beside(lines: Iterable[str], form: str) -> None:
    """Print notes and faults: below a table, on standard error beside CSV. JSON has them in fields of its own."""
    for line in lines:
        if form == "csv":
            click.echo(line, err=True)
        elif form == "table":
            say(line)


@contextmanager
def _kept_stdout() -> Iterator[None]:
    """Standard output is the command's alone: what the code of modes prints meanwhile, libraries in C included, goes to standard error."""
    stream: TextIO | None = sys.stdout
    meta = click.get_current_context().meta
    with ExitStack() as stack:
        if stream is not None and _descriptor(stream) == 1:
            stream.flush()
            with suppress(OSError):  # no standard error
                stream = stack.enter_context(_elsewhere(stream))
        meta[_STREAM] = stream
        stack.enter_context(redirect_stdout(sys.stderr))
        yield


@contextmanager
def _elsewhere(stream: TextIO) -> Iterator[TextIO]:
    """What ``stream`` wrote to, while its descriptor, 1, leads to standard error."""
    kept = os.dup(1)
    os.dup2(2, 1)
    own = os.fdopen(kept, "w", encoding=stream.encoding, closefd=False)
    try:
        yield own
    finally:
        with suppress(BrokenPipeError):
            own.close()
        os.dup2(kept, 1)
        os.close(kept)


def _descriptor(stream: TextIO) -> int:
    try:
        return stream.fileno()
    except (AttributeError, OSError, ValueError):  # no file
        return -1


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
