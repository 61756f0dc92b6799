"""What a mode's author needs to write kernels: import these names from here, and nothing else of :mod:`kvq_core.kernels`.

A mode is a :class:`Format`: for K and for V what codes are as numbers, and jit functions that turn lanes into operands and new rows into
lanes. Its kernels are :func:`write_kernel` and :func:`attention_kernel` behind entries of its own. What is here keeps its name and
meaning; :mod:`.sm90` has what Gluon kernels for Hopper are made of, and all else in :mod:`kvq_core.kernels` may change.
"""

from kvq_core.kernels.attention import UNSPECIALIZED, attention_kernel
from kvq_core.kernels.config import ReadConfig, WriteConfig
from kvq_core.kernels.dots import dot
from kvq_core.kernels.formats import Format, Kernels, PlaneFormat, Sm90Kernels
from kvq_core.kernels.hadamard import ROOM, rotated_pairs, ways_of
from kvq_core.kernels.heads import Heads
from kvq_core.kernels.masks import by_key, by_row
from kvq_core.kernels.packing import deinterleave, interleave
from kvq_core.kernels.rounding import e4m3_pair, floor_bits, largest, least, reciprocal, rounded_scale, square_root, to_float, widest
from kvq_core.kernels.store import any_row, in_head, load_rows, store_lanes, store_scales, store_side_bytes, write_kernel

__all__ = [
    "ROOM",
    "UNSPECIALIZED",
    "Format",
    "Heads",
    "Kernels",
    "PlaneFormat",
    "ReadConfig",
    "Sm90Kernels",
    "WriteConfig",
    "any_row",
    "attention_kernel",
    "by_key",
    "by_row",
    "deinterleave",
    "dot",
    "e4m3_pair",
    "floor_bits",
    "in_head",
    "interleave",
    "largest",
    "least",
    "load_rows",
    "reciprocal",
    "rotated_pairs",
    "rounded_scale",
    "square_root",
    "store_lanes",
    "store_scales",
    "store_side_bytes",
    "to_float",
    "ways_of",
    "widest",
    "write_kernel",
]
