"""``kvq ...`` in this process."""

import json
from dataclasses import dataclass
from typing import Any

from click.testing import CliRunner

from kvq_core.cli.app import app


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def kvq(*arguments: str) -> Ran:
    """Run the command line. Anything that would be a traceback is raised here."""
    done = CliRunner().invoke(app, list(arguments), prog_name="kvq")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert "Traceback" not in done.stderr
    return Ran(done.exit_code, done.stdout, done.stderr)


def refused(*arguments: str) -> str:
    """What is said of bad input: exit status 2, nothing on stdout."""
    ran = kvq(*arguments)
    assert (ran.status, ran.out) == (2, "") and "Error: " in ran.err, ran
    return ran.err


def row(text: str, mode: str) -> list[str]:
    """The cells of a mode's line in a table."""
    return next(line for line in text.splitlines() if line.startswith(f"{mode} ")).split()
