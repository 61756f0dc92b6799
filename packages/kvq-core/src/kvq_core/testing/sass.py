"""NVIDIA's machine code (SASS) as cuobjdump prints it: its instructions, its loops, and what costs time in them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PRODUCTS = frozenset({"HMMA", "IMMA", "QMMA", "HGMMA", "IGMMA", "QGMMA", "UTCHMMA", "UTCQMMA"})
"""Matrix products."""

_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z0-9_.]+)([^;]*);", re.MULTILINE)
_TARGET = re.compile(r"\b0x([0-9a-f]+)\s*$")
_ENDS = ("EXIT", "RET")


@dataclass(frozen=True)
class Instruction:
    """``code``: the operation with its modifiers, such as ``LDS.U8``. ``guarded``: a predicate decides whether it is executed."""

    address: int
    code: str
    operands: str
    guarded: bool

    @property
    def operation(self) -> str:
        """The code without its modifiers."""
        return self.code.partition(".")[0]

    @property
    def target(self) -> int | None:
        """The address that it may go on at (a branch or call)."""
        found = _TARGET.search(self.operands) if self.operation in ("BRA", "CALL") else None
        return int(found[1], 16) if found else None

    @property
    def falls_through(self) -> bool:
        """Whether the next instruction may follow it. A branch may have its predicate among its operands; a call returns."""
        unconditional = self.operation in _ENDS or (self.operation == "BRA" and "," not in self.operands)
        return self.guarded or not unconditional


@dataclass(frozen=True)
class Counts:
    """What a stretch of code has of what costs time; each instruction is one of a warp.

    ``conversions``: integer to float. ``roundings``: float to integer. ``byte_loads``: single bytes of shared memory. ``local``: loads and
    stores of local memory, where spilled registers are.
    """

    instructions: int
    conversions: int
    roundings: int
    byte_loads: int
    barriers: int
    local: int

    @classmethod
    def of(cls, code: Sequence[Instruction]) -> Counts:
        def number(*operations: str) -> int:
            return sum(one.operation in operations for one in code)

        return cls(
            instructions=len(code),
            conversions=number("I2F", "I2FP"),
            roundings=number("F2I", "FRND"),
            byte_loads=sum(re.match(r"LDS\.[US]8\b", one.code) is not None for one in code),
            barriers=number("BAR"),
            local=number("LDL", "STL"),
        )


def parse(dump: str) -> list[Instruction]:
    """The instructions of ``cuobjdump -sass``, in order, for one kernel."""
    return [Instruction(int(m[1], 16), m[3], m[4], m[2] is not None) for m in _LINE.finditer(dump)]


def pipelined_loop(code: Sequence[Instruction]) -> list[Instruction] | None:
    """The innermost loop that has matrix products and is fed by asynchronous copies to shared memory (LDGSTS), or by other warps, which it
    tells what is free (SYNCS.ARRIVE); ``None`` if there is none.

    Of several, beside each other, that of the most products, as masked iterations may be over smaller tiles; then of the fewest
    instructions.
    """
    pipelined = [loop for loop in _loops(code) if _pipelined([code[index] for index in loop])]
    innermost = [[code[index] for index in sorted(loop)] for loop in pipelined if not any(other < loop for other in pipelined)]
    return max(innermost, key=lambda body: (sum(one.operation in PRODUCTS for one in body), -len(body)), default=None)


def _pipelined(body: Sequence[Instruction]) -> bool:
    operations = {one.operation for one in body}
    fed = "LDGSTS" in operations or any(one.code.startswith("SYNCS.ARRIVE") for one in body)
    return fed and not operations.isdisjoint(PRODUCTS)


def _loops(code: Sequence[Instruction]) -> Iterator[set[int]]:
    """The natural loops, as indices into ``code``: a header, and all that leads back to it without passing it.

    Waits are laid out after the kernel's end and branch back into the middle of a loop, so that not every branch backward closes one. Such
    a branch's target is also reached without the branch: only where every way to a branch leads through its target is there a loop.
    Indirect branches (BRX) are not followed: these kernels have none.
    """
    index = {one.address: number for number, one in enumerate(code)}
    after: list[list[int]] = [[] for _ in code]
    before: list[list[int]] = [[] for _ in code]
    latches: dict[int, list[int]] = {}
    for number, one in enumerate(code):
        if one.falls_through and number + 1 < len(code):
            after[number].append(number + 1)
        if one.target is not None:
            after[number].append(index[one.target])
            if index[one.target] < number:
                latches.setdefault(index[one.target], []).append(number)
        for following in after[number]:
            before[following].append(number)
    for header, closing in latches.items():
        around = _reached(after, [0], without=header)
        closing = [latch for latch in closing if latch not in around]
        if closing:
            yield _reached(before, closing, without=header) | {header}


def _reached(edges: list[list[int]], starts: Sequence[int], without: int) -> set[int]:
    """What ``edges`` lead to from ``starts``, these included, without passing ``without``."""
    found: set[int] = set()
    open_ends = [start for start in starts if start != without]
    while open_ends:
        one = open_ends.pop()
        if one not in found:
            found.add(one)
            open_ends += [following for following in edges[one] if following != without]
    return found
