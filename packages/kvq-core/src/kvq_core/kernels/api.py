"""What a mode's author needs to write kernels: import these names from here, and nothing else of :mod:`kvq_core.kernels`.

A mode is a :class:`Format`: for K and for V what codes are as numbers, and jit functions that turn lanes into operands and new rows into
lanes. Its kernels are :func:`write_share` and :func:`attend_share` behind entries of its own. What is here keeps its name and meaning; all
else in this package may change.
"""

from kvq_core.kernels.attention import UNSPECIALIZED, attend_share
from kvq_core.kernels.config import Heads, ReadConfig, WriteConfig
from kvq_core.kernels.dots import dot
from kvq_core.kernels.formats import Format, Kernels, PlaneFormat, Sm90Kernels
from kvq_core.kernels.masks import by_key, by_row
from kvq_core.kernels.packing import from_streams, to_streams
from kvq_core.kernels.rotation import ROOM, rotated_pairs, streams_of
from kvq_core.kernels.rounding import e4m3_pair, floor_bits, largest, least, reciprocal, to_float, widest
from kvq_core.kernels.slots import in_head, load_rows, store_lanes, store_scales, store_side_bytes, write_share

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
    "attend_share",
    "by_key",
    "by_row",
    "dot",
    "e4m3_pair",
    "floor_bits",
    "from_streams",
    "in_head",
    "largest",
    "least",
    "load_rows",
    "reciprocal",
    "rotated_pairs",
    "store_lanes",
    "store_scales",
    "store_side_bytes",
    "streams_of",
    "to_float",
    "to_streams",
    "widest",
    "write_share",
]
