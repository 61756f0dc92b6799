"""``docs/command-line.md`` shows what the commands print.

In its console blocks a line ``$ kvq ...`` is a command, and what follows its output. Under ``<!-- varies -->`` the output depends on the
machine: there the command must exist with its options, and name every installed mode if it names any.
"""

import re
import shlex
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from kvq_core import list_backends
from kvq_core.cli.app import app

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "command-line.md"
BLOCK = re.compile(r"^(?P<varies><!-- varies -->\n)?```console\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
MODES = {entry.mode for entry in list_backends()}

pytestmark = pytest.mark.quick


def shown() -> list[tuple[str, str, bool]]:
    """(command, output, whether it varies) of the page's console blocks, in order."""
    found = []
    for block in BLOCK.finditer(PAGE.read_text(encoding="utf-8")):
        for part in block["body"].split("$ ")[1:]:
            command, _, out = part.partition("\n")
            found.append((command, out.rstrip("\n"), bool(block["varies"])))
    return found


@pytest.fixture(autouse=True)
def as_a_reader_would(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRITON_INTERPRET", "KVQ_DEBUG", "KVQ_BACKENDS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(ROOT)


def without_versions(text: str) -> str:
    return re.sub(r"\b\d+\.\d+\.\d+\b", "VERSION", text)


@pytest.mark.parametrize(("command", "out", "varies"), shown(), ids=[command for command, *_ in shown()])
def test_what_the_page_shows_is_what_is_printed(command: str, out: str, varies: bool) -> None:
    program, *arguments = shlex.split(command)
    assert program == "kvq"
    if varies:
        name, *options = arguments
        app.commands[name].make_context(name, options)
        rows = {line.split()[0] for line in out.splitlines() if line}
        assert not MODES & rows or rows >= MODES
        return
    done = CliRunner().invoke(app, arguments, prog_name="kvq")
    assert done.exit_code == (2 if out.startswith("Error: ") else 0)
    assert without_versions(done.output.rstrip("\n")) == without_versions(out)


def test_the_page_shows_every_command() -> None:
    assert {shlex.split(command)[1] for command, *_ in shown()} == set(app.commands)
