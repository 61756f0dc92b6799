"""The documents say what is so: their Python runs, their links lead somewhere, and their tables and figures agree with the packages.

Sybil finds and runs the Python blocks. A page is one test, whose blocks share a namespace, so workers may take pages in any order. A
block that cannot run has a comment ``<!--- skip: next "reason" -->`` on the line before it.

In the console blocks of ``docs/command-line.md`` a line ``$ kvq ...`` is a command, and what follows its output. Under
``<!-- varies -->`` the output depends on the machine: there the command must exist with its options, and name every installed mode if it
names any.
"""

import contextlib
import importlib
import json
import math
import re
import shlex
import sys
import textwrap
import types
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import SkipTest

import pytest
import torch
from sybil import Sybil
from sybil.parsers.myst import PythonCodeBlockParser, SkipParser

import accuracy_agreement as agreement
import accuracy_compare as compare
import accuracy_page
import accuracy_report
import gate
import other_gpus
import performance_tables as tables
import plots
from command_line import kvq
from generated import Marks, part, table
from kvq_core import get_backend, list_backends
from kvq_core.cli.app import app
from kvq_core.plan.lookup import SWITCH
from kvq_core.registry import ALIASES, FIRST_PARTY
from kvq_core.testing import places

ROOT = Path(__file__).parents[2]
SYBIL = Sybil(parsers=[PythonCodeBlockParser(), SkipParser()])
GLOBS = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "packages/*/README.md")
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for glob in GLOBS for path in sorted(ROOT.glob(glob))}
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CONSOLE = re.compile(r"^(?P<varies><!-- varies -->\n)?```console\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)")
README, API, START = TEXTS["README.md"], TEXTS["docs/api.md"], TEXTS["docs/start-here.md"]
ACCURACY, CHOOSING, BACKEND = (TEXTS[f"docs/{name}.md"] for name in ("accuracy", "choosing-a-mode", "write-a-backend"))


