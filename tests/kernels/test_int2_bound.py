"""int2's write kernel bounds the scales of keys with few outer cells only: no other key needs it, and no row comes back worse than zero."""

import math

import pytest
import torch

from kvq_core import get_backend
from kvq_core.hadamard import block_hadamard, block_of
from kvq_core.testing import places, scene
from kvq_core.testing.cases import Case
from kvq_core.testing.places import Place
from kvq_core.testing.subject import Subject
from kvq_int2 import codec
from kvq_int2.backend import Int2PerTokenHead

SIZES = (64, 80, 96, 128, 200, 256)
RMS = 256
"""Of rotated rows of integers: every sum over one is exact, and cells are the same in float32 as in float64."""
ABOVE, BELOW = 252, 250
"""The magnitudes next to the boundary that float32 cannot confuse with it."""


def cut_off(size: int) -> int:
    """The fewest outer cells of a key that the kernel leaves without a bound."""
    from kvq_int2.quantize import FEW_LESS, FEW_SHARE

    return max(1, math.ceil(size * FEW_SHARE.value - FEW_LESS.value))


def least_cosine(size: int, num_outer: int, at_boundary: int) -> float:
    """Of y and c, for ``num_outer`` values in outer cells, all at the boundary but one, ``at_boundary`` inner ones there, the rest 0."""
    large = math.sqrt(size - (num_outer - 1 + at_boundary) * codec.BOUNDARY**2)
    shadow = codec.OUTER * ((num_outer - 1) * codec.BOUNDARY + large) + codec.INNER * at_boundary * codec.BOUNDARY
    level_squares = num_outer * codec.OUTER**2 + (size - num_outer) * codec.INNER**2
    return shadow / math.sqrt(size * level_squares)


@pytest.mark.quick
def test_no_key_past_the_cut_off_needs_a_bound() -> None:
    """The least cosine is concave in ``at_boundary``: least at an end."""
    for size in range(Int2PerTokenHead.head_size_multiple, Int2PerTokenHead.max_head_size + 1, Int2PerTokenHead.head_size_multiple):
        for num_outer in range(cut_off(size), size + 1):
            least = min(least_cosine(size, num_outer, at_boundary) for at_boundary in (0, size - num_outer))
            assert least * codec.LARGEST_FACTOR > 1.02, f"{num_outer} outer cells of {size}"


def rows_near(size: int, cut: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated rows [any, size], integers, with about ``cut`` values in outer cells, and how many each has."""
    generator = torch.Generator().manual_seed(size)

    def draw(low: int, high: int, count: int) -> torch.Tensor:
        return torch.randint(low, high + 1, (count,), generator=generator)

    found, counts = [], []
    for num_outer in range(max(1, cut - 8), cut + 9):
        inside, outside = size - num_outer, num_outer - 1
        inner = [torch.zeros(inside), (torch.rand(inside, generator=generator) < 0.1) * BELOW, draw(0, BELOW, inside), draw(0, 9, inside)]
        outer = [torch.full((outside,), ABOVE), draw(ABOVE, ABOVE + 9, outside), draw(ABOVE, 3 * RMS, outside)]
        for small in inner:
            for large in outer:
                squares = size * RMS**2 - int(small.square().sum()) - int(large.square().sum())
                if squares < ABOVE**2:
                    continue
                row = torch.cat([small, large, torch.tensor([round(math.sqrt(squares))])]).float()
                sign = 1 - 2 * draw(0, 1, size)
                found.append((row * sign)[torch.randperm(size, generator=generator)])
                counts.append(num_outer)
    return torch.stack(found), torch.tensor(counts)


@pytest.fixture(params=places.params())
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    return places.enter(request.param, monkeypatch)


@pytest.mark.parametrize("size", SIZES)
def test_rows_near_the_cut_off(place: Place, size: int) -> None:
    cut = cut_off(size)
    y, num_outer = rows_near(size, cut)
    x = block_hadamard(y) / block_of(size)
    assert torch.equal(block_hadamard(x), y), "otherwise sums in another order have other cells"
    backend = get_backend("int2_per_token_head")
    case = Case(query_lens=(1,), seq_lens=(len(x),), head_size=size, num_kv_heads=1, dtype=torch.float32)
    built = scene.build(case, backend, place.device)
    built.key[:, 0], built.value[:, 0] = x.to(built.device), x.to(built.device)
    built.write()
    for half in ("key", "value"):
        codes, scales = built.encoded(half, x)
        assert scales is not None
        _, outer = codec.unpack(codes)
        assert torch.equal(outer.sum(-1), num_outer), "the codec's cells"
        assert torch.equal(built.stored(f"{half}_cache", built.slots)[:, 0].cpu(), codes), f"{half}s' bytes"
        # Kernels sum in another order, and divide by a reciprocal.
        tolerance = Subject.scale_tolerance if place.kernels else 0.0
        torch.testing.assert_close(built.stored(f"{half[0]}_scale_cache", built.slots)[:, 0].cpu(), scales, rtol=tolerance, atol=0)
        error = (built.decoded(half, built.slots)[:, 0].cpu() - x.double()).norm(dim=-1) / x.double().norm(dim=-1)
        assert float(error.max()) < 1, f"{half}s: worse than zero"
