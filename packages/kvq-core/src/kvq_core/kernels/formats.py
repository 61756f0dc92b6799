"""How a mode's rows look to the kernels, as data and as jit functions. What else kernels are compiled for is in :mod:`.config`."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from triton.runtime import JITFunction

from kvq_core.kernels.cache_keys import settle

SOURCES = ("config.py", "formats.py", "heads.py")
SOURCE = hashlib.sha256(b"".join(Path(__file__).with_name(name).read_bytes() for name in SOURCES)).hexdigest()
"""That of the files of constants, which decides what a kernel becomes as much as the kernel's own source does."""


class Constant(dict[str, object]):
    """Base of what a kernel gets as a compile-time argument.

    Where a process has set one of Triton's JIT hooks, Triton writes the constants of a kernel as JSON, and json writes nothing but its own
    types and those derived from them: hence a dict, whose one item is the fields by the class's name, jit functions as strings.
    """

    def __post_init__(self) -> None:
        fields = vars(self).items()
        self[type(self).__name__] = {name: str(value) if callable(value) else value for name, value in fields}

    def jit_functions(self) -> Iterator[JITFunction[Any]]:
        """Those among the fields, and among the fields of fields."""
        for value in vars(self).values():
            if isinstance(value, Constant):
                yield from value.jit_functions()
            elif isinstance(value, JITFunction):
                yield value

    @property
    def cache_key(self) -> str:
        """What Triton tells compiled kernels on disk apart by. By itself it would take the fields, and find a kernel of another version of
        kvq, in which a property or a jit function among the fields was another."""
        self.settle()
        return f"{self} {SOURCE} {[function.cache_key for function in self.jit_functions()]}"

    def settle(self) -> None:
        """:func:`settle` the jit functions, before anything hashes this constant: their hashes are made of their keys."""
        for function in self.jit_functions():
            settle(function)


