"""The kernels of ``docs/write-a-backend.md`` store and read what the page's ``encode`` and ``decode`` say, by the benchmarks' gate.
Its blocks are put into the files that it names, as a reader would, and nothing else.
"""

import importlib
import re
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

import gate
from kvq_core.testing import places

PAGE = Path(__file__).parents[2] / "docs" / "write-a-backend.md"
FILES = {
    "codec": ["def dequantize("],
    "backend": ["if TYPE_CHECKING:", "class Int4Plain(", "def kernels(self)"],
    "quantize": ["def write_plane("],
    "format": ["= PlaneFormat("],
    "kernels": ["= Kernels("],
}
"""A mark of each block of a module."""


@pytest.fixture(autouse=True, scope="module")
def plain_torch() -> None:
    """Nothing, in place of what the other tests of tools do: these run kernels."""


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
@pytest.mark.parametrize(("lengths", "query_len"), [((1, 17, 70), 1), ((37, 20), 20)], ids=["decode", "prefill"])
@pytest.mark.parametrize("where", places.params("interpret", "gpu"))
def test_the_kernels_of_the_page(
    where: str, lengths: tuple[int, ...], query_len: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = places.enter(where, monkeypatch)
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    package = tmp_path / "kvq_int4_plain"
    package.mkdir()
    for module, marks in FILES.items():
        parts = [next(block for block in blocks if mark in block) for mark in marks]
        methods = [textwrap.indent(part, "    ") if part.startswith("def ") else part for part in parts]
        (package / f"{module}.py").write_text("\n".join(methods), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for module in FILES:
        monkeypatch.delitem(sys.modules, f"kvq_int4_plain.{module}", raising=False)
    backend = importlib.import_module("kvq_int4_plain.backend").Int4Plain()
    problem = replace(gate.PROBLEMS[0], seq_lens=lengths, query_len=query_len, query_heads=4, kv_heads=2, head_size=64, block_size=8)
    (verdict,) = gate.check_all([gate.Check(backend, problem)], place.device)
    assert verdict.green, verdict