@pytest.mark.parametrize("page", TEXTS)
def test_python_runs(page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    document, blocks = SYBIL.parse(ROOT / page), 0
    # What a module has, since dataclasses and the registry look up where a class was defined.
    document.namespace.update(vars(types.ModuleType(f"docs_{Path(page).stem}")))
    for example in document.examples():
        skip = example.parsed if isinstance(example.parsed, tuple) else None
        assert skip is None or (skip[0] == "next" and skip[1]), f"line {example.line}: a skip is for one block, and says why"
        blocks += skip is None
        with contextlib.suppress(SkipTest):
            example.evaluate()
    assert blocks == len(re.findall("^```python$", TEXTS[page], re.MULTILINE)), "Sybil and the page disagree about what a Python block is"
    space = document.namespace
    if TEXTS[page] is BACKEND:  # whose conformance suite is not collected here
        backend = get_backend("int4_plain")
        assert type(backend) is space["Int4Plain"] and space["TestInt4Plain"].mode == backend.mode
    for row in table(ACCURACY, "mode") if TEXTS[page] is ACCURACY else []:  # what the page's own blocks have measured
        size, bits, error = space["measured"][row["mode"]]
        assert float(row["bytes per token and head"]) == size and float(row["bits per element"]) == bits, row
        assert float(row["times smaller"]) == pytest.approx(256 / size, abs=0.005), row
        assert float(row["relative MSE"]) == pytest.approx(error, rel=0.01), row
    for row in table(CHOOSING, "mode") if TEXTS[page] is CHOOSING else []:
        pays_from = 0 if row["mode"] == "none" else space["pays_from"][row["mode"]]
        assert float(row["pays from, tokens"].replace(",", "") or 0) == pytest.approx(pays_from, abs=500), row


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
@pytest.mark.parametrize(("lengths", "query_len"), [((1, 17, 70), 1), ((37, 20), 20)], ids=["decode", "prefill"])
@pytest.mark.parametrize("where", places.params("interpret", "gpu"))
def test_the_kernels_of_the_page_about_backends_store_and_read_what_its_codec_says(
    where: str, lengths: tuple[int, ...], query_len: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the benchmarks' gate. The page's blocks are put into the files that it names, as a reader would, and nothing else."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    place = places.enter(where, monkeypatch)
    marks = {"codec": ["def dequantize("], "backend": ["if TYPE_CHECKING:", "class Int4Plain(", "def kernels(self)"]}
    marks |= {"quantize": ["def write_plane("], "format": ["= PlaneFormat("], "kernels": ["= Kernels("]}
    blocks = re.findall(r"^```python\n(.*?)^```$", BACKEND, re.MULTILINE | re.DOTALL)
    (package := tmp_path / "kvq_int4_plain").mkdir()
    for module, found in marks.items():
        parts = [next(block for block in blocks if mark in block) for mark in found]
        methods = [textwrap.indent(part, "    ") if part.startswith("def ") else part for part in parts]
        (package / f"{module}.py").write_text("\n".join(methods), encoding="utf-8")
        monkeypatch.delitem(sys.modules, f"kvq_int4_plain.{module}", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    backend = importlib.import_module("kvq_int4_plain.backend").Int4Plain()
    problem = replace(gate.PROBLEMS[0], seq_lens=lengths, query_len=query_len, query_heads=4, kv_heads=2, head_size=64, block_size=8)
    (verdict,) = gate.check_all([gate.Check(backend, problem)], place.device)
    assert verdict.green, verdict


def test_relative_links_resolve() -> None:
    """Those to headings are the site's to check."""
    for page, text in TEXTS.items():
        for target in LINK.findall(FENCE.sub("", text)):
            assert re.match(r"[a-z]+:|#", target) or (ROOT / page).parent.joinpath(target.partition("#")[0]).exists(), f"{page}: {target}"


def test_the_api_page_has_every_public_name_and_says_how_stable_it_is() -> None:
    for package in ("kvq_core", "kvq_transformers"):
        described = set(re.findall(rf"^\.\. auto\w+:: (?:{package}\.)?(\w+)$", API, re.MULTILINE))
        assert set(importlib.import_module(package).__all__) <= described
    packages = [path.parent.name for path in sorted(ROOT.glob("packages/*/src/*/__init__.py"))]
    stated = [(row["package"], name) for row in table(API, "package") for name in row["names"].split(", ")]
    assert sorted(stated) == sorted((package, name) for package in packages for name in importlib.import_module(package).__all__)
    for row in table(API, "module"):
        assert all(hasattr(importlib.import_module(row["module"]), name) for name in row["names"].split(", ")), row
    assert all({row["stability"] for row in table(API, first)} == {"stable", "provisional"} for first in ("package", "module"))


def test_the_install_table_names_the_installed_modes() -> None:
    named = table(START, "distribution")
    assert {(row["distribution"], row["mode"], row["entry point in kvq.backends"]) for row in named} == {
        (entry.distribution, entry.mode, entry.value) for entry in list_backends() if entry.distribution in FIRST_PARTY.values()
    }
    for row in named:
        assert row["import"] == row["distribution"].replace("-", "_") == row["entry point in kvq.backends"].partition(".")[0]
    assert {row["alias"]: row["mode"] for row in named if row["alias"]} == dict(ALIASES)


def test_the_tables_of_modes_show_what_was_measured() -> None:
    stored = {row["mode"]: row["bytes per token and head"] for row in table(ACCURACY, "mode")}
    aliases = {row["mode"]: (row["alias"], row["distribution"]) for row in table(START, "distribution")}
    for row, short, bar in zip(table(CHOOSING, "mode"), table(README, "mode"), plots.bars(), strict=True):
        assert row["mode"] == short["mode"] == bar.mode and row["bytes per token and head"] == stored[bar.mode]
        assert (float(row["times smaller"]), float(row["decode, x FlashAttention 3 bf16"])) == (bar.times_smaller, bar.times_as_fast)
        assert (short["alias"], short["package"]) == aliases[bar.mode]
        assert all(short[column] == row[column] for column in short.keys() & row.keys())
        assert row["loss, bits per byte"] == ("exact" if bar.mode == "none" else f"+{bar.loss:.2f} %")


def test_the_readme_claims_what_the_tables_show() -> None:
    guide = {(row["cache"], row["attention"]): row for row in table(TEXTS["docs/vllm.md"], "cache")}
    assert all(row.items() <= guide[row["cache"], row["attention"]].items() for row in table(README, "cache"))
    quantized = [bar for bar in plots.bars() if bar.mode != "none"]
    for what, values in (("the speed", [b.times_as_fast for b in quantized]), ("smaller", [b.times_smaller for b in quantized])):
        # Rounded down: the tables' figures are rounded once already.
        least, most = (math.floor(round(100 * value) / 10) / 10 for value in (min(values), max(values)))
        assert f"{least} to {most} times {what}" in " ".join(README.split())
    for theme in plots.THEMES:  # otherwise: hatch run tables
        script, kept = plots.kept_in("modes", theme)
        assert script == plots.SCRIPT and [plots.Bar(**bar) for bar in json.loads(kept)] == plots.bars()


def content(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def speed() -> Iterator[tuple[Path, Marks, str]]:
    runs = tables.Run(content(tables.DATA)), tables.Run(content(tables.H100))
    assert ["H100" in run.machine["gpu"] for run in runs] == [False, True]
    assert not any(run.machine["commit"].endswith("dirty") for run in runs)
    for path, parts in tables.pages(*runs).items():
        yield from ((path, marks, expected) for marks, expected in parts.items())
    yield other_gpus.PAGE, other_gpus.MARKS, other_gpus.part()


def accuracy() -> Iterator[tuple[Path, Marks, str]]:
    found, gpu = content(accuracy_report.DATA), content(accuracy_report.GPU_DATA) if accuracy_report.GPU_DATA.exists() else None
    assert found["sizes"] == json.loads(json.dumps(asdict(accuracy_report.Sizes()))), "measured with the sizes that the script has now"
    assert gpu is None or agreement.agree(agreement.agreements(found, gpu))
    for marks, expected in (accuracy_page.parts(found, gpu) | {compare.MARKS: compare.table(content(compare.DATA))}).items():
        yield accuracy_page.PAGE, marks, expected
    for figure in (f"accuracy-{name}" for name in ("position", "layers", "needles")):
        for theme in plots.THEMES:
            assert plots.kept_in(figure, theme) == (accuracy_page.SCRIPT, accuracy_page.figure_key(found)), f"{figure}, {theme}"


@pytest.mark.quick
@pytest.mark.parametrize("parts", [speed, accuracy])
def test_pages_show_the_committed_figures(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise: ``hatch run tables``, ``hatch run accuracy --from-data``, ``hatch run compare --from-data``."""
    monkeypatch.setenv(SWITCH, "")
    for path, marks, expected in parts():
        assert part(path.read_text(encoding="utf-8"), marks) == expected, marks[0]


@pytest.mark.quick
def test_clocks_of_gpus_give_their_datasheets_tflops() -> None:
    """Of float32: two operations a clock and lane."""
    rates = {name: 2 * (64 if gpu.target == "sm_80" else 128) * gpu.sms * gpu.clock / 1e12 for name, gpu in other_gpus.GPUS.items()}
    expected = {"A100 80GB SXM": 19.5, "A10": 31.2, "RTX 3090": 35.6, "L4": 30.3, "L40S": 91.6, "RTX 4090": 82.6}
    assert rates == pytest.approx(expected | {"H100 SXM": 67, "H200": 67, "B200": 75, "RTX 5090": 104.8}, abs=0.15)


@pytest.mark.quick
def test_what_is_no_whole_run_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = content(tables.DATA)
    at = next(i for i, row in enumerate(run["rows"]) if row["mode"] == "none")  # of others' kernels a table has blanks
    failed = run["rows"][at] | {"us": None, "error": "OutOfMemoryError", "hbm": None, "x_none": None, "x_peer": None}
    cut_off, an_error = (
        json.dumps(run | {"rows": rows}) for rows in (run["rows"][:-1], [*run["rows"][:at], failed, *run["rows"][at + 1 :]])
    )
    file, paths = tmp_path / "benchmarks.json", (tables.DATA, tables.H100, tables.PAGE, tables.FIGURES)
    before = [path.read_bytes() for path in paths]
    for text, said in (("[", str(file)), (cut_off, "int2_per_token_head in setting w8192-8"), (an_error, "in setting A:")):
        file.write_text(text)
        with pytest.raises(SystemExit, match="2"):
            tables.main([str(file)])
        assert said in capsys.readouterr().err and [path.read_bytes() for path in paths] == before


SHOWN = [
    (command, out.rstrip("\n"), bool(block["varies"]))
    for block in CONSOLE.finditer(TEXTS["docs/command-line.md"])
    for command, _, out in (part.partition("\n") for part in block["body"].split("$ ")[1:])
]
"""(command, output, whether it varies) of the console blocks, in order."""


@pytest.mark.quick
@pytest.mark.parametrize(("command", "out", "varies"), SHOWN, ids=[command for command, *_ in SHOWN])
def test_what_the_page_shows_is_what_is_printed(command: str, out: str, varies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(ROOT)
    program, name, *options = shlex.split(command)
    assert program == "kvq" and {shlex.split(command)[1] for command, *_ in SHOWN} == set(app.commands)
    if varies:
        app.commands[name].make_context(name, options)
        modes, rows = {entry.mode for entry in list_backends()}, {line.split()[0] for line in out.splitlines() if line}
        assert not modes & rows or rows >= modes
    else:
        ran = kvq(name, *options)
        assert ran.status == (2 if out.startswith("Error: ") else 0)
        assert re.sub(r"\b\d+\.\d+\.\d+\b", "VERSION", (ran.out + ran.err).rstrip("\n")) == re.sub(r"\b\d+\.\d+\.\d+\b", "VERSION", out)