@dataclass(frozen=True)
class PlaneFormat(Constant):
    """How the rows of K or of V look to the read and write kernels: numbers, and the mode's mathematics as jit functions (*hooks*).

    Attributes:
        name: distinguishes modes of two ways in plan tables.
        ways: channels that share a 16-bit lane: channel ``ways * lane + s`` is in way s. 1: rows are not packed.
        rotated: rows went through a Hadamard transform with ``signs``.
        signs: bit i set: sign +1 of channel i. ``None``: no signs.
        divided: dequantization divides by the transform's block.
        scales: ``"row"``: one float32 for each (token, head). ``"plane"``: one for all. ``""``: none.
        level, exponent_scale: an operand is the number, zero point included, over their product; the latter is a power of two.
        converts: where the hardware converts fp8, operands are over ``level`` alone.
        gains: (in decode, elsewhere): for each way the power of two by which its operands are larger than ``level`` and
            ``exponent_scale`` say; elsewhere all ways have the same. Empty: 1. Values that are subnormal, rotated and have a zero point
            should have their codes in bit 4 or above, by a gain or the ``exponent_scale``: tensor cores truncate smaller ones, and
            un-rotation concentrates that bias in one or two channels.
        parts: of K, above 1: rows have the channels that the smoothing's order says, in so many parts (kvq_core.smoothing.order), which
            are rotated each by itself.
        zero: the zero point of all codes.
        huge_scales: of K: sums of operands times the scale of a huge row overflow unless the query's factor comes first.
        has_nan: a code can be NaN: lanes of keys that are not there are loaded as 0.
        grid: of rotated rows whose scales have at most kvq_core.hadamard.SCALE_BITS significant bits. A number times ``grid``, rounded if
            that is no integer, is one below 16 in magnitude, zero point off: rows may be staged without un-rotating them. 0: they may not.
        staged: rows are float16 in a workspace's blocks (kvq_core.kernels.staging); rotated ones way after way.
        one_scale: of staged K: the keys of a tile share a scale, if the tile has an entry in its table.
        side_bytes: a row's lanes, an even number n, are followed by a byte for each, in the order 0, n / 2, 1, n / 2 + 1, ...
        unpack: ``unpack(lanes, C)``: a tuple of ``ways`` float16 tensors. With ``side_bytes``, ``lanes`` is (uint16 lanes, the byte
            beside each, uint16).
        split: ``split(word)``: (scale, zero point) of scale words, float32, where each row has its own zero point.
        weighted_zeros: of V: ``weighted_zeros(weights, words, C)`` sums the zero points up, [ROWS] float32.
        write_plane: ``write_plane(source, plane, rows, IS_VALUE, HEADS, C)`` quantizes and stores new rows.
    """

    name: str
    ways: int
    rotated: bool = False
    signs: int | None = None
    divided: bool = False
    scales: str = "row"
    level: float = 1.0
    exponent_scale: float = 1.0
    converts: bool = False
    gains: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    parts: int = 1
    zero: float = 0.0
    huge_scales: bool = False
    has_nan: bool = False
    side_bytes: bool = False
    grid: float = 0.0
    staged: bool = False
    one_scale: bool = False
    unpack: Any = None
    split: Any = None
    weighted_zeros: Any = None
    write_plane: Any = None

    @property
    def packed(self) -> bool:
        return self.ways > 1

    @property
    def in_float16(self) -> bool:
        """Whether operands are float16, whatever the queries are."""
        return self.packed or self.staged

    @property
    def variant(self) -> str:
        """The name by which launch plans tell formats of two ways apart."""
        return self.name if self.ways == 2 else ""

    @property
    def ordered(self) -> bool:
        return self.parts > 1

    @property
    def way_signs(self) -> tuple[int | None, ...]:
        """``signs`` way by way: bit i of the s-th is that of channel ``ways * i + s``."""
        signs = self.signs
        if signs is None:
            return (None,) * self.ways
        lanes = range(-(-signs.bit_length() // self.ways))
        return tuple(sum((signs >> (self.ways * i + s) & 1) << i for i in lanes) for s in range(self.ways))


@dataclass(frozen=True)
class Format(Constant):
    """The formats of K and of V, which need not be the same.

    ``narrow_n`` gives each of a few query rows two columns where a softcap makes scores expensive: for eight ways. ``ordered_key``: the
    format of K where a smoothing has an order of channels, if the mode takes one.
    """

    key: PlaneFormat
    value: PlaneFormat
    narrow_n: bool = False
    ordered_key: PlaneFormat | None = None

    @property
    def halves(self) -> tuple[PlaneFormat, PlaneFormat]:
        return (self.key, self.value)

    @property
    def wider(self) -> PlaneFormat:
        """The half with more bytes, which launch plans go by."""
        return min(self.halves, key=lambda half: half.ways)

    @property
    def alike(self) -> bool:
        """Whether both halves have the same lanes."""
        return self.key.ways == self.value.ways

    @property
    def packed(self) -> bool:
        return self.key.packed and self.value.packed

    @property
    def rotated(self) -> bool:
        return self.key.rotated or self.value.rotated


class Sm90Kernels(NamedTuple):
    """A mode's kernels in Gluon, for sm_90 alone: prefill, multi-row decode over split keys, and writes. Each may be ``None``.

    ``staged``: kvq's own, for prefill over staged tiles."""

    prefill: Any = None
    decode_multirow: Any = None
    write: Any = None
    staged: Any = None


@dataclass(frozen=True)
class Kernels:
    """What a mode's ``kernels`` returns: its format, its two entries, and a function that imports and returns its Gluon kernels, which not
    every Triton can compile."""

    format: Format
    write: Any
    attend: Any
    sm90: Callable[[], Sm90Kernels] | None = None

    def for_keys(self, *, ordered: bool) -> "Kernels":
        """Those for keys that have an order of channels, or none."""
        key = self.format.ordered_key
        if not ordered:
            return self
        if key is None:
            raise NotImplementedError("kernels for an order of channels, without an ordered_key in their format")
        return Kernels(replace(self.format, key=key, ordered_key=None), self.write, self.attend, self._sm90_ordered)

    def _sm90_ordered(self) -> Sm90Kernels:
        """The kernels for sm_90 that rotate keys and values apart from each other."""
        return Sm90Kernels() if self.sm90 is None else Sm90Kernels(decode_multirow=self.sm90().decode_multirow)
