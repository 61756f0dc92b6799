"""int2's write kernel bounds the scales of keys with few outer cells only: no other key needs it. The suite compares those it bounds."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvq_int2 import codec
from kvq_int2.backend import Int2PerTokenHead
from kvq_int2.bound import MARGIN, fewest_outer, least_cosine

SIZES = range(Int2PerTokenHead.head_size_multiple, Int2PerTokenHead.max_head_size + 1, Int2PerTokenHead.head_size_multiple)


def cosine(size: int, beyond: torch.Tensor, inner: torch.Tensor) -> float:
    """Of a row and its levels, the row as long as ``size`` ones: outer values share what others leave as ``beyond`` says, inner ones are
    ``inner`` of the boundary, 0 to 1."""
    floor = codec.BOUNDARY**2
    squares = floor * inner.square()
    left = size - squares.sum() - len(beyond) * floor
    y = torch.cat([floor + left * beyond / beyond.sum(), squares]).sqrt()
    level = torch.tensor([codec.OUTER] * len(beyond) + [codec.INNER] * len(inner), dtype=torch.float64)
    return float(y @ level / (y.norm() * level.norm()))


@pytest.mark.quick
@pytest.mark.parametrize("size", SIZES)
def test_no_key_with_enough_outer_cells_needs_a_bound(size: int) -> None:
    enough = fewest_outer(size)
    assert all(least_cosine(size, n) * codec.LARGEST_FACTOR > MARGIN for n in range(enough, size + 1))
    if enough > 1:  # and no more are written again than must be: there is a row that needs it
        one = torch.eye(enough - 1, dtype=torch.float64)[0]
        assert cosine(size, one, torch.zeros(size - enough + 1, dtype=torch.float64)) * codec.LARGEST_FACTOR <= MARGIN


@pytest.mark.quick
@given(
    st.sampled_from(SIZES), st.integers(1, 256), st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 10, 100]), st.sampled_from([0, 1, 100])
)
def test_no_row_is_further_from_its_levels_than_the_least_cosine(size: int, num_outer: int, seed: int, one: int, near: int) -> None:
    num_outer = min(num_outer, size)
    generator = torch.Generator().manual_seed(seed)
    drawn = 1 - torch.rand(size, generator=generator, dtype=torch.float64)  # above 0
    beyond, inner = drawn[:num_outer] ** one, drawn[num_outer:] ** near
    assert cosine(size, beyond, inner) >= least_cosine(size, num_outer) * (1 - 1e-12)
