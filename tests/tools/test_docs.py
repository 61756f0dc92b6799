"""The documents say what is so: their Python runs, their links lead somewhere, and their tables agree with the packages.

Sybil finds and runs the Python blocks. A page is one test, whose blocks share a namespace, so workers may take pages in any order. A
block that cannot run has a comment ``<!--- skip: next "reason" -->`` on the line before it.

In the console blocks of ``docs/command-line.md`` a line ``$ kvq ...`` is a command, and what follows its output. Under
``<!-- varies -->`` the output depends on the machine: there the command must exist with its options, and name every installed mode if it
names any.
"""

import contextlib
import json
import math
import re
import shlex
import types
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import SkipTest

import pytest
import torch
from click.testing import CliRunner
from sybil import Sybil
from sybil.parsers.myst import PythonCodeBlockParser, SkipParser

import plots
from generated import table
from kvq_core import get_backend, list_backends, unregister_backend
from kvq_core.cli.app import app
from kvq_core.registry import ALIASES, FIRST_PARTY, IN_PROCESS

ROOT = Path(__file__).parents[2]

SYBIL = Sybil(parsers=[PythonCodeBlockParser(), SkipParser()])
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "packages").glob("*/README.md")),
]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(?P<language>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
CONSOLE = re.compile(r"^(?P<varies><!-- varies -->\n)?```console\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def text_of(guide: str) -> str:
    return (ROOT / "docs" / f"{guide}.md").read_text(encoding="utf-8")


def run(page: Path) -> tuple[dict[str, Any], int]:
    """Execute a page's Python blocks in order; return their namespace, and how many there were, those skipped for a reason included."""
    document = SYBIL.parse(page)
    # What a module has, since dataclasses and the registry look up where a class was defined.
    document.namespace.update(vars(types.ModuleType(f"docs_{page.stem}")))
    blocks = 0
    for example in document.examples():
        if isinstance(example.parsed, tuple):
            action, reason = example.parsed
            assert action == "next" and reason, f"{name_of(page)}:{example.line}: a skip is for one block, and says why"
        else:
            blocks += 1
        with contextlib.suppress(SkipTest):
            example.evaluate()
    return document.namespace, blocks


@pytest.fixture(autouse=True)
def nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    before = {entry.mode for entry in list_backends() if entry.distribution == IN_PROCESS}
    yield
    for entry in list_backends():
        if entry.distribution == IN_PROCESS and entry.mode not in before:
            unregister_backend(entry.mode)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_runs(page: Path) -> None:
    space, blocks = run(page)
    languages = [block["language"] for block in FENCE.finditer(page.read_text(encoding="utf-8"))]
    assert blocks == languages.count("python"), "Sybil and the page disagree about what a Python block is"
    if page.stem == "write-a-backend":  # whose conformance suite is not collected here
        backend = get_backend("int4_plain")
        assert type(backend) is space["Int4Plain"] and space["TestInt4Plain"].mode == backend.mode
    rows = table(page.read_text(encoding="utf-8"), "mode") if page.stem in ("accuracy", "choosing-a-mode") else []
    for row in rows:  # what the page's own blocks have measured
        if page.stem == "accuracy":
            size, bits, error = space["measured"][row["mode"]]
            assert float(row["bytes per token and head"]) == size and float(row["bits per element"]) == bits, row
            assert float(row["times smaller"]) == pytest.approx(256 / size, abs=0.005), row
            assert float(row["relative MSE"]) == pytest.approx(error, rel=0.01), row
        elif row["mode"] != "none":
            assert float(row["pays from, tokens"].replace(",", "")) == pytest.approx(space["pays_from"][row["mode"]], abs=500), row


def test_relative_links_resolve() -> None:
    """Those to headings are the site's to check."""
    for page in PAGES:
        for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
            assert re.match(r"[a-z]+:|#", target) or (page.parent / target.partition("#")[0]).exists(), f"{name_of(page)}: {target}"


def test_the_api_page_has_every_public_name_and_says_how_stable_it_is() -> None:
    api = text_of("api")
    for package in ("kvq_core", "kvq_transformers"):
        described = set(re.findall(rf"^\.\. auto\w+:: (?:{package}\.)?(\w+)$", api, re.MULTILINE))
        assert set(import_module(package).__all__) <= described
    packages = [path.parent.name for path in sorted(ROOT.glob("packages/*/src/*/__init__.py"))]
    stated = [(row["package"], name) for row in table(api, "package") for name in row["names"].split(", ")]
    assert sorted(stated) == sorted((package, name) for package in packages for name in import_module(package).__all__)
    for row in table(api, "module"):
        assert all(hasattr(import_module(row["module"]), name) for name in row["names"].split(", ")), row
    assert all({row["stability"] for row in table(api, first)} == {"stable", "provisional"} for first in ("package", "module"))


def test_the_install_table_names_the_installed_modes() -> None:
    installed = {(e.distribution, e.mode, e.value) for e in list_backends() if e.distribution in FIRST_PARTY.values()}
    named = table(text_of("start-here"), "distribution")
    assert {(row["distribution"], row["mode"], row["entry point in kvq.backends"]) for row in named} == installed
    for row in named:
        assert row["import"] == row["distribution"].replace("-", "_") == row["entry point in kvq.backends"].partition(".")[0]
    assert {row["alias"]: row["mode"] for row in named if row["alias"]} == dict(ALIASES)


def test_the_tables_of_modes_show_what_was_measured() -> None:
    stored = {row["mode"]: row for row in table(text_of("accuracy"), "mode")}
    aliases = {row["mode"]: (row["alias"], row["distribution"]) for row in table(text_of("start-here"), "distribution")}
    choosing, readme = table(text_of("choosing-a-mode"), "mode"), table(README, "mode")
    for row, short, bar in zip(choosing, readme, plots.bars(), strict=True):
        assert row["mode"] == short["mode"] == bar.mode
        assert row["bytes per token and head"] == stored[bar.mode]["bytes per token and head"]
        assert (float(row["times smaller"]), float(row["decode, x FlashAttention 3 bf16"])) == (bar.times_smaller, bar.times_as_fast)
        assert (short["alias"], short["package"]) == aliases[bar.mode]
        assert all(short[column] == row[column] for column in short.keys() & row.keys())
        if bar.mode == "none":
            assert (row["loss, bits per byte"], row["pays from, tokens"]) == ("exact", "")
        else:
            assert row["loss, bits per byte"] == f"+{bar.loss:.2f} %"


def test_the_readme_claims_what_the_tables_show() -> None:
    guide = {(row["cache"], row["attention"]): row for row in table(text_of("vllm"), "cache")}
    assert all(row.items() <= guide[row["cache"], row["attention"]].items() for row in table(README, "cache"))
    quantized = [bar for bar in plots.bars() if bar.mode != "none"]
    for what, values in (("the speed", [b.times_as_fast for b in quantized]), ("smaller", [b.times_smaller for b in quantized])):
        # Rounded down: the tables' figures are rounded once already.
        least, most = (math.floor(round(100 * value) / 10) / 10 for value in (min(values), max(values)))
        assert f"{least} to {most} times {what}" in " ".join(README.split())
    for theme in plots.THEMES:  # otherwise: hatch run tables
        script, kept = plots.kept_in("modes", theme)
        assert script == plots.SCRIPT and [plots.Bar(**bar) for bar in json.loads(kept)] == plots.bars()


SHOWN = [
    (command, out.rstrip("\n"), bool(block["varies"]))
    for block in CONSOLE.finditer(text_of("command-line"))
    for command, _, out in (part.partition("\n") for part in block["body"].split("$ ")[1:])
]
"""(command, output, whether it varies) of the console blocks, in order."""


@pytest.mark.quick
@pytest.mark.parametrize(("command", "out", "varies"), SHOWN, ids=[command for command, *_ in SHOWN])
def test_what_the_page_shows_is_what_is_printed(command: str, out: str, varies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(ROOT)
    program, *arguments = shlex.split(command)
    assert program == "kvq" and {shlex.split(command)[1] for command, *_ in SHOWN} == set(app.commands)
    if varies:
        name, *options = arguments
        app.commands[name].make_context(name, options)
        modes, rows = {entry.mode for entry in list_backends()}, {line.split()[0] for line in out.splitlines() if line}
        assert not modes & rows or rows >= modes
    else:
        done = CliRunner().invoke(app, arguments, prog_name="kvq")  # what both streams say, in order
        assert done.exit_code == (2 if out.startswith("Error: ") else 0)
        assert re.sub(r"\b\d+\.\d+\.\d+\b", "VERSION", done.output.rstrip("\n")) == re.sub(r"\b\d+\.\d+\.\d+\b", "VERSION", out)
