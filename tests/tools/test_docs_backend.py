"""The kernels of ``docs/write-a-backend.md`` store and read what the page's ``encode`` and ``decode`` say, by the benchmarks' gate.
Its blocks are put into a file, as a reader would.
"""

import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import pytest

import gate
from kvq_core import QuantKVBackend
from kvq_core.testing import places
from kvq_core.testing.places import Place

PAGE = Path(__file__).parents[2] / "docs" / "write-a-backend.md"
WITH_KERNELS = """
class WithKernels(Int4Plain):
    mode = "int4_plain_with_kernels"

    def kernels(self):
        return KERNELS
"""


@pytest.fixture(autouse=True, scope="module")
def plain_torch() -> None:
    """Nothing, in place of what the other tests of tools do: these run kernels."""


@pytest.fixture(params=places.params("interpret", "gpu"))
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    return places.enter(request.param, monkeypatch)


@pytest.fixture
def backend(tmp_path: Path) -> QuantKVBackend:
    """The page's codec, class and kernels."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    codec, backend = (next(block for block in blocks if mark in block) for mark in ("def quantize(", "class Int4Plain"))
    path = tmp_path / "int4_plain_of_the_page.py"
    kernels = [block for block in blocks if "kvq_core.kernels.api" in block]
    path.write_text("\n".join([codec, backend, *kernels, WITH_KERNELS]), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: QuantKVBackend = module.WithKernels()
    return found


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
@pytest.mark.parametrize(("lengths", "query_len"), [((1, 17, 70), 1), ((37, 20), 20)], ids=["decode", "prefill"])
def test_the_kernels_of_the_page(lengths: tuple[int, ...], query_len: int, backend: QuantKVBackend, place: Place) -> None:
    problem = replace(gate.PROBLEMS[0], seq_lens=lengths, query_len=query_len, query_heads=4, kv_heads=2, head_size=64, block_size=8)
    (verdict,) = gate.check_all([gate.Check(backend, problem)], place.device)
    assert verdict.green, verdict
