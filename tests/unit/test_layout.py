"""Physical layouts: every view has the logical shape, lies where the drawing says, and copies nothing."""

import numpy as np
import pytest
import torch

from cache_checks import MODES
from kvq_core import get_backend
from kvq_core.cache.layout import LAYOUTS, Geometry, cell_size, cell_views, fields, page_views
from kvq_core.cache.pages import Pages
from kvq_core.errors import ArgumentError

pytestmark = pytest.mark.quick

B, P, H, D, DV, L = 3, 8, 2, 48, 32, 2
SIZES = D, DV, torch.bfloat16


def pages(mode, layout, device):
    return Pages(get_backend(mode), Geometry(B, P, H, D, DV, L, torch.bfloat16, layout), device, None, None)


def named(caches):
    return {name: tensor for name, tensor in vars(caches).items() if tensor is not None}


def count(views):
    """Add 1 to every byte of each view."""
    for view in views:
        raw = view.unsqueeze(-1).view(torch.uint8) if view.dim() == 3 else view.view(torch.uint8)
        raw += 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_have_logical_shapes_and_cover_every_byte_once(mode, layout, device):
    memory, backend = pages(mode, layout, device), get_backend(mode)
    dtype, scales = backend.cache_dtype(torch.bfloat16), (B, P, H) if backend.needs_scale_caches else (1,)
    wanted = {"key_cache": ((B, P, H, backend.packed_head_size(D)), dtype), "value_cache": ((B, P, H, backend.packed_head_size(DV)), dtype)}
    wanted |= dict.fromkeys(("k_scale_cache", "v_scale_cache"), (scales, torch.float32)) if backend.reads_scales else {}
    for caches in memory.layers:
        assert {name: (tuple(view.shape), view.dtype) for name, view in named(caches).items()} == wanted
    views = [view for caches in memory.layers for view in named(caches).values() if view.shape[0] == B]
    count(views)
    assert all(bool((buffer == 1).all()) for buffer in memory.tensors.values() if buffer.dtype == torch.uint8)
    assert sum(view.nbytes for view in views) == memory.nbytes == memory.bytes_per_slot * B * P


def test_scales_are_written_outside_of_inference_mode(device):
    with torch.inference_mode():
        scales = get_backend("int4").allocate_scale_caches(B, P, H, device)
    assert not any(tensor.is_inference() for tensor in scales)


def test_the_order_of_bytes(device):
    """Tokens of a head are neighbours in head_major, heads of a token in token_major, K and V of a cell in interleaved."""
    layers = {layout: pages("int4", layout, device).layers[1] for layout in LAYOUTS}
    cell = D // 2 + 4 + DV // 2 + 4
    assert {layout: caches.key_cache.stride() for layout, caches in layers.items()} == {
        "head_major": (H * P * D // 2, D // 2, P * D // 2, 1),
        "token_major": (P * H * D // 2, H * D // 2, D // 2, 1),
        "interleaved": (P * H * cell, H * cell, cell, 1),
    }
    assert layers["head_major"].k_scale_cache.stride() == (H * P, 1, P)
    starts = {name: tensor.data_ptr() for name, tensor in named(layers["interleaved"]).items()}
    offsets = {"key_cache": 0, "k_scale_cache": D // 2, "value_cache": D // 2 + 4, "v_scale_cache": D // 2 + 4 + DV // 2}
    assert starts == {name: starts["key_cache"] + offset for name, offset in offsets.items()}


@pytest.mark.parametrize("mode", ["none", "fp8_per_tensor", "int4"])
@pytest.mark.parametrize("heads_first", [False, True])
def test_cells_of_an_engine(mode, heads_first, device):
    """vLLM's cells come token-major or head-major, possibly as a slice of something larger; the views must find the same bytes."""
    backend, first = get_backend(mode), 0
    stored = fields(backend, *SIZES)
    big = torch.randint(0, 255, (B + 1, *((H, P) if heads_first else (P, H)), cell_size(stored)), dtype=torch.uint8, device=device)
    cells = big[1:].transpose(1, 2) if heads_first else big[1:]
    views = named(cell_views(backend, cells.view(torch.bfloat16) if mode == "none" else cells, *SIZES))  # in the model's own dtype
    assert views.keys() == {field.name for field in stored}
    for field in stored:
        view = views[field.name] if field.width is not None else views[field.name][..., None]
        assert torch.equal(view.view(torch.uint8), cells[..., first : first + field.nbytes])
        assert view.data_ptr() == cells.data_ptr() + first, "a copy"
        first += field.nbytes


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "fp8_per_tensor"])
@pytest.mark.parametrize("padding", [0, 64])
def test_pages_of_an_engine(mode, padding, device):
    """Planes of pages, padded or not: every byte of a page but the padding once, heads before slots, and a row comes back."""
    backend = get_backend(mode)
    size = P * H * cell_size(fields(backend, *SIZES))
    memory = torch.zeros(B, size + padding, dtype=torch.uint8, device=device)
    views = named(page_views(backend, memory, P, H, *SIZES)).values()
    assert all(view.shape[:3] == (B, P, H) and view.stride(2) == P * view.stride(1) for view in views)
    count(views)
    assert bool((memory[:, :size] == 1).all()) and not bool(memory[:, size:].any())


CELLS = {"head_size": 32, "head_size_v": 24, "dtype": torch.bfloat16}
PAGES = CELLS | {"pages": torch.zeros(2, 4096, dtype=torch.uint8), "block_size": 8, "num_kv_heads": 2}


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("cells", torch.zeros(1, 8, 1, 35, dtype=torch.uint8), r"shape \(1, 8, 1, 35\), torch.uint8, need .* cells of 36 bytes"),
        ("cells", torch.zeros(1, 8, 1, 72, dtype=torch.uint8)[..., ::2], "strides .*, need a contiguous last dimension"),
        ("cells", torch.zeros(290, dtype=torch.uint8)[2:].view(1, 8, 1, 36), "strides .* from byte 2"),
        ("pages", torch.zeros(2, 8 * 2 * 36 - 1, dtype=torch.uint8), r"shape \(2, 575\), torch.uint8, need \[num_blocks, at least 576\]"),
        ("pages", torch.zeros(8 * 2 * 36, 2, dtype=torch.uint8).T, "strides"),
        ("pages", torch.zeros(2, 8 * 2 * 36 + 2, dtype=torch.uint8), "block stride 578 from byte 0"),
        ("pages", torch.zeros(2, 600, dtype=torch.uint8)[:, 2:], "block stride 600 from byte 2"),
        ("pages", np.zeros((2, 4096), dtype=np.uint8), ""),
        *(("block_size", size, "") for size in (0, -8, 12, 8.0)),
        *(("num_kv_heads", heads, "") for heads in (0, True, 2.0)),
        *(("head_size", size, "") for size in (0, 2048, "32")),
        *(("dtype", dtype, "") for dtype in (torch.int32, torch.float64, "float32")),
    ],
)
def test_what_has_no_such_layout_is_refused(name, wrong, said):
    views, given = (cell_views, CELLS) if name == "cells" else (page_views, PAGES)
    with pytest.raises(ArgumentError, match=f"^{name}: got {said}"):
        views(get_backend("int4"), **given | {name: wrong})


def test_scales_that_would_not_be_aligned_are_refused():
    geometry = Geometry(B, P, H, 24, 24, 1, torch.bfloat16, "interleaved")
    with pytest.raises(ArgumentError, match=r"layout: got interleaved, cells of 6 key_cache.*need k_scale_cache on a multiple of 4 bytes"):
        Pages(get_backend("int2"), geometry, torch.device("cpu"), None, None)
