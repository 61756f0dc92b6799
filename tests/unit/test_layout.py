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


def pages(mode, layout, device, dtype=torch.bfloat16):
    return Pages(get_backend(mode), Geometry(B, P, H, D, DV, L, dtype, layout), device, None, None)


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
    for caches in memory.layers:
        assert caches.key_cache.shape == (B, P, H, backend.packed_head_size(D))
        assert caches.value_cache.shape == (B, P, H, backend.packed_head_size(DV))
        assert caches.key_cache.dtype == caches.value_cache.dtype == backend.cache_dtype(torch.bfloat16)
        for scale in (caches.k_scale_cache, caches.v_scale_cache):
            if backend.needs_scale_caches:
                assert scale.shape == (B, P, H) and scale.dtype == torch.float32
            elif backend.reads_scales:
                assert scale.shape == (1,) and scale.dtype == torch.float32
            else:
                assert scale is None
    views = [view for caches in memory.layers for view in named(caches).values() if view.shape[0] == B]
    count(views)
    buffers = [tensor for tensor in memory.tensors.values() if tensor.dtype == torch.uint8]
    assert all(bool((buffer == 1).all()) for buffer in buffers)
    assert sum(view.nbytes for view in views) == memory.nbytes == memory.bytes_per_slot * B * P


def test_the_order_of_bytes(device):
    """Tokens of a head are neighbours in head_major, heads of a token in token_major, K and V of a cell in interleaved."""
    strides = {layout: pages("int4", layout, device).layers[1].key_cache.stride() for layout in LAYOUTS}
    cell = D // 2 + 4 + DV // 2 + 4
    assert strides == {
        "head_major": (H * P * D // 2, D // 2, P * D // 2, 1),
        "token_major": (P * H * D // 2, H * D // 2, D // 2, 1),
        "interleaved": (P * H * cell, H * cell, cell, 1),
    }
    assert pages("int4", "head_major", device).layers[0].k_scale_cache.stride() == (H * P, 1, P)
    caches = pages("int4", "interleaved", device).layers[0]
    first = caches.key_cache.data_ptr()
    offsets = [tensor.data_ptr() - first for tensor in (caches.k_scale_cache, caches.value_cache, caches.v_scale_cache)]
    assert offsets == [D // 2, D // 2 + 4, D // 2 + 4 + DV // 2]


@pytest.mark.parametrize("mode", ["none", "fp8_per_tensor", "int4"])
@pytest.mark.parametrize("heads_first", [False, True])
def test_cells_of_an_engine(mode, heads_first, device):
    """vLLM's cells come token-major or head-major, possibly as a slice of something larger; the views must find the same bytes."""
    backend = get_backend(mode)
    stored = fields(backend, D, DV, torch.bfloat16)
    big = torch.randint(0, 255, (B + 1, *((H, P) if heads_first else (P, H)), cell_size(stored)), dtype=torch.uint8, device=device)
    cells = big[1:].transpose(1, 2) if heads_first else big[1:]
    given = cells.view(torch.bfloat16) if mode == "none" else cells  # in the model's own dtype
    views, first = vars(cell_views(backend, given, D, DV, torch.bfloat16)), 0
    assert len(stored) == len(named(cell_views(backend, given, D, DV, torch.bfloat16)))
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
    size = P * H * cell_size(fields(backend, D, DV, torch.bfloat16))
    memory = torch.zeros(B, size + padding, dtype=torch.uint8, device=device)
    caches = page_views(backend, memory, P, H, D, DV, torch.bfloat16)
    for view in named(caches).values():
        assert view.shape[:3] == (B, P, H) and view.stride(2) == P * view.stride(1)
    count(named(caches).values())
    assert bool((memory[:, :size] == 1).all()) and not bool(memory[:, size:].any())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.zeros(1, 8, 1, 35, dtype=torch.uint8), r"cells: got shape \(1, 8, 1, 35\), torch.uint8, need .* cells of 36 bytes"),
        (torch.zeros(1, 8, 1, 72, dtype=torch.uint8)[..., ::2], "cells: got strides .*, need a contiguous last dimension"),
        (torch.zeros(290, dtype=torch.uint8)[2:].view(1, 8, 1, 36), "cells: got strides .* from byte 2"),
        (torch.zeros(2, 8 * 2 * 36 - 1, dtype=torch.uint8), r"pages: got shape \(2, 575\), torch.uint8, need \[num_blocks, at least 576\]"),
        (torch.zeros(8 * 2 * 36, 2, dtype=torch.uint8).T, "pages: got strides"),
        (torch.zeros(2, 8 * 2 * 36 + 2, dtype=torch.uint8), "pages: got block stride 578 from byte 0"),
        (torch.zeros(2, 600, dtype=torch.uint8)[:, 2:], "pages: got block stride 600 from byte 2"),
        (None, r"layout: got interleaved, cells of 6 key_cache.*need k_scale_cache on a multiple of 4 bytes"),
    ],
)
def test_what_has_no_such_layout_is_refused(given, message):
    backend = get_backend("int4")
    with pytest.raises(ArgumentError, match=message):
        if given is None:
            Pages(get_backend("int2"), Geometry(B, P, H, 24, 24, 1, torch.bfloat16, "interleaved"), torch.device("cpu"), None, None)
        elif given.dim() == 2:
            page_views(backend, given, 8, 2, 32, 24, torch.bfloat16)
        else:
            cell_views(backend, given, 32, 24, torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("block_size", size) for size in (0, -8, 12, 8.0)),
        *(("num_kv_heads", heads) for heads in (0, True, 2.0)),
        *(("head_size", size) for size in (0, 2048, "32")),
        *(("dtype", dtype) for dtype in (torch.int32, torch.float64, "float32")),
        ("pages", np.zeros((2, 4096), dtype=np.uint8)),
    ],
)
def test_pages_that_no_cache_has_are_refused(name, wrong):
    given = {"pages": torch.zeros(2, 4096, dtype=torch.uint8), "block_size": 8, "num_kv_heads": 2, "head_size": 32, "head_size_v": 32}
    given |= {"dtype": torch.float32, name: wrong}
    with pytest.raises(ArgumentError, match=f"^{name}: got "):
        page_views(get_backend("none"), **given)
