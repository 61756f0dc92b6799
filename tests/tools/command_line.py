"""``kvq ...`` in this process."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from click.testing import CliRunner

from kvq_core import list_backends
from kvq_core.cli.app import app

MODES = sorted({entry.mode for entry in list_backends()})
CONFIGS = Path(__file__).parents[1] / "data" / "configs"
LLAMA = CONFIGS / "llama-3.1-8b.json"
CODE = "".join(f"def f{i}(x):\n    return x * {i}\n" for i in range(20))
"""A text to score."""


class Ran(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def kvq(*arguments: object, charset: str = "utf-8") -> Ran:
    """Run the command line. Anything that would be a traceback is raised here.

    Bytes stand for a file of that content, a dict for Llama's config with these fields.
    """
    with TemporaryDirectory() as folder:
        given = [
            _file(part, Path(folder, f"{n}.json")) if isinstance(part, bytes | dict) else str(part) for n, part in enumerate(arguments)
        ]
        done = CliRunner(charset=charset).invoke(app, given, prog_name="kvq")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert "Traceback" not in done.output
    return Ran(done.exit_code, done.stdout, done.stderr)


def _file(content: bytes | dict[str, Any], path: Path) -> str:
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(json.loads(LLAMA.read_text()) | content).encode())
    return str(path)


def refused(*arguments: object) -> str:
    """What is said of bad input: exit status 2, nothing on stdout."""
    ran = kvq(*arguments)
    assert (ran.status, ran.out) == (2, "") and "Error: " in ran.err, ran
    return ran.err


def row(text: str, mode: str) -> list[str]:
    """The cells of a mode's line in a table."""
    return next(line for line in text.splitlines() if line.startswith(f"{mode} ")).split()
