"""Which keys' scales codec.py's bound can hold back: those with few values in outer cells. Others are written without it.

The bound holds a key's scale back where f < 1 / LARGEST_FACTOR, f the cosine of its rotated row y and its levels c. For n outer cells of
d, ||c|| is fixed, and <y, c> = sum c_i sqrt(u_i) is a concave function of u = y^2, which lies in the polytope sum u = ||y||^2, u_i >= B^2
in outer cells and u_i <= B^2 in inner ones, B = BOUNDARY ||y|| / sqrt(d). So f is least at a vertex: all but one of u are at an end of
their ranges. As B^2 is below the mean of u, that one is an outer cell's, and u = B^2 in the other n - 1, B^2 in k inner cells and 0 in d
- n - k. There f is concave in k: least at k = d - n, where |y| >= B throughout and f > 0.8, or at k = 0.
"""

import math

from kvq_int2.codec import BOUNDARY, INNER, LARGEST_FACTOR, OUTER

MARGIN = 1.01
"""How far above the bound's range a cosine has to be. Float32, in lengths and in the placing of cells, is a thousand times nearer."""


def least_cosine(size: int, num_outer: int) -> float:
    """The least f of a row of ``size`` channels, ``num_outer`` (1 or more) of them in outer cells."""
    return min(_cosine(size, num_outer, at_boundary) for at_boundary in (0, size - num_outer))


def fewest_outer(size: int) -> int:
    """The number of outer cells from which on no key of ``size`` channels needs the bound."""
    needing = (n for n in range(size, 0, -1) if least_cosine(size, n) * LARGEST_FACTOR <= MARGIN)
    return next(needing, 0) + 1


def _cosine(size: int, num_outer: int, at_boundary: int) -> float:
    """Of y and c where all outer values but one are at the boundary, ``at_boundary`` inner ones too, and the rest are 0."""
    large = math.sqrt(size - (num_outer - 1 + at_boundary) * BOUNDARY**2)
    shadow = OUTER * ((num_outer - 1) * BOUNDARY + large) + INNER * at_boundary * BOUNDARY
    return shadow / math.sqrt(size * (num_outer * OUTER**2 + (size - num_outer) * INNER**2))
