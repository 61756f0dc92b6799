"""The kernels of ``docs/write-a-backend.md`` write what the page's ``encode`` says, and read what its ``decode`` says.
Its blocks are put into a file, as a reader would.
"""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kvq_core.testing import places
from kvq_core.testing.places import Place

PAGE = Path(__file__).parents[2] / "docs" / "write-a-backend.md"


def module_of(folder: Path) -> ModuleType:
    """The page's codec, class and kernels as one module; a class ``WithKernels`` uses the kernels."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    codec, backend = (next(block for block in blocks if mark in block) for mark in ("def quantize(", "class Int4Plain"))
    kernels = [block for block in blocks if "kvq_core.kernels.api" in block]
    joined = """
class WithKernels(Int4Plain):
    mode = "int4_plain_with_kernels"

    def kernels(self):
        return KERNELS
"""
    path = folder / "int4_plain_of_the_page.py"
    path.write_text("\n".join([codec, backend, *kernels, joined]), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True, scope="module")
def plain_torch() -> None:
    """Nothing, in place of what the other tests of tools do: these run kernels."""


@pytest.fixture(params=places.params("interpret", "gpu"))
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    return places.enter(request.param, monkeypatch)


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
def test_the_kernels_of_the_page_write_what_encode_says(place: Place, tmp_path: Path) -> None:
    backend = module_of(tmp_path).WithKernels()
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


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
def test_the_kernels_of_the_page_read_as_decode_says(place: Place, tmp_path: Path) -> None:
    """Its class without kernels attends to the same pages in torch."""
    module = module_of(tmp_path)
    length, size = 20, 64
    generator = torch.Generator().manual_seed(3)
    key, value, q = (torch.randn(length, heads, size, generator=generator).to(place.device) for heads in (2, 2, 8))
    pages = [torch.zeros(4, 8, 2, size // 2, dtype=torch.uint8, device=place.device) for _ in range(2)]
    backends = module.WithKernels(), module.Int4Plain()
    k_scales, v_scales = backends[0].allocate_scale_caches(4, 8, 2, place.device)
    scales = {"k_scale_cache": k_scales, "v_scale_cache": v_scales}
    backends[0].reshape_and_cache(key, value, *pages, torch.arange(length, device=place.device), **scales)
    for rows in (1, length):  # decode, and prefill
        batch = {
            "cu_seqlens_q": torch.tensor([0, rows], dtype=torch.int32, device=place.device),
            "max_seqlen_q": rows,
            "seqused_k": torch.tensor([length], dtype=torch.int32, device=place.device),
            "max_seqlen_k": length,
            "block_table": torch.arange(4, dtype=torch.int32, device=place.device)[None],
        }
        outs = [torch.empty_like(q[:rows]) for _ in backends]
        for backend, out in zip(backends, outs, strict=True):
            backend.unified_attention(q[-rows:], *pages, out, softmax_scale=size**-0.5, **batch, **scales)
        torch.testing.assert_close(*outs, rtol=0, atol=4e-3)
