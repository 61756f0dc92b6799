"""The kernel of ``docs/write-a-backend.md`` writes what the page's ``encode`` says: its blocks, put into a file as a reader would."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kvq_core.testing import places
from kvq_core.testing.places import Place

PAGE = Path(__file__).parents[1] / "docs" / "write-a-backend.md"


def module_of(folder: Path) -> ModuleType:
    """The page's codec, class and kernels as one module; a class ``WithKernel`` uses the write kernel."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    codec, backend = (next(block for block in blocks if mark in block) for mark in ("def encode_rows", "class Int4Plain"))
    kernels = next(block for block in blocks if "def launch_write" in block)
    joined = """
class WithKernel(Int4Plain):
    mode = "int4_plain_with_kernel"

    def write(self, rows):
        return launch_write(rows)
"""
    path = folder / "int4_plain_of_the_page.py"
    path.write_text("\n".join([codec, backend, kernels, joined]), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=places.params("interpret", "gpu"))
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    return places.enter(request.param, monkeypatch)


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
def test_the_kernel_of_the_page_writes_what_encode_says(place: Place, tmp_path: Path) -> None:
    backend = module_of(tmp_path).WithKernel()
    heads, size = 2, 64
    rows = [torch.randn(20, heads, size, generator=torch.Generator().manual_seed(i)).to(place.device) for i in range(2)]
    rows[0][3, 1, 5] = float("nan")
    slots = torch.randperm(32, generator=torch.Generator().manual_seed(2))[:20].to(place.device)
    pages = [torch.full((4, 8, heads, size // 2), 0xEE, dtype=torch.uint8, device=place.device) for _ in rows]
    scales = backend.allocate_scale_caches(4, 8, heads, place.device)
    backend.reshape_and_cache(*rows, *pages, slots, k_scale_cache=scales[0], v_scale_cache=scales[1])
    for x, page, scale in zip(rows, pages, scales, strict=True):
        codes, wanted = backend.encode(x)
        torch.testing.assert_close(scale.flatten(0, 1)[slots], wanted, rtol=2.0**-20, atol=0, equal_nan=True)
        whole = ~wanted.isnan()
        got, said = (torch.stack((c & 15, c >> 4), -1).int()[whole] for c in (page.flatten(0, 1)[slots], codes))
        assert (got - said).abs().max() <= 1 and (got != said).float().mean() < 0.001
        untouched = torch.ones(32, dtype=torch.bool, device=place.device).index_fill(0, slots, False)
        assert (page.flatten(0, 1)[untouched] == 0xEE).all()
