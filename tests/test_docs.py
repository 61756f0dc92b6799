"""The documents say what is so: their Python runs, their links lead somewhere, and the README's tables agree with the packages.

A block that cannot run has a comment ``<!-- no-run: reason -->`` on the line before it.
"""

import re
import types
from pathlib import Path
from typing import Any

import pytest

from kvq_core import get_backend, list_backends, unregister_backend
from kvq_core.registry import ALIASES, FIRST_PARTY, IN_PROCESS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "packages").glob("*/README.md"))]
FENCE = re.compile(r"^(?:<!-- no-run: (?P<reason>.+?) -->\n+)?```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)

pytestmark = pytest.mark.quick


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def without_code(text: str) -> str:
    return FENCE.sub("", text)


def anchors(page: Path) -> set[str]:
    """The fragments that lead to a page's headings, as GitHub forms them."""
    headings = HEADING.findall(without_code(page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def run(page: Path) -> dict[str, Any]:
    """Execute a page's Python blocks in order, in one namespace, and return that. Tracebacks show the page's own line numbers."""
    text = page.read_text(encoding="utf-8")
    # A module of its own, since dataclasses and the registry look up where a class was defined.
    space = types.ModuleType(f"docs_{page.stem}").__dict__
    for block in FENCE.finditer(text):
        if block["language"] == "python" and not block["reason"]:
            lines_before = text.count("\n", 0, block.start("code"))
            exec(compile("\n" * lines_before + block["code"], name_of(page), "exec"), space)
    return space


def table(heading: str) -> list[list[str]]:
    """The rows of the README's table whose first column is ``heading``, cells without backticks."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    rows = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return rows


@pytest.fixture(autouse=True)
def plain_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The documents' CPU examples take the torch path, as a reader's would, and leave nothing behind."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("KVQ_DEBUG", raising=False)
    monkeypatch.chdir(tmp_path)
    before = {entry.mode for entry in list_backends() if entry.distribution == IN_PROCESS}
    yield
    for entry in list_backends():
        if entry.distribution == IN_PROCESS and entry.mode not in before:
            unregister_backend(entry.mode)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_runs(page: Path) -> None:
    run(page)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_resolve(page: Path) -> None:
    for target in LINK.findall(without_code(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{name_of(page)}: {target}"
        if fragment:
            assert fragment in anchors(found), f"{name_of(page)}: {target} names no heading of {name_of(found)}"


def test_index_leads_to_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / target).resolve() for target in LINK.findall(index.read_text(encoding="utf-8"))}
    assert {page for page in PAGES if page.is_relative_to(index.parent)} - {index} <= linked


def test_readme_names_the_installed_modes() -> None:
    installed = {(e.distribution, e.mode, e.value) for e in list_backends() if e.distribution in FIRST_PARTY.values()}
    assert {(row[0], row[2], row[3]) for row in table("distribution")} == installed
    for distribution, package, _, value in table("distribution"):
        assert package == distribution.replace("-", "_") == value.partition(".")[0]
    rows = table("mode")
    assert {row[0] for row in rows} == {mode for _, mode, _ in installed}
    assert {row[1]: row[0] for row in rows if row[1]} == dict(ALIASES)


def test_readme_measurements_hold() -> None:
    measured = run(ROOT / "README.md")["measured"]
    for mode, _, size, smaller, bits, error in table("mode"):
        wanted_size, wanted_bits, wanted_error = measured[mode]
        assert float(size) == wanted_size and float(bits) == wanted_bits, mode
        assert float(smaller) == pytest.approx(256 / wanted_size, abs=0.005), mode
        assert float(error) == pytest.approx(wanted_error, rel=0.01), mode


def test_write_a_backend_example_packs() -> None:
    """The example mode's own promises, since its conformance suite is not collected here."""
    space = run(ROOT / "docs" / "write-a-backend.md")
    backend = get_backend("int4_plain")
    assert type(backend) is space["Int4Plain"] and space["TestInt4Plain"].mode == backend.mode
