"""The kernels of ``docs/write-a-backend.md`` store and read what the page's ``encode`` and ``decode`` say, by the benchmarks' gate.
Its blocks are put into a file, as a reader would.
"""

import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

import gate
from kvq_core.testing import places

PAGE = Path(__file__).parents[2] / "docs" / "write-a-backend.md"


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
    codec, plain = (next(block for block in blocks if mark in block) for mark in ("def quantize(", "class Int4Plain"))
    path = tmp_path / "int4_plain_of_the_page.py"
    path.write_text("\n".join([codec, plain, *(block for block in blocks if "kvq_core.kernels.api" in block)]), encoding="utf-8")
    page = runpy.run_path(str(path))
    with_kernels = type("WithKernels", (page["Int4Plain"],), {"mode": "int4_plain_with_kernels", "kernels": lambda self: page["KERNELS"]})
    problem = replace(gate.PROBLEMS[0], seq_lens=lengths, query_len=query_len, query_heads=4, kv_heads=2, head_size=64, block_size=8)
    (verdict,) = gate.check_all([gate.Check(with_kernels(), problem)], place.device)
    assert verdict.green, verdict
