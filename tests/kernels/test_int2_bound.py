"""int2's write kernel bounds the scales of keys with few outer cells only: no other key needs it. The suite compares those it bounds."""

import math

import pytest

from kvq_int2 import codec
from kvq_int2.backend import Int2PerTokenHead


def least_cosine(size: int, num_outer: int, at_boundary: int) -> float:
    """Of y and c, for ``num_outer`` values in outer cells, all at the boundary but one, ``at_boundary`` inner ones there, the rest 0."""
    large = math.sqrt(size - (num_outer - 1 + at_boundary) * codec.BOUNDARY**2)
    shadow = codec.OUTER * ((num_outer - 1) * codec.BOUNDARY + large) + codec.INNER * at_boundary * codec.BOUNDARY
    level_squares = num_outer * codec.OUTER**2 + (size - num_outer) * codec.INNER**2
    return shadow / math.sqrt(size * level_squares)


@pytest.mark.quick
def test_no_key_past_the_cut_off_needs_a_bound() -> None:
    from kvq_int2.quantize import FEW_LESS, FEW_SHARE  # imports triton

    for size in range(Int2PerTokenHead.head_size_multiple, Int2PerTokenHead.max_head_size + 1, Int2PerTokenHead.head_size_multiple):
        cut_off = max(1, math.ceil(size * FEW_SHARE.value - FEW_LESS.value))
        for num_outer in range(cut_off, size + 1):
            # Concave in ``at_boundary``: least at an end.
            least = min(least_cosine(size, num_outer, at_boundary) for at_boundary in (0, size - num_outer))
            assert least * codec.LARGEST_FACTOR > 1.02, f"{num_outer} outer cells of {size}"
